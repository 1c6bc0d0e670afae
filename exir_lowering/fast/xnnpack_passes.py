"""Passes of XNNPACK that have nothing to do are skipped.

Most of the passes over a partition look for an operator, change the graph around it, and retrace the graph. If the
operator is absent, tracing is all they do, and tracing a graph that was just traced changes nothing. Some of them build
the graphs that they look for, which takes seconds, once per process.

A condition holds for the source of a pass that it was written for: a pass of another version, or one that somebody
has replaced, is run.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from types import FunctionType
from typing import Any

from executorch.exir.pass_base import ExportPass, _ExportPassBase  # the bases of all passes that trace
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from exir_lowering._upstream import pins
from exir_lowering._upstream.locks import original_of
from exir_lowering.fast import Work, current
from exir_lowering.fast.fake_results import update_values

_PASSES = "executorch.backends.xnnpack._passes"


@dataclass(frozen=True, slots=True)
class Condition:
    """When a pass has nothing to do."""

    digest: str  # of its source when the condition was written: see `source_digest`
    # takes the pass's class and a graph; returns whether the pass finds nothing in it; may raise anything
    idle: Callable[[Any, Graph], bool]
    traces: bool = True  # it ends with tracing the graph; it then has nothing to do only if the graph was just traced
    modules: tuple[str, ...] = ()  # helpers whose source counts too


def _calls(graph: Graph) -> Iterable[Node]:
    return (node for node in graph.nodes if node.op == "call_function")


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", ""))


def _lacks(*names: str) -> Callable[[Any, Graph], bool]:
    return lambda kind, graph: not any(_name(node) in names for node in _calls(graph))


def _lacks_table(read: Callable[[Any], Iterable[Any]]) -> Callable[[Any, Graph], bool]:
    """Return a condition on the operators that a pass lists in its class."""
    return lambda kind, graph: not any(node.target in read(kind) for node in _calls(graph))


def _all_of(*names: str) -> Callable[[Any, Graph], bool]:
    """Return the condition that any of the operators that every pattern of a pass has is absent."""
    return lambda kind, graph: not set(names) <= {_name(node) for node in _calls(graph)}


def _no_dim_order(kind: Any, graph: Graph) -> bool:
    table = sys.modules[kind.__module__].MemoryFormatOpsMap
    return not any(node.target in table for node in _calls(graph))


def _no_linear(kind: Any, graph: Graph) -> bool:
    """It removes dead code, and looks at linear operators that are there already."""
    names = ("aten.linear.default", *(target.__name__ for target in kind.targets))
    return all(node.users and _name(node) not in names for node in _calls(graph))


def _no_custom(kind: Any, graph: Graph) -> bool:
    quant = sys.modules[kind.__module__]
    return not any(
        isinstance(node.args[0], Node) and "custom" in node.args[0].meta
        for node in _calls(graph)
        if node.args and (quant.is_quant(node) or quant.is_dequant(node))
    )


def _no_constants(kind: Any, graph: Graph) -> bool:
    """An operator is folded if it is given no value that depends on an input."""
    return not any(node.op == "get_attr" for node in graph.nodes) and all(
        node.all_input_nodes for node in _calls(graph)
    )


def _no_long_cat(kind: Any, graph: Graph) -> bool:
    return not any(_name(node) == "aten.cat.default" and len(node.args[0]) > 5 for node in _calls(graph))  # type: ignore[arg-type]


def _no_conv1d(kind: Any, graph: Graph) -> bool:
    kernels = [node.args[1] for node in _calls(graph) if _name(node) == "aten.convolution.default"]
    return all(isinstance(kernel, Node) and kernel.meta["val"].dim() != 3 for kernel in kernels)


_BATCH_NORMS = ("aten.native_batch_norm.default", "aten._native_batch_norm_legit_no_training.default")

CONDITIONS: dict[str, Condition] = {
    "XNNPACKRemoveCloneOpsTransform": Condition(
        "e405e8424b504457",
        _lacks_table(lambda kind: kind.clone_ops),
        traces=False,
        modules=("executorch.exir.passes.remove_noop_pass",),
    ),
    "DimOrderOpsRevertPass": Condition("fec4b7bd75a1ca58", _no_dim_order),
    "ConvertToUpsampleBilinear2d": Condition(
        "966e043bb7f82be2",
        _lacks("aten.upsample_bilinear2d.vec", "aten.index.Tensor", "aten._unsafe_index.Tensor"),
        modules=("executorch.backends.xnnpack.partition.graphs.bilinear_2d",),
    ),
    "ConvertToLinearPass": Condition(
        "30499cd092ad3dba", _no_linear, modules=("executorch.backends.transforms.addmm_mm_to_linear",)
    ),
    "PropagateCustomMetaPass": Condition(
        "b421e11c557d2462", _no_custom, modules=("executorch.backends.xnnpack.utils.quant_utils",)
    ),
    "ConvertToSDPAPass": Condition(
        "a2e7b37382dc75cd",
        _all_of(
            "aten._softmax.default", "aten.any.dim", "aten.bmm.default", "aten.logical_not.default", "aten.where.self"
        ),
        modules=("executorch.backends.xnnpack.partition.graphs.sdpa",),
    ),
    "ConstPropPass": Condition("3b18157719f948f7", _no_constants),
    "FuseBatchNormPass": Condition("9aaa4d041f05122e", _lacks(*_BATCH_NORMS)),
    "DecomposeBatchNorm": Condition("77912c26ee85b813", _lacks_table(lambda kind: kind.BATCH_NORM_OPS)),
    "FuseActivationPass": Condition("57552f0dd021bed7", _lacks_table(lambda kind: kind.FUSEABLE_ACTIVATIONS)),
    "DecomposeConcatenate": Condition("f0a68d8f64e5b734", _no_long_cat),
    "RemoveGetItemPass": Condition("131d104678b47519", _lacks("aten.max_pool2d_with_indices.default", "aten.max.dim")),
    "InsertPadQDQPass": Condition("cab2e89a8fdfdc16", _lacks("aten.constant_pad_nd.default"), traces=False),
    "Conv1dUnsqueezePass": Condition("405103756f24a57c", _no_conv1d),
    "PReLUReshapePass": Condition("8e8b31e8aa12d3e0", _lacks("aten._prelu_kernel.default")),
    "ChannelsLastTaggedReshapePass": Condition("e195edde453f6acb", lambda kind, graph: False),
    "RemoveRedundantCopyPass": Condition("24c2d4ec6524a2ae", _lacks("aten._to_copy.default")),
}


# The versions of ExecuTorch and torch, whose decompositions make the patterns, that the conditions were checked on.
_CHECKED = (("1.5.1", "2.13.0"), ("1.5.1", "2.14.1"))


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what leaves out passes with nothing to do; nothing where XNNPACK's passes are not in use."""
    passes = sys.modules.get(_PASSES)
    if passes is None or (version("executorch"), version("torch").partition("+")[0]) not in _CHECKED:
        return []
    manager = passes.XNNPACKPassManager
    transform = manager.transform

    def transformed(self: Any) -> ExportedProgram:
        work = current()
        if work is None or type(self) is not manager:
            return transform(self)  # type: ignore[no-any-return]
        program = self.exported_program
        for kind in self.passes:
            condition = _find(kind, work)
            if condition is not None and _is_idle(condition, kind, program) and _is_traced(condition, program, work):
                continue
            work.running = kind if condition is not None else None
            try:
                result = transform(manager(program, [kind]))
            finally:
                work.running = None
            if result is not program:
                work.traced = result if condition is not None and condition.traces else None
            program = result
        return program  # type: ignore[no-any-return]

    printing = GraphModule.print_readable

    def print_readable(self: GraphModule, print_output: bool = True, *given: Any, **named: Any) -> str:
        work = current()
        if work is None or work.running is None or print_output or given or named:
            return printing(self, print_output, *given, **named)
        logger = getattr(sys.modules[work.running.__module__], "logger", None)
        if logger is None or logger.isEnabledFor(logging.DEBUG):
            return printing(self, print_output)
        return ""  # for a log that nobody reads

    return [(manager, "transform", transformed), (GraphModule, "print_readable", print_readable)]


def _is_traced(condition: Condition, program: ExportedProgram, work: Work) -> bool:
    """Return whether tracing, with which a pass would end, would change nothing."""
    if not condition.traces or work.traced is program:
        return True
    if not update_values(program.graph_module, work):
        return False
    work.traced = program
    return True


def _find(kind: Any, work: Work) -> Condition | None:
    """Return the condition of a pass, None if it has none, or is not what the condition was written for."""
    condition = CONDITIONS.get(kind.__name__)
    if condition is None:
        return None
    if kind not in work.known:
        work.known[kind] = is_known(kind)
    return condition if work.known[kind] else None


def _is_idle(condition: Condition, kind: Any, program: ExportedProgram) -> bool:
    module = program.graph_module
    if any(isinstance(child, GraphModule) for child in module.modules() if child is not module):
        return False
    try:
        return condition.idle(kind, module.graph)
    except MemoryError:
        raise
    except Exception:  # the pass is run, and says what is wrong
        return False


def is_known(kind: Any) -> bool:
    """Return whether a pass, and what it is based on, is what its condition was written for."""
    condition = CONDITIONS[kind.__name__]
    functions = tuple(_functions(kind, condition))
    key = (kind, functions)
    if key not in _KNOWN:
        _KNOWN[key] = kind.__module__.startswith("executorch.") and source_digest(kind) == condition.digest
    return _KNOWN[key]


_KNOWN: dict[Any, bool] = {}


def source_digest(kind: Any) -> str:
    """Return the first digits of the SHA-256 of the source of a pass: of its functions as they are now."""
    return pins.digest_of_functions(_functions(kind, CONDITIONS[kind.__name__]))


def _functions(kind: Any, condition: Condition) -> Iterator[Any]:
    """Yield the functions of a pass, of its bases up to ExportPass, of its helpers, and those that trace."""
    for owner in kind.__mro__:
        if owner is ExportPass:
            break
        yield from _functions_in(owner)
    for name in condition.modules:
        yield from _functions_in(sys.modules[name])
    for owner, name in ((ExportPass, "call_submodule"), (_ExportPassBase, "call"), (_ExportPassBase, "call_operator")):
        yield original_of(owner, name, getattr(owner, name))


def _functions_in(owner: Any) -> Iterator[Any]:
    """Yield the functions of a class, or those that a module defines, with what wraps them."""
    for name, value in vars(owner).items():
        function = original_of(owner, name, getattr(value, "__func__", value))
        inner = inspect.unwrap(function) if callable(function) else function
        if isinstance(inner, FunctionType) and (isinstance(owner, type) or inner.__module__ == owner.__name__):
            yield function
