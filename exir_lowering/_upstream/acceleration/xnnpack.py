"""Passes of XNNPACK that have nothing to do are not run.

Most of the passes over a partition look for an operator, change the graph around it, and trace the graph anew. If the
operator is absent, tracing is all they do, and tracing a graph that was just traced changes nothing. Some of them build
the graphs that they look for, which takes seconds, once per process.

A condition holds for the source of a pass that it was written for: a pass of another version, or one that somebody
has replaced, is run.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from types import FunctionType
from typing import Any

# The bases of all passes that trace.
from executorch.exir.pass_base import ExportPass, _ExportPassBase
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from exir_lowering._upstream.acceleration.settling import settle
from exir_lowering._upstream.acceleration.work import Work, current
from exir_lowering.errors.interrupts import let_through

__all__ = [
    "CONDITIONS",
    "Condition",
    "is_known",
    "replacements",
    "source_digest",
]

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
        "33903b186ff6d3db",
        _lacks_table(lambda kind: kind.clone_ops),
        traces=False,
        modules=("executorch.exir.passes.remove_noop_pass",),
    ),
    "DimOrderOpsRevertPass": Condition("8d97adc887297ca2", _no_dim_order),
    "ConvertToUpsampleBilinear2d": Condition(
        "7e00867e5ae84e52",
        _lacks("aten.upsample_bilinear2d.vec", "aten.index.Tensor", "aten._unsafe_index.Tensor"),
        modules=("executorch.backends.xnnpack.partition.graphs.bilinear_2d",),
    ),
    "ConvertToLinearPass": Condition(
        "0533b93afa0ffe40", _no_linear, modules=("executorch.backends.transforms.addmm_mm_to_linear",)
    ),
    "PropagateCustomMetaPass": Condition(
        "f4213f072e78cade", _no_custom, modules=("executorch.backends.xnnpack.utils.quant_utils",)
    ),
    "ConvertToSDPAPass": Condition(
        "4f8687990ab42d5f",
        _all_of(
            "aten._softmax.default", "aten.any.dim", "aten.bmm.default", "aten.logical_not.default", "aten.where.self"
        ),
        modules=("executorch.backends.xnnpack.partition.graphs.sdpa",),
    ),
    "ConstPropPass": Condition("ae85b14c65d638a5", _no_constants),
    "FuseBatchNormPass": Condition("4b2a98f22ed5e61a", _lacks(*_BATCH_NORMS)),
    "DecomposeBatchNorm": Condition("2a987d0bc2ac37ca", _lacks_table(lambda kind: kind.BATCH_NORM_OPS)),
    "FuseActivationPass": Condition("03749299218f4253", _lacks_table(lambda kind: kind.FUSEABLE_ACTIVATIONS)),
    "DecomposeConcatenate": Condition("7063909b949b40ce", _no_long_cat),
    "RemoveGetItemPass": Condition("c06b7f3bf40d93f9", _lacks("aten.max_pool2d_with_indices.default", "aten.max.dim")),
    "InsertPadQDQPass": Condition("fec298b8a02a7ebf", _lacks("aten.constant_pad_nd.default"), traces=False),
    "Conv1dUnsqueezePass": Condition("0b3633e4d63b7e88", _no_conv1d),
    "PReLUReshapePass": Condition("b98e217ee83b0fdc", _lacks("aten._prelu_kernel.default")),
    "ChannelsLastTaggedReshapePass": Condition("6879c89133097b12", lambda kind, graph: False),
    "RemoveRedundantCopyPass": Condition("8c6c4d620dd33e7b", _lacks("aten._to_copy.default")),
}


_CHECKED = (("1.5.1", "2.13.0"),)
"""The versions of ExecuTorch and torch, whose decompositions make the patterns, that the conditions were checked on."""


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
                work.retraced = result if condition is not None and condition.traces else None
            program = result
        return program  # type: ignore[no-any-return]

    printing = GraphModule.print_readable

    def print_readable(self: GraphModule, print_output: bool = True, *given: Any, **named: Any) -> str:
        work = current()
        if work is None or work.running is None or print_output or given or named or _is_logging(work.running):
            return printing(self, print_output, *given, **named)
        return ""  # for a log that nobody reads

    return [(manager, "transform", transformed), (GraphModule, "print_readable", print_readable)]


def _is_logging(kind: Any) -> bool:
    logger = getattr(sys.modules[kind.__module__], "logger", None)
    return logger is None or logger.isEnabledFor(logging.DEBUG)


def _is_traced(condition: Condition, program: ExportedProgram, work: Work) -> bool:
    """Return whether tracing, with which a pass would end, would change nothing."""
    if not condition.traces or work.retraced is program:
        return True
    if not settle(program.graph_module, work):
        return False
    work.retraced = program
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
    except Exception as error:  # the pass is run, and says what is wrong
        let_through(error)
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
    digest = hashlib.sha256()
    for function in _functions(kind, CONDITIONS[kind.__name__]):
        digest.update(_source(function).encode())
    return digest.hexdigest()[:16]


def _source(function: FunctionType) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # it was made in a console, or has no file here
        return "?"


def _functions(kind: Any, condition: Condition) -> Iterator[FunctionType]:
    """Yield the functions of a pass, of its bases up to ExportPass, of its helpers, and those that trace."""
    for owner in kind.__mro__:
        if owner is ExportPass:
            break
        yield from _functions_in(vars(owner).values())
    for name in condition.modules:
        yield from _functions_in(vars(sys.modules[name]).values(), name)
    for owner, name in ((ExportPass, "call_submodule"), (_ExportPassBase, "call"), (_ExportPassBase, "call_operator")):
        yield getattr(owner, name)


def _functions_in(values: Iterable[Any], module: str | None = None) -> Iterator[FunctionType]:
    for value in values:
        function = (
            inspect.unwrap(getattr(value, "__func__", value)) if callable(getattr(value, "__func__", value)) else value
        )
        if isinstance(function, FunctionType) and module in (None, function.__module__):
            yield function
