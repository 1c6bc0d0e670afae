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

from exir_lowering import InputError, graphs
from exir_lowering.partitioners.supports.attributes import ANY as ANY, read_attributes, suggest
from exir_lowering.plugins import conversion_lock

_SIZES = frozenset({"size", "shape", "normalized_shape", "N", "C", "HxW"})
"""Arguments that hold sizes: their values for the example inputs say nothing about what to match."""


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
class TemplateOperator:
    """An operator of a pattern."""

    # For each name that it may have, the arguments in the order of the schema: other parts of a pattern, `ANY`, a
    # sequence of these, or a plain value.
    arguments: Mapping[str, tuple[Any, ...]]

    def read(self) -> Iterator[TemplateOperator | TemplateInput]:
        """Yield the operators and inputs among the arguments."""
        for terms in self.arguments.values():
            yield from _read(terms)


def _read(term: Any) -> Iterator[TemplateOperator | TemplateInput]:
    if isinstance(term, (TemplateOperator, TemplateInput)):
        yield term
    elif isinstance(term, (list, tuple)):
        for item in term:
            yield from _read(item)


@dataclass(frozen=True, slots=True)
class Template:
    """The graph of a pattern."""

    operators: tuple[TemplateOperator, ...]  # in topological order; the last one is the anchor
    results: tuple[TemplateOperator, ...]  # those whose values may be used outside of a match

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The names that each operator may have."""
        return tuple(tuple(term.arguments) for term in self.operators)


@cache
def _find_signature(name: str) -> inspect.Signature | None:
    """Return the signature of an operator, None if it has no schema."""
    parts = name.split(".")
    if len(parts) != 3:
        return None
    overload: Any = torch.ops
    for part in parts:
        overload = getattr(overload, part, None)
    signatures = get_signature_for_torch_op(overload) if callable(overload) else None
    return signatures[0] if signatures else None


def list_argument_names(name: str) -> tuple[str, ...]:
    """Return the names of an operator's arguments as torch.fx has them (`input` for `self`), () without a schema."""
    signature = _find_signature(name)
    return tuple(signature.parameters) if signature is not None else ()


def has_items(name: str) -> bool:
    """Return whether an operator has several results, or a list of them."""
    signature = _find_signature(name)
    return signature is not None and signature.return_annotation is not torch.Tensor


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

    Raises:
        InputError: No operator is given, or one is not an operator overload.
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
    inputs, read = _read_parameters(name, function), read_attributes(name, attributes)
    if example_inputs is None:
        return _TracedFunction(name, function, inputs, read).make_template()
    return _ExportedFunction(name, function, inputs, read).make_template(example_inputs)


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
        default = parameter.default
        if default is parameter.empty or default is Constant or default is ANY:
            constant = default is Constant or _says_constant(parameter.annotation)
            inputs.append(TemplateInput(parameter.name, constant, default is ANY))
    return inputs


def _says_constant(annotation: Any) -> bool:
    if isinstance(annotation, str):  # from __future__ import annotations
        return annotation.split(".")[-1].strip("'\" ") == "Constant"
    return annotation is Constant or Constant in getattr(annotation, "__metadata__", ())


class _TemplateReader:
    """Makes a template from a graph."""

    def __init__(
        self, name: str, function: Callable[..., Any], inputs: Sequence[TemplateInput], attributes: Mapping[str, Any]
    ) -> None:
        self.name, self.function, self.inputs, self.attributes = name, function, inputs, attributes
        self.terms: dict[Node, Any] = {}
        self.used: set[str] = set()  # which attributes an operator has

    def error(self, text: str) -> InputError:
        return InputError(f"Pattern {self.name}: {text}")

    def names(self, node: Node) -> tuple[str, ...]:
        """Return the names that a node of the pattern may have in a graph."""
        return (graphs.operator_name(node),)

    def operator(self, node: Node) -> TemplateOperator:
        found = {}
        for name in self.names(node):
            given = order_arguments(name, *torch.fx.node.map_arg((node.args, node.kwargs), self.terms.__getitem__))
            known = list_argument_names(name)
            found[name] = tuple(map(partial(self.argument, name), known, given)) if known else given
        return TemplateOperator(found)

    def argument(self, operator: str, name: str, value: Any) -> Any:
        """Return what an argument of an operator has to match."""
        keys = (f"{operator}.{name}", f"{operator.rpartition('.')[0]}.{name}", name)
        given = [key for key in keys if key in self.attributes]
        if not given:
            return self.value(name, value)
        if isinstance(value, TemplateOperator):
            raise self.error(f"attributes has {given[0]!r}, which an operator of the pattern computes. Leave it out.")
        self.used.update(given)
        return self.attributes[given[0]]

    def value(self, name: str, value: Any) -> Any:
        """Return what an argument has to match."""
        return value

    def build(self, graph: Graph, results: Sequence[Any]) -> Template:
        """Make the template, or refuse the graph."""
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        if not nodes:
            raise self.error("the function calls no operator. Call at least one on its parameters.")
        for node in nodes:
            self.terms[node] = self.operator(node)
        returned: dict[TemplateOperator, None] = {}
        for result in results:
            term = self.terms.get(result) if isinstance(result, Node) else None
            if not isinstance(term, TemplateOperator):
                raise self.error(
                    f"it returns {result}, which none of its operators computes. Return the results of operators "
                    f"only; inputs are available outside of a match anyway."
                )
            returned[term] = None
        for node in nodes:
            if not node.users:
                raise self.error(f"the result of {'/'.join(self.names(node))} is neither used nor returned. Return it.")
        for key in self.attributes:
            if key not in self.used:
                known = {one for node in nodes for name in self.names(node) for one in list_argument_names(name)}
                hint = suggest(key.rpartition(".")[2], known, f" They have {', '.join(sorted(known))}.")
                raise self.error(f"attributes has {key!r}, which none of its operators has.{hint}")
        template = Template(tuple(self.terms[node] for node in nodes), tuple(returned))
        self.check_inputs(template)
        return template

    def check_inputs(self, template: Template) -> None:
        """Check that every parameter is used and that the operators are connected."""
        together: Any = nx.Graph()
        together.add_nodes_from(template.operators)
        used = {source for term in template.operators for source in term.read()}
        for term in template.operators:
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


class _Tracer(GraphAppendingTracer):
    """Allows `ANY` as an argument."""

    def create_arg(self, a: Any) -> Any:
        return a if a is ANY else super().create_arg(a)


class _TracedFunction(_TemplateReader):
    """A function that calls operators directly."""

    def make_template(self) -> Template:
        graph = Graph()
        tracer = _Tracer(graph)
        proxies = {}
        for term in self.inputs:
            node = graph.placeholder(term.name)
            self.terms[node] = term
            proxies[term.name] = Proxy(node, tracer)
        try:
            returned = _call_function(self.function, proxies)
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
        return self.build(graph, nodes)

    def names(self, node: Node) -> tuple[str, ...]:
        if isinstance(node.target, _OneOf):
            return node.target.names
        if graphs.is_getitem(node):
            return ("getitem",)
        try:
            return (_name_overload(node.target),)
        except InputError as error:
            raise self.refused(str(error)) from None

    def refused(self, why: str) -> InputError:
        return self.error(
            f"{why} Without example_inputs, a pattern may only call operators; give example_inputs, a "
            f"tensor for each parameter, to write it with Python operators and torch functions."
        )

    def build(self, graph: Graph, results: Sequence[Any]) -> Template:
        for node in graph.nodes:
            if node.op not in ("placeholder", "call_function", "output"):
                raise self.refused(f"It calls the method {node.target}, which is not an operator overload.")
            if graphs.is_getitem(node):
                self.check_item(node)
        return super().build(graph, results)

    def check_item(self, node: Node) -> None:
        """Check that an item is one of the results of an operator."""
        source = node.args[0]
        if not isinstance(source, Node) or source.op != "call_function":
            raise self.error("it picks an item of an input. Make the item the input.")
        if not any(map(has_items, self.names(source))):
            raise self.refused("It indexes a tensor; only an operator with several results has items.")


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


class _ExportedFunction(_TemplateReader):
    """A function of tensors that torch.export reads."""

    def make_template(self, examples: Sequence[torch.Tensor]) -> Template:
        given = tuple(examples) if isinstance(examples, (tuple, list)) else (examples,)
        names = [term.name for term in self.inputs]
        if len(given) != len(names) or not all(isinstance(example, torch.Tensor) for example in given):
            raise self.error(
                f"example_inputs are {[type(example).__name__ for example in given]}; expected a tensor for each of "
                f"the parameters {', '.join(names) or '(none)'}."
            )
        from executorch.exir import to_edge

        try:
            with conversion_lock():
                program = to_edge(torch.export.export(_FunctionModule(self.function, names), given)).exported_program()
        except MemoryError:
            raise
        except Exception as error:
            raise self.error(
                f"exporting the function with its example_inputs failed with {type(error).__name__}: {error}"
            ) from error
        inputs = iter(self.inputs)
        tensors = {**program.state_dict, **program.constants}
        for node, spec in graphs.placeholders(program).items():
            self.terms[node] = next(inputs) if spec.kind is InputKind.USER_INPUT else self.held(tensors[spec.target])
        if any(node.op == "get_attr" for node in program.graph.nodes):
            raise self.error("it has control flow. Make a pattern of what is inside it: nested graphs are matched.")
        if any(spec.kind is not OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs):
            raise self.error("it writes to an input. Return the new value instead.")
        return self.build(program.graph, list(program.graph.output_node().args[0]))

    def held(self, value: Any) -> HeldNumber:
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise self.error("it holds a tensor constant. Make that a parameter, annotated Constant.")
        return HeldNumber(value.detach())

    def value(self, name: str, value: Any) -> Any:
        return ANY if name in _SIZES else value
