"""Passes of XNNPACK that have nothing to do are skipped.

Most of the passes over a partition look for an operator, change the graph around it, and retrace the graph. If the
operator is absent, tracing is all they do, and tracing a graph that was just traced changes nothing. Some of them build
the graphs that they look for, which takes seconds, once per process.

The conditions hold for the passes that they were written for, which are pinned.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from exir_lowering._upstream import pins
from exir_lowering.errors import ignoring_errors
from exir_lowering.fast import Work, current
from exir_lowering.fast.fake_results import update_values

_PASSES = "executorch.backends.xnnpack._passes"


Idle = Callable[[Any, Graph], bool]
"""Takes a pass's class and a graph; returns whether the pass finds nothing in it; may raise anything."""


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

CONDITIONS: dict[str, Idle] = {
    "XNNPACKRemoveCloneOpsTransform": _lacks_table(lambda kind: kind.clone_ops),
    "DimOrderOpsRevertPass": _no_dim_order,
    "ConvertToUpsampleBilinear2d": _lacks(
        "aten.upsample_bilinear2d.vec", "aten.index.Tensor", "aten._unsafe_index.Tensor"
    ),
    "ConvertToLinearPass": _no_linear,
    "PropagateCustomMetaPass": _no_custom,
    "ConvertToSDPAPass": _all_of(
        "aten._softmax.default", "aten.any.dim", "aten.bmm.default", "aten.logical_not.default", "aten.where.self"
    ),
    "ConstPropPass": _no_constants,
    "FuseBatchNormPass": _lacks(*_BATCH_NORMS),
    "DecomposeBatchNorm": _lacks_table(lambda kind: kind.BATCH_NORM_OPS),
    "FuseActivationPass": _lacks_table(lambda kind: kind.FUSEABLE_ACTIVATIONS),
    "DecomposeConcatenate": _no_long_cat,
    "RemoveGetItemPass": _lacks("aten.max_pool2d_with_indices.default", "aten.max.dim"),
    "InsertPadQDQPass": _lacks("aten.constant_pad_nd.default"),
    "Conv1dUnsqueezePass": _no_conv1d,
    "PReLUReshapePass": _lacks("aten._prelu_kernel.default"),
    "ChannelsLastTaggedReshapePass": lambda kind, graph: False,
    "RemoveRedundantCopyPass": _lacks("aten._to_copy.default"),
}
"""When each pass has nothing to do, by the name of its class."""

# All others end with tracing the graph: they have nothing to do only if the graph was just traced.
_NOT_TRACING = ("XNNPACKRemoveCloneOpsTransform", "InsertPadQDQPass")

# The versions of ExecuTorch and torch, whose decompositions make the patterns, that the conditions were checked on.
_CHECKED = (("1.5.1", "2.13.0"), ("1.5.1", "2.14.1"))


def is_checked() -> bool:
    """Return whether the conditions hold for the versions of ExecuTorch and torch that are installed."""
    return (version("executorch"), version("torch").partition("+")[0]) in _CHECKED


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what leaves out passes with nothing to do; nothing where XNNPACK's passes are not in use."""
    passes = sys.modules.get(_PASSES)
    if passes is None or not is_checked():
        return []
    manager = passes.XNNPACKPassManager
    transform = manager.transform
    known = frozenset(pins.FEATURES["passes of XNNPACK"].code)

    def transformed(self: Any) -> ExportedProgram:
        work = current()
        if work is None or type(self) is not manager:
            return transform(self)  # type: ignore[no-any-return]
        program = self.exported_program
        for kind in self.passes:
            place = f"{kind.__module__}:{kind.__name__}"
            # Another pass may have the name of one that is known.
            idle = CONDITIONS.get(kind.__name__) if place in known and pins.find(place) is kind else None
            if idle is not None and _is_idle(idle, kind, program) and _is_traced(kind, program, work):
                continue
            work.running = kind if idle is not None else None
            try:
                result = transform(manager(program, [kind]))
            finally:
                work.running = None
            if result is not program:
                work.traced = result if idle is not None and kind.__name__ not in _NOT_TRACING else None
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


def _is_traced(kind: Any, program: ExportedProgram, work: Work) -> bool:
    """Return whether tracing, with which a pass would end, would change nothing."""
    if kind.__name__ in _NOT_TRACING or work.traced is program:
        return True
    if not update_values(program.graph_module, work):
        return False
    work.traced = program
    return True


def _is_idle(idle: Idle, kind: Any, program: ExportedProgram) -> bool:
    module = program.graph_module
    if any(isinstance(child, GraphModule) for child in module.modules() if child is not module):
        return False
    with ignoring_errors():  # else the pass is run, and says what is wrong
        return idle(kind, module.graph)
    return False
