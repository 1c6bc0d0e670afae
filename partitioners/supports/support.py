"""What a backend takes, as objects that compose and that say why not: `supports & ~denies | pattern`.

A support is bound to a graph once and then asked node by node. The answer is None for yes, or a `No` with a reason
code and a text, so that a plan can tell why an operator stayed on the host.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.passes.operator_support import OperatorSupportBase

from exir_lowering import InputError, PartitionerContractError, graphs
from exir_lowering.graphs import measures
from exir_lowering.plugins import let_through

SupportLike = Any
"""A `Support`, a torch.fx `OperatorSupportBase`, or a function from a node to a bool."""


@dataclass(frozen=True, slots=True)
class No:
    """Why a node is not supported.

    Attributes:
        code: The kind of reason, for programs: "op", "dtype", "rank", "dynamic_shape", "memory_format", "argument",
            "weight", "denied", "pattern", "custom", or the name of a torch.fx support class.
        text: The reason, for people.
        by: Who said so.
    """

    code: str
    text: str
    by: str


Check = Callable[[Node], "No | None"]
"""A support that is bound to a graph: None when it takes the node."""


@dataclass(frozen=True, slots=True)
class Scope:
    """One graph of a program, with what checks need to know around it.

    Attributes:
        graph_module: The graph.
        constants: Its placeholders and get_attr nodes that stand for parameters, buffers and lifted constants.
        path: The attribute path of a nested graph, () for the top graph.
    """

    graph_module: GraphModule
    constants: frozenset[Node] = frozenset()
    path: tuple[str, ...] = ()


def scopes(program: ExportedProgram) -> Iterator[Scope]:
    """Yield the top graph of a program, then the graphs nested in it."""
    yield from _scopes(program.graph_module, frozenset(graphs.lifted_inputs(program)), ())


def _scopes(module: GraphModule, constants: frozenset[Node], path: tuple[str, ...]) -> Iterator[Scope]:
    attributes = {n for n in module.graph.nodes if n.op == "get_attr" and not _is_graph(module, n)}
    yield Scope(module, constants | attributes, path)
    seen: set[str] = set()
    for node in module.graph.nodes:
        for nested in graphs.nested_graphs(module, node):
            if nested.name in seen:  # two calls share it
                continue
            seen.add(nested.name)
            inner = [n for n in nested.module.graph.nodes if n.op == "placeholder"]
            bound = frozenset(n for n, outer in zip(inner, nested.bound, strict=True) if outer in constants)
            yield from _scopes(nested.module, bound, (*path, nested.name))


def _is_graph(module: GraphModule, node: Node) -> bool:
    return isinstance(graphs.attribute(module, str(node.target)), torch.nn.Module)


class Support(ABC):
    """Whether a backend takes a node. Supports compose with `&`, `|` and `~`."""

    @abstractmethod
    def bind(self, scope: Scope) -> Check:
        """Prepare for one graph.

        Args:
            scope: The graph.

        Returns:
            A function that says None (yes) or `No` for a node of that graph.
        """

    def groups(self, scope: Scope) -> Sequence[Sequence[Node]]:
        """Return the nodes of a graph that have to stay together; none by default."""
        return ()

    def __and__(self, other: SupportLike) -> Support:
        """Support what both support."""
        return _All((self, as_support(other)))

    def __rand__(self, other: SupportLike) -> Support:
        """Support what both support."""
        return _All((as_support(other), self))

    def __or__(self, other: SupportLike) -> Support:
        """Support what either supports."""
        return _Any((self, as_support(other)))

    def __ror__(self, other: SupportLike) -> Support:
        """Support what either supports."""
        return _Any((as_support(other), self))

    def __invert__(self) -> Support:
        """Support what this does not."""
        return _Not(self)

    def __bool__(self) -> bool:
        """Refuse: `and`, `or` and `not` cannot be overloaded."""
        raise TypeError("A Support has no truth value: combine supports with &, | and ~ instead of and, or and not.")


@dataclass(frozen=True)
class _All(Support):
    parts: tuple[Support, ...]

    def bind(self, scope: Scope) -> Check:
        checks = [part.bind(scope) for part in self.parts]
        return lambda node: next((no for no in (check(node) for check in checks) if no is not None), None)

    def groups(self, scope: Scope) -> Sequence[Sequence[Node]]:
        return [group for part in self.parts for group in part.groups(scope)]

    def __str__(self) -> str:
        return " & ".join(map(_inner, self.parts))


@dataclass(frozen=True)
class _Any(Support):
    parts: tuple[Support, ...]

    def bind(self, scope: Scope) -> Check:
        checks = [part.bind(scope) for part in self.parts]

        def check(node: Node) -> No | None:
            reasons = []
            for one in checks:
                no = one(node)
                if no is None:
                    return None
                reasons.append(no)
            # An alternative that knows the operator but not this use of it says more than one that does not know it.
            near = [no for no in reasons if no.code not in ("op", "pattern")] or reasons
            text = "; ".join(dict.fromkeys(no.text for no in near))
            return No(near[0].code, text, ", ".join(dict.fromkeys(no.by for no in near)))

        return check

    def groups(self, scope: Scope) -> Sequence[Sequence[Node]]:
        return [group for part in self.parts for group in part.groups(scope)]

    def __str__(self) -> str:
        return " | ".join(map(_inner, self.parts))


@dataclass(frozen=True)
class _Not(Support):
    part: Support

    def bind(self, scope: Scope) -> Check:
        check, text = self.part.bind(scope), f"excluded by {self}"
        return lambda node: No("denied", text, str(self)) if check(node) is None else None

    def __str__(self) -> str:
        return f"~{_inner(self.part)}"


def _inner(support: Support) -> str:
    return f"({support})" if isinstance(support, (_All, _Any)) else str(support)


def as_support(candidate: SupportLike) -> Support:
    """Turn a `Support`, a torch.fx `OperatorSupportBase` or a function from a node to a bool into a `Support`.

    Raises:
        InputError: It is something else.
    """
    if isinstance(candidate, Support):
        return candidate
    if isinstance(candidate, OperatorSupportBase):
        return _FxSupport(candidate)
    if callable(candidate) and not isinstance(candidate, type):
        return where(candidate)
    raise InputError(
        f"A support was expected, got {candidate!r}. Give a Support such as ops('aten.add.Tensor'), a torch.fx "
        f"OperatorSupportBase object, or a function from a node to a bool."
    )


def asked(support: Support, scope: Scope) -> Check:
    """Bind a support, so that what raises in it is told with the node.

    Raises:
        PartitionerContractError: From the check, when the support raises or answers something else than None or `No`.
    """
    check = _guarded(support, "binding to the graph", lambda: support.bind(scope))

    def ask(node: Node) -> No | None:
        if graphs.operator_name(node) == graphs.OUT_OF_SIGHT:
            return No("out_of_sight", "somebody else decides where it goes", str(support))
        answer = _guarded(support, _where(node, scope), lambda: check(node))
        if answer is not None and not isinstance(answer, No):
            raise PartitionerContractError(
                f"Support {support} answered {answer!r} for {_where(node, scope)}; expected None for yes, or a No.",
                violation="result_type",
            )
        return answer

    return ask


def _guarded(support: Support, what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except PartitionerContractError:
        raise
    except Exception as error:
        let_through(error)
        raise PartitionerContractError(
            f"Support {support} raised {type(error).__name__} for {what}: {error}", violation="raised"
        ) from error


def _where(node: Node, scope: Scope) -> str:
    line = graphs.source_line(node)
    name = ".".join((*scope.path, node.name))
    return f"node {name} ({graphs.operator_name(node)}){f', {line}' if line else ''}"


class _FxSupport(Support):
    """A torch.fx support; its reason is which class said no."""

    def __init__(self, support: OperatorSupportBase) -> None:
        self.support = support

    def bind(self, scope: Scope) -> Check:
        modules: Mapping[str, torch.nn.Module] = dict(scope.graph_module.named_modules())
        name = str(self)

        def check(node: Node) -> No | None:
            if self.support.is_node_supported(modules, node):
                return None
            return No(name, f"{name}.is_node_supported said no", name)

        return check

    def __str__(self) -> str:
        return type(self.support).__name__


@dataclass(frozen=True)
class _Check(Support):
    """A built-in check: a function that returns the text of its reason, "" for yes."""

    name: str
    code: str
    reason: Callable[[Node, Scope], str] = field(repr=False)

    def bind(self, scope: Scope) -> Check:
        def check(node: Node) -> No | None:
            text = self.reason(node, scope)
            return No(self.code, text, self.name) if text else None

        return check

    def __str__(self) -> str:
        return self.name


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

    def reason(node: Node, scope: Scope) -> str:
        name = graphs.operator_name(node)
        taken = name in wanted or name.rpartition(".")[0] in wanted
        return "" if taken else f"{name} is not in the supported operators"

    listed = ", ".join(names[:4]) + (f", ... {len(names)} operators" if len(names) > 4 else "")
    return _Check(f"ops({listed})", "op", reason)


def check_operator(name: str) -> None:
    """Check that an operator name can exist.

    Raises:
        InputError: It is in a namespace that is loaded, and not there; close names are suggested.
    """
    known = graphs.known_operators()
    namespace = name.partition(".")[0]
    if name in known or any(other.rpartition(".")[0] == name for other in known) or "." not in name:
        if "." in name or hasattr(torch.ops.higher_order, name):
            return
    elif not any(other.startswith(f"{namespace}.") for other in known):
        return  # a library that is not imported yet
    packets = {other.rpartition(".")[0] for other in known}
    full = name if "." in name else f"aten.{name}"
    close = difflib.get_close_matches(full, sorted(known | packets), n=3)
    raise InputError(
        f"Operator {name!r} does not exist. "
        + (f"Did you mean {' or '.join(map(repr, close))}? " if close else "")
        + 'Expected a name such as "aten.add.Tensor", or "aten.add" for all of its overloads.'
    )


def dtypes(*allowed: torch.dtype) -> Support:
    """Support nodes all of whose tensors, read and made, have one of these dtypes."""

    def reason(node: Node, scope: Scope) -> str:
        for source in (*node.all_input_nodes, node):
            for tensor in measures.tensors(source.meta.get("val")):
                if tensor.dtype not in allowed:
                    return f"{_role(source, node)} is {_short(tensor.dtype)}, supported: {_list(map(_short, allowed))}"
        return ""

    return _Check(f"dtypes({_list(map(_short, allowed))})", "dtype", reason)


def ranks(least: int, most: int) -> Support:
    """Support nodes all of whose tensors, read and made, have between `least` and `most` dimensions."""

    def reason(node: Node, scope: Scope) -> str:
        for source in (*node.all_input_nodes, node):
            for tensor in measures.tensors(source.meta.get("val")):
                if not least <= tensor.dim() <= most:
                    return f"{_role(source, node)} has rank {tensor.dim()}, supported: {least} to {most}"
        return ""

    return _Check(f"ranks({least}, {most})", "rank", reason)


def static_shapes() -> Support:
    """Support nodes all of whose tensors, read and made, have sizes that are known ahead of time."""

    def reason(node: Node, scope: Scope) -> str:
        for source in (*node.all_input_nodes, node):
            if isinstance(source.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return f"{_role(source, node)} is a size that is not known ahead of time"
            for tensor in measures.tensors(source.meta.get("val")):
                if not all(isinstance(size, int) for size in tensor.shape):
                    return f"{_role(source, node)} has the dynamic shape {list(tensor.shape)}"
        return ""

    return _Check("static_shapes()", "dynamic_shape", reason)


def memory_format(*formats: torch.memory_format) -> Support:
    """Support nodes all of whose tensors, read and made, lie in memory in one of these formats."""

    def reason(node: Node, scope: Scope) -> str:
        for source in (*node.all_input_nodes, node):
            for tensor in measures.tensors(source.meta.get("val")):
                if not any(_fits(tensor, wanted) for wanted in formats):
                    return f"{_role(source, node)} has strides {list(tensor.stride())}, supported: {_list(formats)}"
        return ""

    return _Check(f"memory_format({_list(formats)})", "memory_format", reason)


def _fits(tensor: torch.Tensor, wanted: torch.memory_format) -> bool:
    rank = {torch.channels_last: 4, torch.channels_last_3d: 5}.get(wanted)
    if rank is not None and tensor.dim() != rank:
        return False
    return tensor.is_contiguous(memory_format=wanted)


def constant_arguments(*names: str) -> Support:
    """Support nodes whose arguments of these names, where the operator has them, are numbers known ahead of time."""

    def reason(node: Node, scope: Scope) -> str:
        for name in names:
            value = graphs.argument(node, name)
            held: list[Node] = []
            torch.fx.node.map_arg((value,), held.append)
            if held:
                return f"argument {name} is computed at run time (by {held[0].name})"
        return ""

    return _Check(f"constant_arguments({_list(names)})", "argument", reason)


def argument_values(**allowed: Any) -> Support:
    """Support nodes whose arguments of these names have an allowed value.

    Args:
        allowed: For each argument a value, a collection of values, or a function from the value to a bool. An
            argument that a node leaves out, or that its operator does not have, is not looked at.
    """

    def reason(node: Node, scope: Scope) -> str:
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

    return _Check(f"argument_values({_list(allowed)})", "argument", reason)


def constant_weights(*names: str) -> Support:
    """Support nodes whose arguments of these names, where the operator has them, are parameters, buffers or constants.

    Args:
        names: Names of arguments such as "weight"; by default those called weight, bias, running_mean, running_var.
    """
    wanted = names or ("weight", "bias", "running_mean", "running_var")

    def reason(node: Node, scope: Scope) -> str:
        for name in wanted:
            value = graphs.argument(node, name)
            if isinstance(value, Node) and value not in scope.constants:
                return f"argument {name} is computed ({value.name}), expected a parameter, buffer or constant"
        return ""

    return _Check(f"constant_weights({_list(names)})", "weight", reason)


def where(predicate: Callable[[Node], bool], reason: str = "", *, code: str = "custom") -> Support:
    """Support nodes for which a function of your own returns True.

    Args:
        predicate: The function.
        reason: What to say when it returns False.
        code: The reason's code.
    """
    name = getattr(predicate, "__qualname__", type(predicate).__name__)
    text = reason or f"{name} returned False"
    return _Check(f"where({name})", code, lambda node, scope: "" if predicate(node) else text)


def everything() -> Support:
    """Support every operator."""
    return _Check("everything()", "op", lambda node, scope: "")


def _role(source: Node, node: Node) -> str:
    return "the result" if source is node else f"input {source.name}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _list(items: Any) -> str:
    return ", ".join(map(str, items))


__all__ = [
    "Check",
    "No",
    "Scope",
    "Support",
    "SupportLike",
    "argument_values",
    "as_support",
    "asked",
    "constant_arguments",
    "constant_weights",
    "dtypes",
    "everything",
    "memory_format",
    "ops",
    "ranks",
    "scopes",
    "static_shapes",
    "where",
]
