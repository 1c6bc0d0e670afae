"""Programs and graph modules, made from their parts without checking again what is already valid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch._export.verifier import Verifier  # a program names the dialect that it is in by a verifier
from torch._guards import detect_fake_mode  # the mode of the fake tensors of a graph, which a new one has to share
from torch._higher_order_ops.executorch_call_delegate import executorch_call_delegate  # no public name in torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # distinguishes tensors without memory
from torch.export import ExportedProgram, ExportGraphSignature
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.fx._lazy_graph_module import _LazyGraphModule  # makes Python code when it is called; few partitions are
from torch.utils import _pytree  # an ExportedProgram describes its inputs and outputs by pytree specs
from torch.utils._sympy.value_ranges import bound_sympy  # says between which numbers an expression of sizes lies

from exir_lowering._upstream.fakes import limits_of

ATEN_VERIFIER, CALL_DELEGATE, pytree = Verifier, executorch_call_delegate, _pytree
load_treespec = getattr(_pytree.treespec_loads, "__wrapped__", _pytree.treespec_loads)
"""`treespec_loads` without its cache, which keeps classes of modules that were reloaded."""


def lazy_graph_module(root: Mapping[str, Any], graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """Return a graph module, of the graph itself, that compiles its Python code at its first call, if any."""
    return _LazyGraphModule(dict(root), graph)


def fake_mode_of(graph_module: torch.fx.GraphModule) -> FakeTensorMode | None:
    """Return the fake mode of a graph's placeholders, None if they have no fake tensor."""
    values = [node.meta.get("val") for node in graph_module.graph.nodes if node.op == "placeholder"]
    mode: FakeTensorMode | None = detect_fake_mode(values)
    return mode


def shape_env_in(program: ExportedProgram) -> Any:
    """Return the shape environment of a program's values; None if it has none."""
    mode = fake_mode_of(program.graph_module)
    return None if mode is None else mode.shape_env


def has_limits(program: ExportedProgram) -> bool:
    """Return whether the sizes of a program's inputs are bounded together."""
    return bool(limits_of(shape_env_in(program)))


def in_order_of_inputs(external: list[torch.fx.Node]) -> list[torch.fx.Node]:
    """Order what a partition reads, found in order of its nodes, as torch does for ExecuTorch's engine."""
    if torch.__version__ < "2.14" or any(node.op != "placeholder" for node in external):
        return external
    return sorted(external)


def assemble_program(
    *,
    graph_module: torch.fx.GraphModule,
    signature: ExportGraphSignature,
    state_dict: dict[str, Any],
    constants: dict[str, Any],
    range_constraints: dict[Any, Any],
    verifiers: Sequence[Any],
    module_call_graph: list[ModuleCallEntry] | None = None,
    example_inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    guards_code: Sequence[str] = (),
    kind: type[ExportedProgram] = ExportedProgram,
) -> ExportedProgram:
    """Make a program from valid parts, which torch would check slowly; without a call graph, it takes flat lists."""
    program = object.__new__(kind)
    program._graph_module = graph_module
    program._graph_signature = signature
    program._state_dict = state_dict
    program._range_constraints = range_constraints
    if module_call_graph is None:
        in_spec = pytree.tree_flatten((tuple(signature.user_inputs), {}))[1]
        out_spec = pytree.tree_flatten(list(signature.user_outputs))[1]
        called = ModuleCallSignature(inputs=[], outputs=[], in_spec=in_spec, out_spec=out_spec)
        module_call_graph = [ModuleCallEntry("", called)]
    program._module_call_graph = module_call_graph
    program._example_inputs = example_inputs
    program._constants = constants
    program._verifiers = list(verifiers)
    program._guards_code = list(guards_code)
    return program


class _FixedSignature(ExportGraphSignature):
    """A signature that is not changed any more and makes each of its tables once; its copies are ordinary ones."""

    def __reduce__(self) -> Any:
        # torch's tables are read-only views, which cannot be copied.
        return ExportGraphSignature, (self.input_specs, self.output_specs)


for _name, _table in vars(ExportGraphSignature).items():
    if isinstance(_table, property) and _table.fget is not None:
        _cached = cached_property(_table.fget)
        _cached.__set_name__(_FixedSignature, _name)
        setattr(_FixedSignature, _name, _cached)


def fix_signature(program: ExportedProgram) -> None:
    """Build each table of a program's signature once, which must not change from now on; torch does at each look-up."""
    signature = program.graph_signature
    program._graph_signature = _FixedSignature(signature.input_specs, signature.output_specs)


class DelegatedProgram(ExportedProgram):
    """The program of a partition in eager PyTorch, which may run on fake tensors first, as in the body of a loop."""

    def module(self, check_guards: bool = True) -> torch.fx.GraphModule:
        """Return the program as a module, with fake weights inside a fake tensor mode."""
        module = super().module(check_guards=check_guards)
        mode: Any = detect_fake_mode(None)
        for part in module.modules() if mode is not None else ():
            tables: list[dict[str, Any]] = [part._parameters, part._buffers, part.__dict__]
            for table in tables:
                for name, value in list(table.items()):
                    if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                        table[name] = mode.from_tensor(value, static_shapes=True)
        return module


def bounds_of(expression: Any, ranges: Mapping[Any, Any]) -> Any:
    """Return what an expression of sizes can be: a value with `lower` and `upper`."""
    return bound_sympy(expression, dict(ranges))


def guards_code_of(program: ExportedProgram) -> list[str]:
    """Return the input guards that export recorded."""
    return list(program._guards_code)


def find_registered_type(name: str) -> Any:
    """Return the type that pytree knows by a serialized name, without importing what it names; None if unknown."""
    kind = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)
    # Types without such a name share a key.
    own = name != pytree.NO_SERIALIZED_TYPE_NAME_FOUND and kind in pytree.SUPPORTED_SERIALIZED_TYPES
    return kind if own else None


def context_reader(kind: Any) -> Callable[[Any], Any] | None:
    """Return what reads a registered type's context in a serialized structure; None if that is plain JSON."""
    reader: Callable[[Any], Any] | None = pytree.SUPPORTED_SERIALIZED_TYPES[kind].from_dumpable_context
    return reader


def list_registered_types() -> list[Any]:
    """Return the types registered with pytree."""
    return list(pytree.SUPPORTED_NODES)
