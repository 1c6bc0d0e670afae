"""What a backend takes, as objects that compose and that give reasons: `supports & ~denies | pattern`.

A support is bound to a graph once and then asked node by node. The answer is None for yes, or a `No` with a reason
code and a text, so that a plan can say why an operator stayed on the host.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.passes.operator_support import OperatorSupportBase

from exir_lowering import InputError, PartitionerContractError, graphs
from exir_lowering.plugins import asking


@dataclass(frozen=True, slots=True)
class No:
    """Why a node is not supported.

    Attributes:
        code: The kind of reason, for programs: "op", "dtype", "rank", "dynamic_shape", "memory_format", "argument",
            "weight", "denied", "pattern", "custom", or the name of a torch.fx support class.
        text: The reason, for people.
        by: The name of what gave it.
    """

    code: str
    text: str
    by: str


Check = Callable[[Node], "No | None"]
"""A support that is bound to a graph: returns None if it takes the node."""


@dataclass(frozen=True, slots=True)
class GraphScope:
    """One graph of a program, with what checks need to know about its surroundings.

    Attributes:
        graph_module: The graph.
        constants: Its placeholders and get_attr nodes that stand for parameters, buffers and lifted constants.
        path: The attribute path of a nested graph, () for the top graph.
    """

    graph_module: GraphModule
    constants: frozenset[Node] = frozenset()
    path: tuple[str, ...] = ()


def scopes(program: ExportedProgram) -> Iterator[GraphScope]:
    """Yield the top graph of a program, then the graphs nested in it."""
    yield from _walk_scopes(program.graph_module, frozenset(graphs.lifted_inputs(program)), ())


def _walk_scopes(module: GraphModule, constants: frozenset[Node], path: tuple[str, ...]) -> Iterator[GraphScope]:
    held = {n: graphs.attribute(module, str(n.target)) for n in module.graph.nodes if n.op == "get_attr"}
    attributes = {n for n, value in held.items() if not isinstance(value, torch.nn.Module)}
    yield GraphScope(module, constants | attributes, path)
    seen: set[str] = set()
    for node in module.graph.nodes:
        for nested in graphs.nested_graphs(module, node):
            if nested.name in seen:  # shared by two calls
                continue
            seen.add(nested.name)
            yield from _walk_scopes(nested.module, frozenset(nested.receivers(constants)), (*path, nested.name))


class Support(ABC):
    """Whether a backend takes a node. Supports compose with `&`, `|` and `~`.

    Attributes:
        operators: The operators that it names as supported; those that can match nothing are an error.
    """

    operators: frozenset[str] = frozenset()

    @abstractmethod
    def bind(self, scope: GraphScope) -> Check:
        """Prepare for one graph: return a function that returns None (yes) or a `No` for a node of it."""

    def groups(self, scope: GraphScope) -> Sequence[Sequence[Node]]:
        """Return the nodes of a graph that have to stay together; none by default."""
        return ()

    def __and__(self, other: SupportLike) -> Support:
        """Support what both support."""
        return _AllOf((self, as_support(other)))

    def __or__(self, other: SupportLike) -> Support:
        """Support what either supports."""
        return _AnyOf((self, as_support(other)))

    def __invert__(self) -> Support:
        """Support what this one does not."""
        return _Opposite(self)

    def __bool__(self) -> bool:
        """Refuse: `and`, `or` and `not` cannot be overloaded."""
        raise TypeError("A Support has no truth value: combine supports with &, | and ~ instead of and, or and not.")


SupportLike = Support | OperatorSupportBase | Callable[[Node], "bool | No | str"]
"""A `Support`, a torch.fx `OperatorSupportBase`, or a function of a node as `where` takes it."""


@dataclass(frozen=True)
class _Several(Support):
    parts: tuple[Support, ...]

    sign: ClassVar[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "operators", frozenset().union(*(part.operators for part in self.parts)))

    def groups(self, scope: GraphScope) -> Sequence[Sequence[Node]]:
        return [group for part in self.parts for group in part.groups(scope)]

    def __str__(self) -> str:
        return f" {self.sign} ".join(map(_parenthesize, self.parts))


class _AllOf(_Several):
    sign = "&"

    def bind(self, scope: GraphScope) -> Check:
        checks = [part.bind(scope) for part in self.parts]
        return lambda node: next((no for no in (check(node) for check in checks) if no is not None), None)


class _AnyOf(_Several):
    sign = "|"

    def bind(self, scope: GraphScope) -> Check:
        checks = [part.bind(scope) for part in self.parts]

        def check(node: Node) -> No | None:
            reasons = []
            for one in checks:
                no = one(node)
                if no is None:
                    return None
                reasons.append(no)
            # An alternative that knows the operator, but not this use of it, gives a better reason than others.
            near = [no for no in reasons if no.code not in ("op", "pattern")] or reasons
            text = "; ".join(dict.fromkeys(no.text for no in near))
            return No(near[0].code, text, ", ".join(dict.fromkeys(no.by for no in near)))

        return check


@dataclass(frozen=True)
class _Opposite(Support):
    part: Support

    def bind(self, scope: GraphScope) -> Check:
        check, text = self.part.bind(scope), f"excluded by {self}"
        return lambda node: No("denied", text, str(self)) if check(node) is None else None

    def __str__(self) -> str:
        return f"~{_parenthesize(self.part)}"


def _parenthesize(support: Support) -> str:
    return f"({support})" if isinstance(support, _Several) else str(support)


def as_support(candidate: SupportLike) -> Support:
    """Turn what `SupportLike` says into a `Support`; InputError for anything else."""
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


def make_check(support: Support, scope: GraphScope) -> Check:
    """Bind a support; its check raises PartitionerContractError, with the node, for wrong answers.

    It does so for what the support raises, too, unless a partitioner is being asked: then the node is refused.
    """
    try:
        check = support.bind(scope)
    except (PartitionerContractError, MemoryError):
        raise
    except Exception as error:
        raise _raised(support, "binding to the graph", error) from error

    def ask(node: Node) -> No | None:
        if graphs.operator_name(node) == graphs.OUT_OF_SIGHT:
            return No("out_of_sight", "a rule or another partitioner decides where it goes", str(support))
        try:
            refused = No("raised", "its check raised", str(support))
            answer = asking.guarded(node, None, f"Support {support}", lambda: check(node), refused)
        except (PartitionerContractError, MemoryError):
            raise
        except Exception as error:
            raise _raised(support, describe_node(node, scope), error) from error
        if answer is not None and not isinstance(answer, No):
            raise PartitionerContractError(
                f"Support {support} answered {answer!r} for {describe_node(node, scope)}; expected None for yes, or "
                "a No.",
                violation="result_type",
            )
        return answer

    return ask


def _raised(support: Support, what: str, error: Exception) -> PartitionerContractError:
    text = f"Support {support} raised {type(error).__name__} for {what}: {error}"
    return PartitionerContractError(text, violation="raised")


def suggest(wanted: str, known: Collection[str], otherwise: str = "") -> str:
    """Return the end of a message: the names that are close to one, or another end."""
    close = difflib.get_close_matches(wanted, known, n=3)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else otherwise


def describe_node(node: Node, scope: GraphScope) -> str:
    """Return a node's name, operator and line of the model, for messages."""
    name, line = graphs.qualified_name(scope.path, node), graphs.source_line(node)
    return f"node {name} ({graphs.operator_name(node)}){f', {line}' if line else ''}"


class _FxSupport(Support):
    """A torch.fx support; its reason is the name of the class that refused."""

    def __init__(self, support: OperatorSupportBase) -> None:
        self.support = support

    def bind(self, scope: GraphScope) -> Check:
        modules: Mapping[str, torch.nn.Module] = dict(scope.graph_module.named_modules())
        name = str(self)

        def check(node: Node) -> No | None:
            if self.support.is_node_supported(modules, node):
                return None
            return No(name, f"{name}.is_node_supported returned False", name)

        return check

    def __str__(self) -> str:
        return type(self.support).__name__


@dataclass(frozen=True)
class ReasonedCheck(Support):
    """A built-in check: a function that returns the text of its reason, "" for yes."""

    name: str
    code: str
    reason: Callable[[Node, GraphScope], str] = field(repr=False)
    operators: frozenset[str] = frozenset()

    def bind(self, scope: GraphScope) -> Check:
        """Check, given the scope."""

        def check(node: Node) -> No | None:
            text = self.reason(node, scope)
            return No(self.code, text, self.name) if text else None

        return check

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class _Predicate(Support):
    """A function of the user's: what it may answer is said in `where`."""

    name: str
    predicate: Callable[[Node], object] = field(repr=False)
    refusal: No

    def bind(self, scope: GraphScope) -> Check:
        def check(node: Node) -> No | None:
            answer = self.predicate(node)
            if answer is True or answer is False:
                return None if answer else self.refusal
            if isinstance(answer, No):
                return answer
            if isinstance(answer, str) and answer:
                return replace(self.refusal, text=answer)
            raise PartitionerContractError(
                f"Support {self} answered {answer!r} for {describe_node(node, scope)}; expected True, False, or why "
                "not: a No or a text.",
                violation="result_type",
            )

        return check

    def __str__(self) -> str:
        return f"where({self.name})"


def where(predicate: Callable[[Node], bool | No | str], reason: str = "", *, code: str = "custom") -> Support:
    """Return a support of nodes for which a function of your own returns True.

    Args:
        predicate: The function. It returns True, False, or why it does not take a node: a `No`, or a text. Anything
            else is a PartitionerContractError.
        reason: The reason to give if it returns False.
        code: The reason's code.
    """
    name = getattr(predicate, "__qualname__", type(predicate).__name__)
    text = reason or f"{name} returned False"
    return _Predicate(name, predicate, No(code, text, f"where({name})"))
