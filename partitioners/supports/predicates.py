"""The supports that check one thing each: operators, element types, ranks, shapes, layouts, arguments, weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from exir_lowering import InputError, graphs
from exir_lowering.graphs import measures
from exir_lowering.partitioners.supports.support import GraphScope, ReasonedCheck, Support, suggest


def ops(*operators: Any) -> Support:
    """Return a support of operators.

    Args:
        operators: Names such as "aten.add.Tensor", or "aten.add" for every overload, or operators themselves,
            `torch.ops.aten.add.Tensor` or `exir_ops.edge.aten.add.Tensor`.

    Raises:
        InputError: An aten name does not exist. One that is decomposed, and of which nothing is named, is an error when
            a program has it: see `SupportPartitioner.partition`.
    """
    names = [operator if isinstance(operator, str) else graphs.target_name(operator) for operator in operators]
    for name in names:
        check_operator(name)
    wanted = frozenset(names)

    def reason(node: Node, scope: GraphScope) -> str:
        name = graphs.operator_name(node)
        taken = name in wanted or name.rpartition(".")[0] in wanted
        return "" if taken else f"{name} is not in the supported operators"

    listed = ", ".join(names[:4]) + (f", ... {len(names)} operators" if len(names) > 4 else "")
    return ReasonedCheck(f"ops({listed})", "op", reason, wanted)


def check_operator(name: str) -> None:
    """Check that an operator name can exist; InputError if its namespace is loaded and does not have it."""
    known = graphs.known_operators()
    namespace = name.partition(".")[0]
    if name in known or any(other.rpartition(".")[0] == name for other in known) or "." not in name:
        if "." in name or hasattr(torch.ops.higher_order, name):
            return
    elif not any(other.startswith(f"{namespace}.") for other in known):
        return  # from a library that is not yet imported
    packets = {other.rpartition(".")[0] for other in known}
    full = name if "." in name else f"aten.{name}"
    raise InputError(
        f"Operator {name!r} does not exist.{suggest(full, sorted(known | packets))} Expected a name such as "
        '"aten.add.Tensor", or "aten.add" for all of its overloads.'
    )


def dtypes(*allowed: torch.dtype) -> Support:
    """Return a support of nodes whose inputs and results all have one of these dtypes."""
    supported = _join(map(_shorten, allowed))

    def fault(tensor: torch.Tensor) -> str:
        return "" if tensor.dtype in allowed else f"is {_shorten(tensor.dtype)}, supported: {supported}"

    return _check_tensors(f"dtypes({supported})", "dtype", fault)


def ranks(least: int, most: int) -> Support:
    """Return a support of nodes whose inputs and results all have between `least` and `most` dimensions.

    Args:
        least: The fewest dimensions.
        most: The most dimensions.
    """

    def fault(tensor: torch.Tensor) -> str:
        return "" if least <= tensor.dim() <= most else f"has rank {tensor.dim()}, supported: {least} to {most}"

    return _check_tensors(f"ranks({least}, {most})", "rank", fault)


def static_shapes() -> Support:
    """Return a support of nodes whose inputs and results all have sizes that are known ahead of time."""

    def fault(tensor: torch.Tensor) -> str:
        static = all(isinstance(size, int) for size in tensor.shape)
        return "" if static else f"has the dynamic shape {list(tensor.shape)}"

    symbolic = "is a size that is not known ahead of time"
    return _check_tensors("static_shapes()", "dynamic_shape", fault, symbolic)


def memory_format(*formats: torch.memory_format) -> Support:
    """Return a support of nodes whose inputs and results all have one of these memory formats.

    `torch.channels_last` fits four dimensions only, `torch.channels_last_3d` five.
    """

    def fault(tensor: torch.Tensor) -> str:
        known = any(_fits(tensor, wanted) for wanted in formats)
        return "" if known else f"has strides {list(tensor.stride())}, supported: {_join(formats)}"

    return _check_tensors(f"memory_format({_join(formats)})", "memory_format", fault)


def _check_tensors(name: str, code: str, fault: Callable[[torch.Tensor], str], symbolic: str = "") -> Support:
    """Make a check of each tensor that a node reads or makes; `symbolic` is the fault of numbers known at run time."""

    def reason(node: Node, scope: GraphScope) -> str:
        for source in (*node.all_input_nodes, node):
            value = source.meta.get("val")
            faults = [symbolic] if isinstance(value, measures.SYMBOLS) else map(fault, measures.tensors(value))
            text = next(filter(None, faults), "")
            if text:
                return f"{'the result' if source is node else f'input {source.name}'} {text}"
        return ""

    return ReasonedCheck(name, code, reason)


def _fits(tensor: torch.Tensor, wanted: torch.memory_format) -> bool:
    rank = {torch.channels_last: 4, torch.channels_last_3d: 5}.get(wanted)
    return rank in (None, tensor.dim()) and tensor.is_contiguous(memory_format=wanted)


def constant_arguments(*names: str) -> Support:
    """Return a support of nodes whose arguments with these names, if it has them, are numbers known ahead of time."""

    def fault(name: str, value: Any, scope: GraphScope) -> str:
        held: list[Node] = []
        torch.fx.node.map_arg((value,), held.append)
        return f" is computed at run time (by {held[0].name})" if held else ""

    return _check_arguments(f"constant_arguments({_join(names)})", "argument", names, fault)


def argument_values(**allowed: Any) -> Support:
    """Return a support of nodes whose arguments with these names have an allowed value.

    Args:
        allowed: For each argument, a value, a collection of values, or a function from the value to a bool. An
            argument that a node leaves out, or that its operator does not have, is not checked.
    """

    def fault(name: str, value: Any, scope: GraphScope) -> str:
        wanted = allowed[name]
        if value is None:
            return ""
        if callable(wanted):
            return "" if wanted(value) else f"={value} is not supported"
        fits = value in wanted if isinstance(wanted, (set, frozenset, tuple, range)) else value == wanted
        return "" if fits else f"={value} is not supported, only {wanted}"

    return _check_arguments(f"argument_values({_join(allowed)})", "argument", tuple(allowed), fault)


def constant_weights(*names: str) -> Support:
    """Return a support of nodes whose arguments with these names, if it has them, are parameters, buffers or constants.

    The names are by default weight, bias, running_mean and running_var.
    """

    def fault(name: str, value: Any, scope: GraphScope) -> str:
        known = not isinstance(value, Node) or value in scope.constants
        return "" if known else f" is computed ({value.name}), expected a parameter, buffer or constant"

    wanted = names or ("weight", "bias", "running_mean", "running_var")
    return _check_arguments(f"constant_weights({_join(names)})", "weight", wanted, fault)


def _check_arguments(
    name: str, code: str, names: Sequence[str], fault: Callable[[str, Any, GraphScope], str]
) -> Support:
    """Make a check of a node's arguments with some names."""

    def reason(node: Node, scope: GraphScope) -> str:
        found = ((each, fault(each, graphs.argument(node, each), scope)) for each in names)
        return next((f"argument {each}{text}" for each, text in found if text), "")

    return ReasonedCheck(name, code, reason)


def everything() -> Support:
    """Return a support of every operator."""
    return ReasonedCheck("everything()", "op", lambda node, scope: "")


def _shorten(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _join(items: Any) -> str:
    return ", ".join(map(str, items))
