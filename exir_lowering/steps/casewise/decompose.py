"""Decompositions by cases: the same as `ExportedProgram.run_decompositions`, which traces the whole program."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from exir_lowering._upstream import conversion, operators
from exir_lowering._upstream.fakes import FakeTensor, FakeTensorMode
from exir_lowering._upstream.programs import assemble_program, fake_mode_of, guards_code_of, lazy_graph_module
from exir_lowering._upstream.tensors import version
from exir_lowering.steps.casewise.by_template import Plain, Stage, rewrite
from exir_lowering.steps.casewise.cases import Case
from exir_lowering.steps.casewise.inline import inline_no_grad
from exir_lowering.steps.casewise.inplace import is_mutable, read_results
from exir_lowering.steps.casewise.templates import Template
from exir_lowering.steps.casewise.value_keys import MEMORY, Uncovered, evaluate, renew

_ATEN = torch.ops.aten
_TRACED_APART = frozenset(
    {
        *(_ATEN.alias.default, _ATEN.detach.default, _ATEN.view.dtype),
        *(_ATEN.lift.default, _ATEN.lift_fresh.default, _ATEN.lift_fresh_copy.default),
    }
)
"""Operators that tracing itself treats in a way of its own."""

_COMPUTING = frozenset(op for op in conversion.SYMBOLIC_OPERATORS if not operators.is_overload(op)) - {operator.getitem}
"""The functions that compute sizes from sizes."""

_MAKING_SIZES = _COMPUTING | {_ATEN.sym_size.int}  # the targets of the nodes whose results are sizes


class Decomposition(Stage):
    """The stage that decomposes operators as a table says; it runs without gradients, as `run_decompositions`."""

    name = "Interpreter_PropagateUnbackedSymInts"  # that of the interpreter in which torch decomposes
    gradients = False
    decomposes = True

    def __init__(self, table: Mapping[Any, Any], inlined: frozenset[Node] = frozenset()) -> None:
        """Describe the stage, by a table as for `run_decompositions` and the calls whose histories name it already."""
        self._table, self._inlined = dict(table), inlined
        self._whole, self._in_python = conversion.split_table(table)
        self.key = _one_of_equals(("decompose", frozenset((op, _identity(do)) for op, do in self._table.items())))
        self._plain: dict[Any, bool] = {}

    def plain(self, node: Node, values: Sequence[Any]) -> Plain | None:
        """Return a call's operator if it is traced as it is."""
        if isinstance(node.meta.get("val"), torch.SymInt):
            return _plain_size(node)
        known = self._plain.get(node.target)
        if known is None:
            known = self._plain[node.target] = self._traced_as_it_is(node.target)
        return Plain(node.target, same=True) if known and _elements_follow(node) else None

    def _traced_as_it_is(self, target: Any) -> bool:
        if target is operator.getitem:
            return True
        if not operators.is_overload(target) or target in self._in_python or target in _TRACED_APART:
            return False
        if operators.writes(target) or operators.returned_types(target) != {"Tensor"} or conversion.has_effects(target):
            return False
        if operators.is_composite(target):
            return target in self._whole
        return not operators.kernels_in_python(target)

    def continues_history(self, node: Node) -> bool:
        """Return whether a call was taken from a nested graph: torch ascribes it to the call of that graph."""
        return node in self._inlined

    def overwrites(self, node: Node) -> bool:
        """Return whether a call overwrites its first operand, which nothing reads afterwards."""
        return is_mutable(node)

    def check(self, target: Any) -> None:
        """Raise Uncovered for an operator that tracing treats by data, or by what it did before."""
        super().check(target)
        if torch.Tag.data_dependent_output in target.tags:
            raise Uncovered(f"{target}, whose result depends on data")
        if conversion.has_effects(target):
            raise Uncovered(f"{target}, which has effects")

    def convert(self, cases: Sequence[Case], *, alone: bool = False) -> list[Template]:
        """Return the templates of cases, with what composite operators among them write."""
        templates = super().convert(cases, alone=alone)
        return [replace(made, written=_written(case, made)) for case, made in zip(cases, templates, strict=True)]

    def apply(self, graph: Graph) -> GraphModule:
        """Decompose cases by `run_decompositions`."""
        inputs: Any = graph.find_nodes(op="placeholder")
        outputs: Any = graph.output_node().args[0]
        signature = ExportGraphSignature(
            [InputSpec(InputKind.USER_INPUT, TensorArgument(name=node.name), None) for node in inputs],
            [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=node.name), None) for node in outputs],
        )
        program = assemble_program(
            graph_module=lazy_graph_module({}, graph),
            signature=signature,
            state_dict={},
            constants={},
            range_constraints={},
            verifiers=[conversion.Verifier],
        )
        decomposed: GraphModule = program.run_decompositions(dict(self._table)).graph_module
        return decomposed


def _written(case: Case, template: Template) -> frozenset[int]:
    """Return the elements of a composite operator's result that it writes in place, if it is decomposed."""
    target, mode = case.node.target, next((v.fake_mode for v in case.values if isinstance(v, FakeTensor)), None)
    if mode is None or not operators.is_composite(target) or any(node.target is target for node in template.nodes):
        return frozenset()
    value_of = dict(zip(case.operands, (renew(value, None) for value in case.values), strict=True)).__getitem__
    result = evaluate(case.node, target, value_of, mode, gradients=False)
    listed = result if isinstance(result, (list, tuple)) else (result,)
    return frozenset(i for i, each in enumerate(listed) if isinstance(each, torch.Tensor) and version(each) > 0)


def _elements_follow(node: Node) -> bool:
    """Return whether what takes the elements of a call's result follows it in their order, as tracing writes it."""
    if not isinstance(node.meta.get("val"), (list, tuple)):
        return True
    following, last = node.next, -1
    for _ in node.users:
        if following.target is not operator.getitem or following.args[0] is not node or following.args[1] <= last:  # type: ignore[operator]
            return False
        following, last = following.next, following.args[1]  # type: ignore[assignment]
    return True


def _plain_size(node: Node) -> Plain | None:
    """Return the operator of a call that takes a size of an input, or computes with such sizes: so does tracing."""
    if node.target is _ATEN.sym_size.int and node.args[0].op == "placeholder":  # type: ignore[union-attr]
        return Plain(node.target, same=True)
    if node.target in _COMPUTING:
        return Plain(node.target, same=True)
    raise Uncovered(f"the symbolic size {node.meta['val']}, computed by {node.target}")


def _identity(function: Any) -> Hashable:
    """Return what tells functions apart: torch makes some of those in its tables once for each table."""
    if isinstance(function, partial):
        return _identity(function.func), function.args, tuple(sorted(function.keywords.items()))
    plain = isinstance(function, FunctionType) and not (function.__closure__ or function.__defaults__)
    return function.__code__ if plain else function  # type: ignore[no-any-return]


def _one_of_equals(key: Hashable) -> Hashable:
    """Return the object that stands for all equal keys: comparing two tables takes a thousand comparisons."""
    known = MEMORY.find(("key", key))
    if known is None:
        MEMORY.put(("key", key), key)
    return key if known is None else known


def decompose(program: ExportedProgram, table: Mapping[Any, Any]) -> ExportedProgram:
    """Return what `run_decompositions` makes of a program, whose graph may become an equal one; or Uncovered."""
    _check_program(program)
    mode = fake_mode_of(program.graph_module)
    if mode is None:
        raise Uncovered("a program without tensors as inputs")
    _settle_writes(program.graph, mode)  # first, as torch writes other histories for what is not inlined here
    inlined = inline_no_grad(program.graph_module, Decomposition.name)
    _settle_writes(program.graph, mode)
    _fold_numbers(program.graph)
    if not _has_all_sizes(program.graph):
        conversion.add_sizes(program.graph_module, mode.shape_env)
    return with_graph(program, rewrite(program.graph_module, Decomposition(table, inlined)))


def _fold_numbers(graph: Graph) -> None:
    """Replace sizes that have turned out to be numbers by these, as tracing does."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _MAKING_SIZES:
            continue
        value = node.meta.get("val")
        number = value.node.expr if isinstance(value, torch.SymInt) else value
        if type(number) is not int and not (isinstance(value, torch.SymInt) and number.is_number):
            continue
        put = partial(_put, node, int(number))
        for user in list(node.users):
            user.args, user.kwargs = map_arg(user.args, put), map_arg(user.kwargs, put)
        graph.erase_node(node)


def _put(replaced: Node, number: int, argument: Node) -> Any:
    return number if argument is replaced else argument


def _has_all_sizes(graph: Graph) -> bool:
    """Return whether a graph has nodes for all symbols that are sizes of its inputs."""
    values = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    sizes: list[Any] = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    needed = {size.node.expr for size in sizes if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol}
    found = (node.meta.get("val") for node in graph.nodes if node.op == "call_function")
    return needed <= {value.node.expr for value in found if isinstance(value, torch.SymInt)}


def _check_program(program: ExportedProgram) -> None:
    if conversion.has_order_of_torch():
        raise Uncovered("torch puts nodes in an order of its own")
    if any(entry.signature is not None for entry in program.module_call_graph if entry.fqn):
        raise Uncovered("signatures of submodules are kept")
    if program.graph_signature.user_inputs_to_mutate:
        raise Uncovered("a program that writes into its inputs")
    for node in program.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            if not isinstance(value, (torch.Tensor, torch.SymInt, int, float, bool, str, type(None))):
                raise Uncovered(f"an input of type {type(value).__name__}")


def _settle_writes(graph: Graph, mode: FakeTensorMode) -> None:
    for node in read_results(graph, mode):
        raise Uncovered(f"{node.target}, which writes into what is read elsewhere")


def with_graph(program: ExportedProgram, graph_module: GraphModule) -> ExportedProgram:
    """Return a program with another graph, whose inputs and outputs are those of the old one, in the same order."""
    return assemble_program(
        graph_module=graph_module,
        signature=conversion.updated_signature(program.graph_signature, graph_module),
        state_dict=program.state_dict,
        constants=program.constants,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        verifiers=[conversion.Verifier],
        guards_code=guards_code_of(program),
    )
