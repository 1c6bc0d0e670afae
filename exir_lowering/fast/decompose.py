"""Decompositions by distinct calls: the same as `ExportedProgram.run_decompositions`, which traces whole programs."""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from executorch.exir._program_utils import _get_updated_graph_signature
from torch._export.passes._node_metadata_hook import _node_metadata_hook, _set_node_metadata_hook
from torch._export.utils import _special_op_to_preserve_cia
from torch._export.verifier import Verifier
from torch._higher_order_ops.effects import has_effects  # keeps calls in order, by passing tokens
from torch.export import ExportedProgram
from torch.export.exported_program import _split_decomp_table_to_cia_and_python_decomp
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
from torch.fx.passes.runtime_assert import insert_deferred_runtime_asserts

from exir_lowering import graphs
from exir_lowering._upstream import operators
from exir_lowering._upstream.fakes import FakeTensor, may_be_negative, storage_of
from exir_lowering._upstream.programs import assemble_program, fake_mode_of, guards_code_of, lazy_graph_module
from exir_lowering._upstream.tensors import version
from exir_lowering._upstream.value_keys import MEMORY, NotCoveredError, evaluate, renew
from exir_lowering.fast.calls import DistinctCall
from exir_lowering.fast.inplace import FUNCTIONALIZED, Writes, is_mutable
from exir_lowering.fast.lookups import source_of
from exir_lowering.fast.rewriter import COPIED_META, Plain, Stage, known, rewrite
from exir_lowering.fast.templates import SYMBOLIC_OPERATORS, Template
from exir_lowering.graphs.inlining import SET_GRAD, replace_call

_ATEN = torch.ops.aten
# Operators that tracing itself treats in a way of its own.
_TRACED_APART = frozenset(
    {
        *(_ATEN.alias.default, _ATEN.detach.default, _ATEN.view.dtype),
        *(_ATEN.lift.default, _ATEN.lift_fresh.default, _ATEN.lift_fresh_copy.default),
    }
)
_ITEM = frozenset({_ATEN.item.default, _ATEN._local_scalar_dense.default})
_STATE = frozenset({OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION})
_HARMLESS = frozenset({torch._C.DispatchKey.Meta, torch._C.DispatchKey.Functionalize})
# The functions that compute sizes from sizes, and the targets of the nodes whose results are sizes.
_COMPUTING = frozenset(op for op in SYMBOLIC_OPERATORS if not operators.is_overload(op)) - {operator.getitem}
_MAKING_SIZES = _COMPUTING | {_ATEN.sym_size.int}

_ADDED_BY = 'File "torch/fx/passes/runtime_assert.py", line 24, in insert_deferred_runtime_asserts'  # as in torch


class Decomposition(Stage):
    """The stage that decomposes operators as a table says; it runs without gradients, as `run_decompositions`."""

    name = "Interpreter_PropagateUnbackedSymInts"  # that of the interpreter in which torch decomposes
    gradients = False
    decomposes = True

    def __init__(self, table: Mapping[Any, Any], described: Container[Node] = ()) -> None:
        """Describe the stage, by a table as for `run_decompositions` and the calls whose histories name it already."""
        self._table, self._described = dict(table), described
        # What it says of composite operators, and the other ones that it decomposes.
        composite, self._in_python = _split_decomp_table_to_cia_and_python_decomp(dict(table))
        self._whole = {op for op, do in composite.items() if do is _special_op_to_preserve_cia}
        self.key = _one_of_equals(("decompose", frozenset((op, _identity(do)) for op, do in self._table.items())))
        self._plain: dict[Any, bool] = {}

    def plain(self, node: Node, values: Sequence[Any]) -> Plain | None:
        """Return a call's operator if it is traced as it is."""
        target = node.target
        if target in _ITEM:  # the number has the name of before
            if not isinstance(node.meta["val"], torch.SymInt) or may_be_negative(node.meta["val"]):
                raise NotCoveredError(f"a number that {target} reads, which may be negative or a fraction")
            return Plain(target if target in self._whole else _ATEN._local_scalar_dense.default, same=True)
        if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool)):
            # It takes a size of an input, or computes with such sizes: so does tracing.
            of_input = target is _ATEN.sym_size.int and node.args[0].op == "placeholder"  # type: ignore[union-attr]
            if not of_input and target not in _COMPUTING:
                raise NotCoveredError(f"the symbolic size {node.meta['val']}, computed by {target}")
            return Plain(target, same=True)
        if target in (_ATEN._assert_scalar.default, FUNCTIONALIZED):
            return Plain(target, same=True) if _elements_follow(node) else None
        if target not in self._plain:
            self._plain[target] = self._traced_as_it_is(target)
        return Plain(target, same=True) if self._plain[target] and _elements_follow(node) else None

    def _traced_as_it_is(self, target: Any) -> bool:
        if target is operator.getitem:
            return True
        if not operators.is_overload(target) or target in self._in_python or target in _TRACED_APART:
            return False
        if operators.mutates_arguments(target) or {str(each.type) for each in target._schema.returns} != {"Tensor"}:
            return False
        if has_effects(target):
            return False
        # Other kernels in Python change what a call is traced as.
        return target in self._whole if operators.is_composite(target) else _HARMLESS.issuperset(target.py_kernels)

    def continues_history(self, node: Node) -> bool:
        """Return whether a call was taken from a nested graph, or made for another: torch ascribes it to that."""
        return node in self._described

    def overwrites(self, node: Node) -> bool:
        """Return whether a call overwrites its first operand, which nothing reads afterwards."""
        return is_mutable(node)

    def check(self, target: Any) -> None:
        """Raise NotCoveredError for an operator that tracing treats by data, or by what it did before."""
        super().check(target)
        if torch.Tag.data_dependent_output in target.tags:
            raise NotCoveredError(f"{target}, whose result depends on data")
        if has_effects(target):
            raise NotCoveredError(f"{target}, which has effects")

    def convert(self, calls: Sequence[DistinctCall], *, alone: bool = False) -> list[Template]:
        """Return the templates of calls, with what composite operators among them write."""
        templates = super().convert(calls, alone=alone)
        return [replace(made, written=_written(call, made)) for call, made in zip(calls, templates, strict=True)]

    def apply(self, graph: Graph) -> GraphModule:
        """Decompose calls by `run_decompositions`."""
        inputs: Any = graph.find_nodes(op="placeholder")
        outputs: Any = graph.output_node().args[0]
        program = assemble_program(
            graph_module=lazy_graph_module({}, graph),
            signature=ExportGraphSignature(
                [InputSpec(InputKind.USER_INPUT, TensorArgument(name=node.name), None) for node in inputs],
                [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=node.name), None) for node in outputs],
            ),
            state_dict={},
            constants={},
            range_constraints={},
            verifiers=[Verifier],
        )
        decomposed: GraphModule = program.run_decompositions(dict(self._table)).graph_module
        return decomposed


def _written(call: DistinctCall, template: Template) -> frozenset[int]:
    """Return the elements of a composite operator's result that it writes in place, if it is decomposed."""
    target, mode = call.node.target, next((v.fake_mode for v in call.values if isinstance(v, FakeTensor)), None)
    if mode is None or not operators.is_composite(target) or any(node.target is target for node in template.nodes):
        return frozenset()
    value_of = dict(zip(call.operands, (renew(value, None) for value in call.values), strict=True)).__getitem__
    result = evaluate(call.node, target, value_of, mode, gradients=False)
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
    """Return what `run_decompositions` makes of a program, whose graph may become an equal one; or NotCoveredError."""
    graph_module, graph = program.graph_module, program.graph
    # torch may be told to put nodes in an order of its own; not before torch 2.14.
    if getattr(sys.modules.get("torch._dynamo.config"), "canonicalize_output_graph_node_order", False):
        raise NotCoveredError("torch puts nodes in an order of its own")
    if any(entry.signature is not None for entry in program.module_call_graph if entry.fqn):
        raise NotCoveredError("signatures of submodules are kept")
    if program.graph_signature.user_inputs_to_mutate:
        raise NotCoveredError("a program that writes into its inputs")
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if not isinstance(value, (torch.Tensor, torch.SymInt, int, float, bool, str, type(None))):
            raise NotCoveredError(f"an input of type {type(value).__name__}")
        if known(value) and node.name in program.graph_signature.inputs_to_buffers:
            raise NotCoveredError("a buffer whose content is known")  # tracing forgets that of other constants
    mode = fake_mode_of(graph_module)
    if mode is None:
        raise NotCoveredError("a program without tensors as inputs")
    writes = Writes(graph, mode, _own_buffers(program), Decomposition.name)
    writes.read_results()  # first, as torch writes other histories for what is not inlined here
    writes.described |= inline_no_grad(graph_module)
    writes.read_results()
    writes.renew_views()
    program = _return(program, writes.last())
    _fold_numbers(graph)
    _add_sizes(graph_module, mode.shape_env)
    made = rewrite(graph_module, Decomposition(table, writes.described))
    _drop_copies(program, made.graph)
    return with_graph(program, made)


def _own_buffers(program: ExportedProgram) -> frozenset[Node]:
    """Return the buffers that share their memory with nothing else."""
    buffers = program.graph_signature.inputs_to_buffers
    stored = {**program.constants, **program.state_dict}
    used = Counter(storage_of(each) for each in stored.values() if isinstance(each, torch.Tensor))
    nodes = [node for node in program.graph.find_nodes(op="placeholder") if node.name in buffers]
    found = ((node, stored.get(buffers[node.name])) for node in nodes)
    return frozenset(node for node, tensor in found if tensor is not None and used[storage_of(tensor)] == 1)


def _return(program: ExportedProgram, written: Mapping[Node, Node]) -> ExportedProgram:
    """Let a program return what it has written into buffers, first."""
    signature, output = program.graph_signature, program.graph.output_node()
    if not written:
        return program
    if signature.buffers_to_mutate:
        raise NotCoveredError("a program that writes into buffers, and returns others")
    buffers = signature.inputs_to_buffers
    output.args = ((*written.values(), *output.args[0]),)
    specs = [
        OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(name=result.name), buffers[node.name])
        for node, result in written.items()
    ]
    program._graph_signature = ExportGraphSignature(signature.input_specs, [*specs, *signature.output_specs])
    return program


def _drop_copies(program: ExportedProgram, graph: Graph) -> None:
    """Let state take what a copy is of: torch takes it for a trace of `copy_`."""
    returned: Any = graph.output_node().args[0]
    for spec, copied in zip(program.graph_signature.output_specs, returned, strict=True):
        if spec.kind in _STATE and copied.target is _ATEN.copy.default:
            copied.replace_all_uses_with(copied.args[1])
            graph.erase_node(copied)


def inline_no_grad(graph_module: GraphModule) -> frozenset[Node]:
    """Replace calls under `torch.no_grad()` by what they compute; return the nodes, whose histories name the step."""
    inlined: set[Node] = set()
    for call in list(graph_module.graph.nodes):
        if call.op == "call_function" and call.target is SET_GRAD and call.args[0] is False:
            inlined.update(_inline(graph_module, call))
    for node in list(graph_module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph_module.graph.erase_node(node)
    return frozenset(inlined)


def _inline(graph_module: GraphModule, call: Node) -> list[Node]:
    nested = graphs.attribute(graph_module, str(call.args[1].target))  # type: ignore[union-attr]
    inline_no_grad(nested)
    if nested.graph.find_nodes(op="get_attr"):
        return []
    env: dict[Node, Any] = dict(zip(nested.graph.find_nodes(op="placeholder"), call.args[2:], strict=False))
    # torch ascribes what it traces there to the call around it.
    around = {name: call.meta[name] for name in COPIED_META if name in call.meta and name != "stack_trace"}
    inlined = []
    with graph_module.graph.inserting_before(call):
        for node in nested.graph.nodes:
            if node.op != "call_function":
                continue
            env[node] = copied = graph_module.graph.node_copy(node, env.__getitem__)
            copied.meta = {**node.meta, **around, "from_node": [source_of(call, Decomposition.name)]}
            inlined.append(copied)
    (returned,) = nested.graph.output_node().args
    replace_call(call, [env[node] for node in returned])
    return inlined


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


def _add_sizes(graph_module: GraphModule, shape_env: Any) -> None:
    """Add what torch adds after it has traced a program: sizes of inputs if a symbol lacks one, checks of numbers."""
    graph, inputs = graph_module.graph, graph_module.graph.find_nodes(op="placeholder")
    sized: list[Any] = [(node, getattr(node.meta.get("val"), "shape", ())) for node in inputs]
    dynamic = [(node, axis, n) for node, sizes in sized for axis, n in enumerate(sizes) if isinstance(n, torch.SymInt)]
    found = (node.meta.get("val") for node in graph.nodes if node.op == "call_function")
    known = {value.node.expr for value in found if isinstance(value, torch.SymInt)}
    lacking = not {size.node.expr for *_, size in dynamic if size.node.expr.is_Symbol} <= known
    if not lacking and not any(node.target in _ITEM for node in graph.nodes):
        return
    with graph.inserting_after(inputs[-1]):
        reader = graph.call_function(tuple)  # torch removes those that nothing reads
    sizes = []
    with graph.inserting_before(reader):
        for node, axis, size in dynamic if lacking else ():
            sizes.append(graph.call_function(_ATEN.sym_size.int, (node, axis)))
            sizes[-1].meta["val"] = size
    reader.args = (tuple(sizes),)
    with _set_node_metadata_hook(graph_module, partial(_node_metadata_hook, metadata={"stack_trace": _ADDED_BY})):
        insert_deferred_runtime_asserts(graph_module, shape_env, "exported program", export=True)
    graph.erase_node(reader)


def with_graph(program: ExportedProgram, graph_module: GraphModule) -> ExportedProgram:
    """Return a program with another graph, whose inputs and outputs are those of the old one, in the same order."""
    return assemble_program(
        graph_module=graph_module,
        signature=_get_updated_graph_signature(program.graph_signature, graph_module),
        state_dict=program.state_dict,
        constants=program.constants,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        verifiers=[Verifier],
        guards_code=guards_code_of(program),
    )
