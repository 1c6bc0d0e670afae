"""The supports that check one thing each: operators, element types, ranks, shapes, layouts, arguments, weights."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch.fx import Node

from exir_lowering import InputError, graphs
from exir_lowering.graphs import measures
from exir_lowering.partitioners.supports.support import GraphScope, ReasonedCheck, Support


def ops(*operators: Any) -> Support:
    """Support operators.

    Args:
        operators: Names such as "aten.add.Tensor", or "aten.add" for every overload, or operators themselves,
            `torch.ops.aten.add.Tensor` or `exir_ops.edge.aten.add.Tensor`.

    Raises:
        InputError: An aten name does not exist.
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
    return ReasonedCheck(f"ops({listed})", "op", reason)


def check_operator(name: str) -> None:
    """Check that an operator name can exist.

    Raises InputError if its namespace is loaded and does not have it; close names are suggested.
    """
    known = graphs.known_operators()
    namespace = name.partition(".")[0]
    if name in known or any(other.rpartition(".")[0] == name for other in known) or "." not in name:
        if "." in name or hasattr(torch.ops.higher_order, name):
            return
    elif not any(other.startswith(f"{namespace}.") for other in known):
        return  # from a library that is not yet imported
    packets = {other.rpartition(".")[0] for other in known}
    full = name if "." in name else f"aten.{name}"
    close = difflib.get_close_matches(full, sorted(known | packets), n=3)
    raise InputError(
        f"Operator {name!r} does not exist. "
        + (f"Did you mean {' or '.join(map(repr, close))}? " if close else "")
        + 'Expected a name such as "aten.add.Tensor", or "aten.add" for all of its overloads.'
    )


def dtypes(*allowed: torch.dtype) -> Support:
    """Support nodes whose inputs and results all have one of these dtypes."""

    def reason(node: Node, scope: GraphScope) -> str:
        for source in (*node.all_input_nodes, node):
            for tensor in measures.tensors(source.meta.get("val")):
                if tensor.dtype not in allowed:
                    role, supported = _name_role(source, node), _join(map(_shorten, allowed))
                    return f"{role} is {_shorten(tensor.dtype)}, supported: {supported}"
        return ""

    return ReasonedCheck(f"dtypes({_join(map(_shorten, allowed))})", "dtype", reason)


def ranks(least: int, most: int) -> Support:
    """Support nodes whose inputs and results all have between `least` and `most` dimensions."""

    def reason(node: Node, scope: GraphScope) -> str:
        for source in (*node.all_input_nodes, node):
            for tensor in measures.tensors(source.meta.get("val")):
                if not least <= tensor.dim() <= most:
                    return f"{_name_role(source, node)} has rank {tensor.dim()}, supported: {least} to {most}"
        return ""

    return ReasonedCheck(f"ranks({least}, {most})", "rank", reason)


def static_shapes() -> Support:
    """Support nodes whose inputs and results all have sizes that are known ahead of time."""

    def reason(node: Node, scope: GraphScope) -> str:
        for source in (*node.all_input_nodes, node):
            if isinstance(source.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return f"{_name_role(source, node)} is a size that is not known ahead of time"
            for tensor in measures.tensors(source.meta.get("val")):
                if not all(isinstance(size, int) for size in tensor.shape):
                    return f"{_name_role(source, node)} has the dynamic shape {list(tensor.shape)}"
        return ""

    return ReasonedCheck("static_shapes()", "dynamic_shape", reason)


def memory_format(*formats: torch.memory_format) -> Support:
    """Support nodes whose inputs and results all have one of these memory formats."""

    def reason(node: Node, scope: GraphScope) -> str:
        for source in (*node.all_input_nodes, node):
            for tensor in measures.tensors(source.meta.get("val")):
                if not any(_fits(tensor, wanted) for wanted in formats):
                    return (
                        f"{_name_role(source, node)} has strides {list(tensor.stride())}, supported: {_join(formats)}"
                    )
        return ""

    return ReasonedCheck(f"memory_format({_join(formats)})", "memory_format", reason)


def _fits(tensor: torch.Tensor, wanted: torch.memory_format) -> bool:
    rank = {torch.channels_last: 4, torch.channels_last_3d: 5}.get(wanted)
    if rank is not None and tensor.dim() != rank:
        return False
    return tensor.is_contiguous(memory_format=wanted)


def constant_arguments(*names: str) -> Support:
    """Support nodes whose arguments with these names, if the operator has them, are numbers known ahead of time."""

    def reason(node: Node, scope: GraphScope) -> str:
        for name in names:
            value = graphs.argument(node, name)
            held: list[Node] = []
            torch.fx.node.map_arg((value,), held.append)
            if held:
                return f"argument {name} is computed at run time (by {held[0].name})"
        return ""

    return ReasonedCheck(f"constant_arguments({_join(names)})", "argument", reason)


def argument_values(**allowed: Any) -> Support:
    """Support nodes whose arguments with these names have an allowed value.

    Args:
        allowed: For each argument, a value, a collection of values, or a function from the value to a bool. An
            argument that a node leaves out, or that its operator does not have, is not checked.
    """

    def reason(node: Node, scope: GraphScope) -> str:
        for name, wanted in allowed.items():
            value = graphs.argument(node, name)
            if value is None:
                continue
            if callable(wanted):
                fits = wanted(value)
            else:
                fits = value in wanted if isinstance(wanted, (set, frozenset, tuple, range)) else value == wanted
            if not fits:
                return f"argument {name}={value} is not supported" + ("" if callable(wanted) else f", only {wanted}")
        return ""

    return ReasonedCheck(f"argument_values({_join(allowed)})", "argument", reason)


def constant_weights(*names: str) -> Support:
    """Support nodes whose arguments with these names, if the operator has them, are parameters, buffers or constants.

    Args:
        names: Names of arguments such as "weight"; by default weight, bias, running_mean, running_var.
    """
    wanted = names or ("weight", "bias", "running_mean", "running_var")

    def reason(node: Node, scope: GraphScope) -> str:
        for name in wanted:
            value = graphs.argument(node, name)
            if isinstance(value, Node) and value not in scope.constants:
                return f"argument {name} is computed ({value.name}), expected a parameter, buffer or constant"
        return ""

    return ReasonedCheck(f"constant_weights({_join(names)})", "weight", reason)


def everything() -> Support:
    """Support every operator."""
    return ReasonedCheck("everything()", "op", lambda node, scope: "")


def _name_role(source: Node, node: Node) -> str:
    return "the result" if source is node else f"input {source.name}"


def _shorten(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _join(items: Any) -> str:
    return ", ".join(map(str, items))


__all__ = [
    "argument_values",
    "check_operator",
    "constant_arguments",
    "constant_weights",
    "dtypes",
    "everything",
    "memory_format",
    "ops",
    "ranks",
    "static_shapes",
]
