"""Copies of graphs and programs that share their tensors, and for conversions, copies with values of their own.

Nodes describe their values with fake tensors, whose symbolic sizes belong to a shape environment. A conversion writes
into it, and the next one of the program would find that: so each gets its own values, fake mode and environment.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram, ExportGraphSignature
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind, SymIntArgument
from torch.fx import Graph, GraphModule, Node, map_arg

from exir_lowering._upstream.fakes import FakeCopies, has_symbols as environment_has_symbols, shape_env_of
from exir_lowering._upstream.programs import assemble_program, guards_code_of, lazy_graph_module, pytree
from exir_lowering._upstream.tensors import SYMBOLS
from exir_lowering.graphs import debug_handles
from exir_lowering.graphs.walking import attribute, every_node, walk

LIFTED_ORDER = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
"""The kinds of lifted inputs, in the order of a partition's placeholders."""

_STATE = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)


def copy_graph_module(graph_module: GraphModule) -> GraphModule:
    """Return a copy of a graph and of those nested in it; tensors, lowered modules and metadata values are shared."""
    graph = Graph()
    root: dict[str, Any] = {}
    env: dict[Node, Node] = {}
    for node in graph_module.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        if node.op == "get_attr" and node.target not in root:
            value = attribute(graph_module, node.target)
            root[node.target] = copy_graph_module(value) if isinstance(value, GraphModule) else value
    copied = lazy_graph_module(root, graph)
    copied.meta.update(graph_module.meta)
    return copied


def specialise(graph_module: GraphModule, numbers: Mapping[Any, Any], shape_env: Any) -> GraphModule:
    """Return a copy of a graph with numbers in the place of symbols; RuntimeError if a check refuses them.

    What is a number now is a literal. Its placeholder stays in the graph; in nested graphs it leaves, with its operand.
    """
    fakes = FakeCopies(numbers, shape_env)

    def copied(module: GraphModule, *, nested: bool) -> tuple[GraphModule, list[bool]]:
        """Copy a graph, and say which of its inputs are left."""
        graph, root = Graph(), dict[str, Any]()
        env: dict[Node, Any] = {}
        left: list[bool] = []
        operands: dict[Node, list[bool]] = {}  # of a nested graph
        for node in module.graph.nodes:
            before = node.meta.get("val")
            value = pytree.tree_map(fakes.copy, before)
            number = isinstance(before, SYMBOLS) and value is not before and isinstance(value, (int, float))
            if node.op == "placeholder" and nested:
                left.append(not number)
            if number:
                if node.op == "placeholder" and not nested:
                    graph.node_copy(node).meta["val"] = value
                env[node] = value
                continue
            given = {isinstance(env[each], Node) for each in node.all_input_nodes}
            if node.op == "call_function" and value is None and given == {False}:  # a check of numbers only
                args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
                node.target(*args, **kwargs)
                continue
            if node.op == "get_attr":
                inner = attribute(module, str(node.target))
                if isinstance(inner, GraphModule):
                    inner, operands[node] = copied(inner, nested=True)
                root[str(node.target)] = inner
            env[node] = made = graph.node_copy(node, env.__getitem__)
            if before is not None:
                made.meta["val"] = value
            kept = next((operands[each] for each in node.args if each in operands), [])
            if not all(kept):  # operands are what comes behind the graphs, but for a name
                last = max(i for i, each in enumerate(made.args) if isinstance(each, Node) and each.op == "get_attr")
                keep, args = iter(kept), list(made.args[: last + 1])
                for each in made.args[last + 1 :]:
                    if isinstance(each, (tuple, list)):
                        args.append(type(each)(one for one in each if next(keep)))
                    elif isinstance(each, str) or next(keep):
                        args.append(each)
                made.args = tuple(args)
        copy = lazy_graph_module(root, graph)
        copy.meta.update(module.meta)
        return copy, left

    return copied(graph_module, nested=False)[0]


def specialise_program(program: ExportedProgram, numbers: Mapping[Any, Any]) -> ExportedProgram:
    """Return a copy of a program with numbers in the place of symbols; RuntimeError if a check refuses them."""
    values = (shape_env_of(node.meta.get("val")) for node in user_inputs(program))
    module = specialise(program.graph_module, numbers, next(filter(None, values), None))
    results: Any = module.graph.output_node().args[0]
    copied = copy_program(program, module)
    copied.example_inputs = None  # they have other sizes
    specs = copied.graph_signature.output_specs
    for index, (spec, result) in enumerate(zip(specs, results, strict=True)):
        if isinstance(spec.arg, SymIntArgument) and not isinstance(result, Node):
            specs[index] = replace(spec, arg=ConstantArgument(name=spec.arg.name, value=result))
    for each in program.range_constraints:
        if each.free_symbols & set(numbers):
            del copied.range_constraints[each]
    return copied


def copy_program(
    program: ExportedProgram, graph_module: GraphModule | None = None, *, kind: type[ExportedProgram] = ExportedProgram
) -> ExportedProgram:
    """Return a copy of a program's graph (or another one), signature and tables; the tensors are shared.

    Args:
        program: The program. It is not changed.
        graph_module: The graph to use, which is not copied; None for a copy of the program's.
        kind: The class of the result.
    """
    return assemble_program(
        graph_module=graph_module or copy_graph_module(program.graph_module),
        signature=copy_signature(program),
        state_dict=dict(program.state_dict),
        constants=dict(program.constants),
        range_constraints=dict(program.range_constraints),
        module_call_graph=list(program.module_call_graph),
        example_inputs=program.example_inputs,
        verifiers=program.verifiers,
        guards_code=guards_code_of(program),
        kind=kind,
    )


def copy_signature(program: ExportedProgram) -> ExportGraphSignature:
    """Return a copy of a program's signature, with its names: torch renames in place when a node is replaced."""
    signature = program.graph_signature
    inputs = [replace(spec, arg=copy.copy(spec.arg)) for spec in signature.input_specs]
    outputs = [replace(spec, arg=copy.copy(spec.arg)) for spec in signature.output_specs]
    return ExportGraphSignature(input_specs=inputs, output_specs=outputs)


def placeholders(program: ExportedProgram) -> dict[Node, InputSpec]:
    """Return a program's placeholders with their specs."""
    return dict(zip(program.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True))


def user_inputs(program: ExportedProgram) -> tuple[Node, ...]:
    """Return the placeholders of the values in a program's arguments."""
    return tuple(node for node, spec in placeholders(program).items() if spec.kind is InputKind.USER_INPUT)


def lifted_inputs(program: ExportedProgram) -> dict[Node, InputSpec]:
    """Return the placeholders that hold parameters, buffers and lifted constants, with their specs."""
    return {node: spec for node, spec in placeholders(program).items() if spec.kind in LIFTED_ORDER}


def lifted_value(program: ExportedProgram, name: str | None) -> Any:
    """Return the parameter, buffer or constant that a program keeps under a name; None if there is none.

    Args:
        program: The program.
        name: The `target` of its spec.
    """
    return program.state_dict.get(name, program.constants.get(name))


def written_state(program: ExportedProgram) -> frozenset[str]:
    """Return the buffers and parameters that a program writes; `buffers_to_mutate` lacks some of equal values."""
    specs = program.graph_signature.output_specs
    return frozenset(str(spec.target) for spec in specs if spec.kind in _STATE)


def own_state(programs: Iterable[ExportedProgram]) -> None:
    """Give private copies their own current state, so that later runs of theirs and of the model are independent.

    Programs that share a buffer still share it afterwards, also with one that only reads it.
    """
    every = list(programs)
    tables = [table for program in every for table in (program.state_dict, program.constants)]
    copies: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}
    for program in every:
        for name in written_state(program):
            for table in (program.state_dict, program.constants):
                tensor = table.get(name)
                if isinstance(tensor, torch.Tensor):
                    copies.setdefault(memory_key(tensor), (tensor, tensor.detach().clone()))
    for table in tables if copies else ():
        for name, tensor in list(table.items()):
            if isinstance(tensor, torch.Tensor) and (key := memory_key(tensor)) in copies:
                copied = copies[key][1]  # a program's tables have what its signature says
                parameter = isinstance(tensor, torch.nn.Parameter)
                table[name] = torch.nn.Parameter(copied, requires_grad=False) if parameter else copied


def memory_key(tensor: torch.Tensor) -> Hashable:
    """Return what is equal for tensors that are the same elements of the same memory, whatever objects they are."""
    try:
        address = tensor.untyped_storage().data_ptr() if tensor.numel() else 0
    except (RuntimeError, NotImplementedError):  # of a subclass without memory of its own
        address = 0
    if not address:
        return id(tensor)
    return address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def memory_span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return from which address to which one the elements of a tensor lie; None if it has no memory of its own."""
    if not isinstance(memory_key(tensor), tuple):
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def private_copy(program: ExportedProgram, *, handles: bool = False, unbacked: bool = False) -> ExportedProgram:
    """Copy a program, with values of its own if it has symbolic sizes, and if they are plain fake tensors.

    `handles` fills in missing debug handles. If `unbacked`, only sizes that depend on data count.
    """
    program = debug_handles.copy_with_handles(program) if handles else copy_program(program)
    if not has_symbols(program, unbacked=unbacked):
        return program
    copies = FakeCopies()
    replaced: list[tuple[dict[str, Any], Any]] = []
    for _, node in every_node(program.graph_module):
        if "val" not in node.meta:
            continue
        leaves, spec = pytree.tree_flatten(node.meta["val"])
        if not all(map(copies.possible, leaves)):
            return program
        if any(isinstance(leaf, (torch.Tensor, *SYMBOLS)) for leaf in leaves):
            replaced.append((node.meta, pytree.tree_unflatten(list(map(copies.copy, leaves)), spec)))
    for meta, value in replaced:
        meta["val"] = value
    return program


def has_symbols(program: ExportedProgram, *, unbacked: bool = False) -> bool:
    """Return whether the shape environments of a program have symbols; usually, the first input answers it."""
    environments = set()
    for _, node in every_node(program.graph_module):
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            environment = shape_env_of(leaf)
            if environment is not None and id(environment) not in environments:
                environments.add(id(environment))
                if environment_has_symbols(environment, unbacked=unbacked):
                    return True
    return False


def list_tensors(programs: Iterable[ExportedProgram]) -> Iterator[torch.Tensor]:
    """Yield the tensors that programs read, including those in their nested graphs."""
    for program in programs:
        held = [*program.state_dict.values(), *program.constants.values()]
        for _, module in walk(program.graph_module):
            held += [attribute(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr")]
        yield from (value for value in held if isinstance(value, torch.Tensor))
