"""Why a program cannot be converted or emitted: which operators of the model, at which lines, and what helps.

This module examines the program itself, not the text of the error: which operators ExecuTorch's verifier rejects, which
have no out variant, which constants are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from executorch.exir import EdgeCompileConfig
from executorch.exir.verification.verifier import EXIREdgeDialectVerifier
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream import installed
from exir_lowering._upstream.edge import checks_validity, lacks_out_variant, note_mistyped, out_variant, with_allowed
from exir_lowering._upstream.operators import is_view, operator_name, written_arguments
from exir_lowering.errors import InputError, few, let_through

Found = tuple[tuple[str, ...], Node]  # a node, and the path of the graph that holds it

_ROLES = {"__ret": "result", "__ret_0": "result"}

_LISTED = 20  # how many operators a message lists before it only counts the rest
_NAMES = 3  # how many nodes of one operator a message names


def explain_conversion(
    name: str,
    program: ExportedProgram,
    error: Exception,
    config: EdgeCompileConfig,
    convert: Callable[[EdgeCompileConfig], ExportedProgram],
) -> InputError:
    """Return why a method was not converted; `convert` converts the program with another configuration."""
    if checks_validity(config):
        unchecked = with_allowed(config, (), checked=False)
        try:
            converted = convert(unchecked)
        except Exception as another:
            let_through(another)
            converted = None
        if converted is not None and (reason := explain_invalid(name, converted, unchecked, config)) is not None:
            return reason
    return _written_constants(name, program) or InputError(
        f"Method {name!r} could not be converted to Edge dialect: {type(error).__name__}: {error}"
    )


def explain_invalid(
    name: str, program: ExportedProgram, config: EdgeCompileConfig, requested: EdgeCompileConfig
) -> InputError | None:
    """Return what makes a program invalid Edge dialect, None if nothing; `config` has what partitioners keep whole."""
    foreign = _refused_operators(program, with_allowed(config, ()))
    targets = [nodes[0][1].target for nodes in foreign.values()]
    rest = _refusal(EXIREdgeDialectVerifier(edge_compile_config=with_allowed(config, targets)), program.graph_module)
    if not foreign and rest is None:
        return None
    lines = [f"Method {name!r} is not valid Edge dialect."]
    if foreign:
        lines += ["Operators that are not in the Core ATen operator set:", *_list_places(foreign)]
    if rest is not None:
        lines += _mistyped(program) or [f"ExecuTorch's check of Edge programs rejects it: {rest}"]
    helps = with_allowed(requested, targets, checked=rest is None)
    lines.append(
        f"What to do: {'allow the operators' if rest is None else 'disable the check'} with "
        f"LoweringOptions(edge_compile_config={_find_written(helps)}), or rewrite these lines of the model with other "
        "operators."
    )
    return InputError("\n".join([*lines, *_kernels(targets)]))


def _refused_operators(program: ExportedProgram, config: EdgeCompileConfig) -> dict[str, list[Found]]:
    """Return the operators that ExecuTorch's verifier does not know, with their nodes."""
    verifier = EXIREdgeDialectVerifier(edge_compile_config=config)
    refused: dict[str, list[Found]] = {}
    for path, node in graphs.every_node(program.graph_module):
        if graphs.is_operator(node) and _refusal(verifier.check_valid_op, node.target) is not None:
            refused.setdefault(graphs.operator_name(node), []).append((path, node))
    return refused


def _refusal(check: Callable[[Any], object], value: Any) -> str | None:
    """Return what ExecuTorch says against a value, None if it accepts it."""
    try:
        check(value)
    except Exception as error:
        let_through(error)
        return f"{type(error).__name__}: {error}"
    return None


def _mistyped(program: ExportedProgram) -> list[str]:
    """List the operators that take or return dtypes which ExecuTorch does not define them for."""
    found: dict[str, list[Found]] = {}

    def note(node: Node, types: Mapping[str, Any]) -> None:
        dtypes = ", ".join(f"{_ROLES.get(name, name)} {str(dtype)[6:]}" for name, dtype in types.items())
        found.setdefault(f"{graphs.operator_name(node)} ({dtypes})", []).append(((), node))

    _refusal(partial(note_mistyped, note=note), program.graph_module)
    return ["Operators with dtypes that ExecuTorch does not define them for:", *_list_places(found)] if found else []


def _list_places(operators: Mapping[str, Sequence[Found]]) -> list[str]:
    """List operators with their nodes and source lines."""
    lines = []
    for name, nodes in list(operators.items())[:_LISTED]:
        lines += [f"    {name}", *_where(nodes)]
    if len(operators) > _LISTED:
        lines.append(f"    and {len(operators) - _LISTED} more operators")
    return lines


def _where(nodes: Sequence[Found]) -> list[str]:
    """List where in the model nodes come from, one line per source line."""
    places: dict[tuple[str, str], list[str]] = {}
    for path, node in nodes:
        place = (graphs.module_stack(node), graphs.source_line(node) or "source line not known")
        places.setdefault(place, []).append(graphs.qualified_name(path, node))
    lines = []
    for (module, line), names in list(places.items())[:_NAMES]:
        inside = f" in module {module!r}" if module else ""
        lines.append(f"        {few(names, _NAMES)}{inside}: {line}")
    if len(places) > _NAMES:
        lines.append(f"        and at {len(places) - _NAMES} more lines of the model")
    return lines


def _kernels(targets: Iterable[Any]) -> list[str]:
    """Say what happens to operators that are allowed and stay on the host."""
    homeless, missing = [], []
    known = installed.kernels()
    for target in targets:
        out = out_variant(target)
        if out is None:
            homeless.append(operator_name(target))
        elif known is not None and out not in known:
            missing.append(f"{operator_name(target)} ({out})")
    lines = []
    if missing:
        lines.append(
            f"The ExecuTorch runtime here has no kernel for {', '.join(missing)}: if you allow such an operator, it "
            "lowers, but on the host it only runs in a runtime that has its kernel. Let a partitioner delegate it, or "
            "replace it with other operators."
        )
    if homeless:
        lines.append(
            f"There is no out variant of {', '.join(homeless)}, and a file cannot have such an operator on the host: "
            "allowing it helps only if a partitioner delegates it. Otherwise replace it with other operators."
        )
    return lines


def _find_written(config: EdgeCompileConfig) -> str:
    """Write a configuration as Python, without fields that have their defaults."""
    default, given = EdgeCompileConfig(), []
    for entry in fields(config):
        value = getattr(config, entry.name)
        if value != getattr(default, entry.name):
            text = repr(value)
            if isinstance(value, list):
                text = f"[{', '.join(f'torch.ops.{operator_name(item)}' for item in value)}]"
            given.append(f"{entry.name}={text}")
    return f"EdgeCompileConfig({', '.join(given)})"


def _written_constants(name: str, program: ExportedProgram) -> InputError | None:
    """Describe which constants a program writes that are not state: those of which it has no content."""
    constants = {
        node: spec.target or ""
        for node, spec in graphs.lifted_inputs(program).items()
        if spec.kind is InputKind.CONSTANT_TENSOR
    }
    written: dict[str, list[Found]] = {}
    for node in filter(graphs.is_mutating, program.graph.nodes):
        for argument in written_arguments(node.target):
            base = base_of(graphs.argument(node, argument))
            if base in constants:
                written.setdefault(constants[base], []).append(((), node))
    if not written:
        return None
    lines = [f"Method {name!r} writes into tensors that are constants of the exported program, not buffers:"]
    for target, nodes in written.items():
        lines += [f"    {target}", *_where(nodes)]
    lines.append(
        "What to do: make the tensor a buffer of its module, self.register_buffer(name, tensor), and write into that, "
        "not into its `data`."
    )
    return InputError("\n".join(lines))


def explain_touched(name: str, written: Mapping[str, Sequence[Node]]) -> InputError:
    """Return why the tensors behind inputs cannot be state, given what writes them."""
    lines = [f"Method {name!r} writes into tensors that torch.export has changed while it ran the model:"]
    for target, nodes in written.items():
        lines += [f"    {target}", *_where([((), node) for node in nodes])]
    lines.append(
        "It does so with a tensor that is reached through an object that is not a module, as in transformers' "
        "StaticCache, and written without an input of the method. What to do: export with "
        "torch.export.export(model, inputs, strict=True), from a new model; or make the tensor a buffer of its module, "
        "self.register_buffer(name, tensor), and write into that."
    )
    return InputError("\n".join(lines))


def explain_overlap(name: str, targets: Sequence[str], writers: Sequence[Node]) -> InputError:
    """Return why two tensors of one memory cannot be state."""
    one, other = targets
    lines = [f"Method {name!r} has {one!r} and {other!r}, which overlap in memory, and what they cover is written:"]
    lines += _where([((), node) for node in writers]) or ["        by another method"]
    lines.append(
        "What to do: register the whole tensor as a buffer of one dtype, self.register_buffer(name, tensor), and take "
        "the parts of it in `forward`."
    )
    return InputError("\n".join(lines))


def base_of(node: Any) -> Any:
    """Return what a view is a view of."""
    while isinstance(node, Node) and node.op == "call_function" and is_view(node.target) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


class OutVariants:
    """ExecuTorch's pass that gives operators their out variants; it records those that have none."""

    def __init__(self, inner: Callable[[GraphModule], Any]) -> None:
        self._inner = inner
        # the method that the pass processed last, by number, and what has no out variant in it
        self.method, self.missing = -1, dict[str, list[Found]]()

    def __call__(self, graph_module: GraphModule) -> Any:
        """Run ExecuTorch's pass."""
        self.method += 1
        try:
            return self._inner(graph_module)
        except Exception as error:
            let_through(error)
            for path, node in graphs.every_node(graph_module):
                if lacks_out_variant(node):
                    self.missing.setdefault(graphs.operator_name(node), []).append((path, node))
            raise


def explain_emission(programs: Mapping[str, ExportedProgram], error: Exception, variants: OutVariants) -> InputError:
    """Return why lowered programs were not emitted; the pass has recorded what has no out variant."""
    if not variants.missing:
        return InputError(
            f"Methods {', '.join(map(repr, programs))} could not be emitted: {type(error).__name__}: {error}"
        )
    lines = [
        f"Method {list(programs)[variants.method]!r} cannot be emitted: these operators stay on the host and have no "
        "out variant, one that writes into given memory; a file cannot contain others.",
        *_list_places(variants.missing),
        f"What to do: let a partitioner take {', '.join(sorted(variants.missing))} (`plan` says why one did not), or "
        "rewrite these lines of the model with other operators. A custom operator needs an overload that takes `out` "
        "by keyword, and a kernel for it in the runtime.",
    ]
    return InputError("\n".join(lines))
