"""Patterns are functions: read one as a template, the operator graph that it stands for, by tracing or exporting it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import networkx as nx
import torch
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, Node, Proxy
from torch.fx.operator_schemas import get_signature_for_torch_op
from torch.fx.proxy import GraphAppendingTracer

from exir_lowering import InputError, PartitionerContractError, graphs
from exir_lowering.partitioners.supports.support import suggest
from exir_lowering.plugins import conversion_lock

_SIZES = frozenset({"size", "shape", "normalized_shape", "N", "C", "HxW"})
"""Arguments that hold sizes: their values for the example inputs say nothing about what to match."""


class _Wildcard:
    def __repr__(self) -> str:
        return "ANY"


ANY: Any = _Wildcard()
"""As an argument in a pattern: matches any node, number or list, or an omitted argument."""


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """A parameter of a pattern: a node or value from outside of the match; `constant` and `wildcard` say which."""

    name: str
    constant: bool = False
    wildcard: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class HeldNumber:
    """A number that export turned into a constant tensor: matches a constant with the same value."""

    value: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Attribute:
    """What an argument may be: one of several values, or what a function takes."""

    pattern: str  # in messages
    name: str
    options: tuple[Any, ...]
    accepts: Callable[[Any], Any] | None = None

    def fits(self, value: Any) -> bool:
        """Return whether a value may be the argument; PartitionerContractError if the function raises."""
        if isinstance(value, Node) or value is inspect.Parameter.empty:
            return False
        if self.accepts is None:
            return any(_stands_for(option, value) for option in self.options)
        try:
            return bool(self.accepts(value))
        except MemoryError:
            raise
        except Exception as error:
            raise PartitionerContractError(
                f"What pattern {self.pattern} asks of {self.name} raised {type(error).__name__} for {value!r}: {error}",
                violation="raised",
                details={"pattern": self.pattern, "node": ""},
            ) from error

    def __str__(self) -> str:
        if self.accepts is not None:
            return f"what {getattr(self.accepts, '__name__', self.accepts)} takes"
        return " or ".join(map(repr, self.options))


def _stands_for(option: Any, value: Any) -> bool:
    """Return whether a value is the one that is meant: a number also stands for a list of it."""
    if isinstance(value, (list, tuple)):
        if not isinstance(option, (list, tuple)):
            return bool(value) and all(_stands_for(option, item) for item in value)
        return len(option) == len(value) and all(map(_stands_for, option, value))
    return isinstance(option, bool) == isinstance(value, bool) and not isinstance(value, Node) and bool(option == value)


@dataclass(frozen=True, slots=True, eq=False)
class TemplateOperator:
    """An operator of a pattern."""

    # For each name that it may have, the arguments in the order of the schema: other parts of a pattern, `ANY`, a
    # sequence of these, or a plain value.
    arguments: Mapping[str, tuple[Any, ...]]

    def read(self) -> Iterator[TemplateOperator | TemplateInput]:
        """Yield the operators and inputs among the arguments."""
        stack: list[Any] = [list(self.arguments.values())]
        while stack:
            term = stack.pop()
            if isinstance(term, (TemplateOperator, TemplateInput)):
                yield term
            elif isinstance(term, (list, tuple)):
                stack += reversed(term)


@dataclass(frozen=True, slots=True)
class Template:
    """The graph of a pattern."""

    operators: tuple[TemplateOperator, ...]  # in topological order; the last one is the anchor
    results: tuple[TemplateOperator, ...]  # those whose values may be used outside of a match


@cache
def _find_signature(name: str) -> inspect.Signature | None:
    """Return the signature of an operator, None if it has no schema."""
    overload: Any = torch.ops
    for part in name.split("."):
        overload = getattr(overload, part, None)
    signatures = get_signature_for_torch_op(overload) if name.count(".") == 2 and callable(overload) else None
    return signatures[0] if signatures else None


def list_argument_names(name: str) -> tuple[str, ...]:
    """Return the names of an operator's arguments as torch.fx has them (`input` for `self`), () without a schema."""
    signature = _find_signature(name)
    return tuple(signature.parameters) if signature is not None else ()


def order_arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a call in the order of the schema, with defaults for omitted ones."""
    signature = _find_signature(name)
    if signature is None:
        return (*args, *(kwargs[key] for key in sorted(kwargs)))
    named = {"input" if key == "self" else key: value for key, value in kwargs.items()}
    return tuple(
        args[i] if i < len(args) else named.get(parameter.name, parameter.default)
        for i, parameter in enumerate(signature.parameters.values())
    )


# -- from a function to a template -------------------------------------------------------------------------------------


class Constant(torch.Tensor):
    """As the annotation (or default) of a pattern's parameter: only matches parameters, buffers and constants."""


class _OneOf:
    def __init__(self, operators: Sequence[Any]) -> None:
        self.__name__ = "one_of"
        self.names = tuple(dict.fromkeys(_name_overload(target) for target in operators))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found: list[Proxy] = []
        torch.fx.node.map_aggregate(
            (args, kwargs), lambda item: found.append(item) if isinstance(item, Proxy) else None
        )
        if not found:
            raise InputError(
                f"one_of({', '.join(self.names)}) was called outside of a pattern. Use it in the function of a "
                f"Pattern without example_inputs, on that function's parameters or on results of operators."
            )
        return found[0].tracer.create_proxy("call_function", self, args, kwargs)


def one_of(*operators: Any) -> Callable[..., Any]:
    """Return a stand-in for any of several operators, in a pattern without example inputs.

    Args:
        operators: Operators such as `torch.ops.aten.relu.default`, which take the given arguments alike.
    """
    if not operators:
        raise InputError("one_of() got no operator. Give it operators such as torch.ops.aten.relu.default.")
    return _OneOf(operators)


def _name_overload(target: Any) -> str:
    name = graphs.target_name(target)
    if name.count(".") != 2 or not callable(target) or not list_argument_names(name):
        raise InputError(
            f"{target!r} is not an operator overload. Expected one such as torch.ops.aten.relu.default"
            + (f", for example torch.ops.{target}.{target.overloads()[0]}." if hasattr(target, "overloads") else ".")
        )
    return name


def read_template(
    name: str, function: Callable[..., Any], example_inputs: Sequence[torch.Tensor] | None, attributes: Any
) -> Template:
    """Read a function as a template, from the arguments of `Pattern`; InputError if it is not a pattern."""
    if not isinstance(attributes, Mapping) or not all(isinstance(key, str) and key for key in attributes):
        raise InputError(
            f"Pattern {name}: attributes={attributes!r}: expected a mapping from names of arguments, such as "
            '{"stride": ANY}.'
        )
    wanted: dict[str, Any] = {}
    for key, value in attributes.items():
        options = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else [value]
        accepts = value if callable(value) else None
        wanted[key] = ANY if value is ANY else Attribute(name, key, () if accepts else tuple(options), accepts)
    inputs = _read_parameters(name, function)
    if example_inputs is None:
        return _Reader(name, wanted).trace(function, inputs)
    return _Reader(name, wanted, exported=True).export(function, inputs, example_inputs)


def _read_parameters(name: str, function: Callable[..., Any]) -> list[TemplateInput]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"Pattern {name}: {function!r} has no signature to read. Wrap it in a function: def pattern(x): return ..."
        ) from error
    inputs = []
    for parameter in signature.parameters.values():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD and parameter.kind is not parameter.POSITIONAL_ONLY:
            raise InputError(
                f"Pattern {name}: parameter {str(parameter)!r} is not an ordinary one. Give each input of the pattern "
                f"a parameter of its own, without *args, **kwargs and keyword-only parameters."
            )
        default, annotation = parameter.default, parameter.annotation
        if default is parameter.empty or default is Constant or default is ANY:
            if isinstance(annotation, str):  # from __future__ import annotations
                says_constant = annotation.split(".")[-1].strip("'\" ") == "Constant"
            else:
                says_constant = annotation is Constant or Constant in getattr(annotation, "__metadata__", ())
            inputs.append(TemplateInput(parameter.name, default is Constant or says_constant, default is ANY))
    return inputs


def _call_function(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a function with values for some parameters and the defaults of the others."""
    parameters = inspect.signature(function).parameters.values()
    return function(*(values.get(parameter.name, parameter.default) for parameter in parameters))


class _FunctionModule(torch.nn.Module):
    def __init__(self, function: Callable[..., Any], names: Sequence[str]) -> None:
        super().__init__()
        self.function, self.names = function, names

    def forward(self, *tensors: torch.Tensor) -> Any:
        return _call_function(self.function, dict(zip(self.names, tensors, strict=True)))


class _Tracer(GraphAppendingTracer):
    """Allows `ANY` as an argument."""

    def create_arg(self, a: Any) -> Any:
        return a if a is ANY else super().create_arg(a)


class _Reader:
    """Makes a template from a graph: of a function that calls operators directly, or of an exported one."""

    def __init__(self, name: str, attributes: Mapping[str, Any], exported: bool = False) -> None:
        self.name, self.attributes, self.exported = name, attributes, exported
        self.terms: dict[Node, Any] = {}
        self.used: set[str] = set()  # which attributes an operator has

    def error(self, text: str) -> InputError:
        return InputError(f"Pattern {self.name}: {text}")

    def refused(self, why: str) -> InputError:
        return self.error(
            f"{why} Without example_inputs, a pattern may only call operators; give example_inputs, a "
            f"tensor for each parameter, to write it with Python operators and torch functions."
        )

    def trace(self, function: Callable[..., Any], inputs: Sequence[TemplateInput]) -> Template:
        """Read a function that calls operators directly."""
        graph = Graph()
        tracer = _Tracer(graph)
        proxies = {term.name: Proxy(graph.placeholder(term.name), tracer) for term in inputs}
        self.terms = {proxies[term.name].node: term for term in inputs}
        try:
            returned = _call_function(function, proxies)
        except (InputError, MemoryError):
            raise
        except Exception as error:
            raise self.error(
                f"reading the function failed with {type(error).__name__}: {error}. Without example_inputs it may only "
                f"call operators such as torch.ops.aten.mul.Tensor; give example_inputs for any other PyTorch code."
            ) from error
        results = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        nodes = [result.node if isinstance(result, Proxy) else result for result in results]
        graph.output([node for node in nodes if isinstance(node, Node)])
        for node in graph.nodes:
            if node.op not in ("placeholder", "call_function", "output"):
                raise self.refused(f"It calls the method {node.target}, which is not an operator overload.")
            if graphs.is_getitem(node):
                source = node.args[0]
                if not isinstance(source, Node) or source.op != "call_function":
                    raise self.error("it picks an item of an input. Make the item the input.")
                signatures = map(_find_signature, self.names(source))
                if not any(found is not None and found.return_annotation is not torch.Tensor for found in signatures):
                    raise self.refused("It indexes a tensor; only an operator with several results has items.")
        return self.build(graph, nodes)

    def export(self, function: Any, inputs: Sequence[TemplateInput], examples: Sequence[torch.Tensor]) -> Template:
        """Read a function of tensors that torch.export reads."""
        given = tuple(examples) if isinstance(examples, (tuple, list)) else (examples,)
        names = [term.name for term in inputs]
        if len(given) != len(names) or not all(isinstance(example, torch.Tensor) for example in given):
            raise self.error(
                f"example_inputs are {[type(example).__name__ for example in given]}; expected a tensor for each of "
                f"the parameters {', '.join(names) or '(none)'}."
            )
        from executorch.exir import to_edge

        try:
            with conversion_lock():
                program = to_edge(torch.export.export(_FunctionModule(function, names), given)).exported_program()
        except MemoryError:
            raise
        except Exception as error:
            raise self.error(
                f"exporting the function with its example_inputs failed with {type(error).__name__}: {error}"
            ) from error
        waiting = iter(inputs)
        for node, spec in graphs.placeholders(program).items():
            if spec.kind is InputKind.USER_INPUT:
                self.terms[node] = next(waiting)
                continue
            held = graphs.lifted_value(program, spec.target)
            if not isinstance(held, torch.Tensor) or held.numel() != 1:
                raise self.error("it holds a tensor constant. Make that a parameter, annotated Constant.")
            self.terms[node] = HeldNumber(held.detach())
        if any(node.op == "get_attr" for node in program.graph.nodes):
            raise self.error("it has control flow. Make a pattern of what is inside it: nested graphs are matched.")
        if any(spec.kind is not OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs):
            raise self.error("it writes to an input. Return the new value instead.")
        return self.build(program.graph, list(program.graph.output_node().args[0]))

    def names(self, node: Node) -> tuple[str, ...]:
        """Return the names that a node of the pattern may have in a graph."""
        if isinstance(node.target, _OneOf):
            return node.target.names
        if self.exported or graphs.is_getitem(node):
            return (graphs.operator_name(node),)
        try:
            return (_name_overload(node.target),)
        except InputError as error:
            raise self.refused(str(error)) from None

    def argument(self, operator: str, name: str, value: Any) -> Any:
        """Return what an argument of an operator has to match."""
        keys = (f"{operator}.{name}", f"{operator.rpartition('.')[0]}.{name}", name)
        given = [key for key in keys if key in self.attributes]
        if not given:
            return ANY if self.exported and name in _SIZES else value
        if isinstance(value, TemplateOperator):
            raise self.error(f"attributes has {given[0]!r}, which an operator of the pattern computes. Leave it out.")
        self.used.update(given)
        return self.attributes[given[0]]

    def build(self, graph: Graph, results: Sequence[Any]) -> Template:
        """Make the template, or refuse the graph."""
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        if not nodes:
            raise self.error("the function calls no operator. Call at least one on its parameters.")
        for node in nodes:
            found = {}
            for name in self.names(node):
                given = order_arguments(name, *torch.fx.node.map_arg((node.args, node.kwargs), self.terms.__getitem__))
                known = list_argument_names(name)
                found[name] = tuple(map(partial(self.argument, name), known, given)) if known else given
            self.terms[node] = TemplateOperator(found)
        for result in results:
            if not isinstance(result, Node) or not isinstance(self.terms.get(result), TemplateOperator):
                raise self.error(
                    f"it returns {result}, which none of its operators computes. Return the results of operators "
                    f"only; inputs are available outside of a match anyway."
                )
        for node in nodes:
            if not node.users:
                raise self.error(f"the result of {'/'.join(self.names(node))} is neither used nor returned. Return it.")
        for key in self.attributes:
            if key not in self.used:
                every = {one for node in nodes for name in self.names(node) for one in list_argument_names(name)}
                hint = suggest(key.rpartition(".")[2], every, f" They have {', '.join(sorted(every))}.")
                raise self.error(f"attributes has {key!r}, which none of its operators has.{hint}")
        operators = tuple(self.terms[node] for node in nodes)
        self.check_inputs(operators)
        return Template(operators, tuple(dict.fromkeys(self.terms[result] for result in results)))

    def check_inputs(self, operators: Sequence[TemplateOperator]) -> None:
        """Check that every parameter is used and that the operators are connected."""
        together: Any = nx.Graph()
        together.add_nodes_from(operators)
        used = {source for term in operators for source in term.read()}
        for term in operators:
            read = (one for one in term.read() if not (isinstance(one, TemplateInput) and one.wildcard))
            together.add_edges_from((source, term) for source in read)
        unused = [term.name for term in self.terms.values() if isinstance(term, TemplateInput) and term not in used]
        if unused:
            raise self.error(f"parameter {unused[0]} is not used by an operator. Remove it.")
        if not nx.is_connected(together):
            raise self.error(
                "its operators are not connected: some share neither a value nor an input with the others. Make two "
                "patterns of them."
            )
