"""Recipes: which operators become int8, and how; and which modules stay in float."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering.errors import InputError, did_you_mean

RECIPES = ("xnnpack-int8",)  # what there is: ExecuTorch's `XNNPACKQuantizer`, symmetric weights


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a program is quantised; InputError if there is no such recipe."""

    name: str
    dynamic: bool
    per_channel: bool

    def __post_init__(self) -> None:
        if self.name not in RECIPES:
            close = difflib.get_close_matches(str(self.name), RECIPES, n=1)
            hint = f"did you mean {close[0]!r}? There is" if close else "there is"
            raise InputError(f"quantize: recipe: none is called {self.name!r}; {hint} {', '.join(RECIPES)}.")

    def __str__(self) -> str:
        kind = "dynamic" if self.dynamic else "static"
        return f"{self.name}, {kind}, per {'channel' if self.per_channel else 'tensor'}"

    def make(self, wanted: Callable[[Node], bool]) -> Any:
        """Return a quantizer for what is wanted."""
        from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as xnnpack
        from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

        class Quantizer(xnnpack.XNNPACKQuantizer):  # type: ignore[misc]
            # Those for training match nothing here, and take seconds to build.
            SUPPORTED_PATTERNS: ClassVar[Any] = [
                each for each in xnnpack.XNNPACKQuantizer.SUPPORTED_PATTERNS if not each.is_qat
            ]

            def transform_for_annotation(self, model: GraphModule) -> GraphModule:
                # ExecuTorch's makes float tensors of numbers, those too that integers such as indices are added to.
                whole = {node: node.args for node in model.graph.nodes if _is_whole(node)}
                model = super().transform_for_annotation(model)
                for node, args in whole.items():
                    node.args = args
                model.recompile()
                return model

            def annotate(self, model: GraphModule) -> GraphModule:
                model = super().annotate(model)
                for node in filter(_is_whole, model.graph.nodes):  # ExecuTorch asks no filter about `cat`
                    node.meta.pop(Q_ANNOTATION_KEY, None)
                return model

        config = xnnpack.get_symmetric_quantization_config(is_per_channel=self.per_channel, is_dynamic=self.dynamic)
        return Quantizer().set_global(config).set_filter_function(lambda node: _can_be(node) and wanted(node))


def _is_whole(node: Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, torch.Tensor) and not value.is_floating_point()


_MASKING = 1e30  # from this magnitude on a constant is there to mask: nothing else is left in a range that holds it


def _can_be(node: Node) -> bool:
    """Return whether a node may be int8: state, masks, integers stay exact; XNNPACK needs operands with dimensions."""
    if node.op != "call_function":
        return True
    if graphs.is_mutating(node) and node.all_input_nodes[0].op == "get_attr":
        return False
    if any(_masks(each) for each in node.all_input_nodes if each.op == "get_attr"):
        return False
    values = [each.meta.get("val") for each in node.all_input_nodes if each.op != "get_attr"]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return not _is_whole(node) and all(value.ndim and value.is_floating_point() for value in tensors)


def _masks(node: Node) -> bool:
    module: Any = node.graph.owning_module
    value = graphs.attribute(module, str(node.target))
    return isinstance(value, torch.Tensor) and value.is_floating_point() and not bool((value.abs() < _MASKING).all())


class Kept:
    """The modules that stay in float, by paths with `*` for anything; what is inside one stays with it."""

    def __init__(self, patterns: Sequence[str]) -> None:
        if isinstance(patterns, str) or not all(isinstance(each, str) and each for each in patterns):
            raise InputError(
                f"quantize: keep: got {patterns!r}, expected a sequence of module paths, such as ['head']."
            )
        self._patterns = tuple(patterns)
        self._matched: set[str] = set()
        self._seen: dict[str, None] = {}
        self.layers: dict[str, None] = {}  # the paths of the operators that stay

    def allows(self, node: Node) -> bool:
        """Return whether a node may be quantised."""
        paths = [path for path, _ in graphs.modules(node) if path]
        self._seen.update(dict.fromkeys(paths))
        found = {
            pattern
            for pattern in self._patterns
            for path in paths
            if fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, f"{pattern}.*")
        }
        self._matched |= found
        if found:
            self.layers[paths[-1]] = None
        return not found

    def check(self) -> None:
        """Raise InputError if a pattern matched no module that would be quantised."""
        for pattern in self._patterns:
            if pattern not in self._matched:
                close = difflib.get_close_matches(pattern, self._seen, n=3, cutoff=0.3) or list(self._seen)[:3]
                hint = did_you_mean(pattern, (), sure=close)
                raise InputError(f"quantize: keep: no module with an operator to quantise is called {pattern!r}.{hint}")
