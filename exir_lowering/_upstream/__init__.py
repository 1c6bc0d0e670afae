"""Private names of torch and executorch: the only file that touches them, a line of why for each."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial, wraps
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, ExecutorchProgramManager, tracer as et_tracer

# The tables of a `.pte` file as dataclasses; ExecuTorch reads and writes them together with its segments only.
from executorch.exir._serialize._flatbuffer_program import _flatbuffer_to_program, _program_to_flatbuffer

# Where a backend puts data that several payloads share; its module has no public alias.
from executorch.exir._serialize._named_data_store import NamedDataStore, NamedDataStoreOutput

# Writes a program that is no graph: one that only calls a payload. And puts the header that says where the segments
# start between a flatbuffer's first bytes and its tables.
from executorch.exir._serialize._program import (
    PTEFile,
    _ExtendedHeader,
    _insert_flatbuffer_header,
    serialize_pte_binary,
)

# What a serializer is told of a data file.
from executorch.exir._serialize.data_serializer import DataEntry, DataPayload
from executorch.exir.backend.backend_details import PreprocessResult
from executorch.exir.backend.canonical_partitioners import group_partitioner
from executorch.exir.backend.canonical_partitioners.group_partitioner import GroupBasedPartitioner
from executorch.exir.backend.utils import WhyNoPartition, WhyNoPartitionReporter

# Edge and backend operators wrap ATen ones; their classes have no public alias.
from executorch.exir.dialects.backend._ops import BackendOpOverload
from executorch.exir.dialects.edge._ops import EdgeOpOverload

# What it emits from which node is written down for the top graph of a method only.
from executorch.exir.emit import _emitter as et_emitter

# What a delegate call calls; its module has no public alias.
from executorch.exir.lowered_backend_module import LoweredBackendModule

# Tells which operators the pass to out variants passes over.
from executorch.exir.operator.convert import _get_overload_schema, is_out_variant, to_out_variant
from executorch.exir.passes import to_out_var_skiplist
from executorch.exir.passes.quant_fusion_pass import quant_fusion_and_const_prop_pass

# to_edge_transform_and_lower is one function; its parts (decompose as the partitioners ask, run passes, check that
# nothing preserved is left over) have no public name.
from executorch.exir.program import _program as et_program
from executorch.exir.program._program import (
    EdgeProgramManager,
    _can_skip_using_EDGE_DO_NOT_DECOMP,
    _gen_edge_manager_for_partitioners,
    _remove_invalid_ops_for_not_decompose,
    _sanity_check_graph_for_non_decomp_ops,
    _transform,
    _transform_with_pass_manager,
    lift_constant_tensor_pass,
)

# What checks the dtypes of Edge programs.
from executorch.exir.verification.arg_validator import EdgeOpArgValidator

# Tracing that is interrupted, or that a forked child never goes on with, leaves its switches as they are. They are
# looked up by name: they are global variables, and some come and go with versions of torch.
from torch import compiler as torch_compiler

# Operators on fake tensors run by it.
from torch._dispatch.python import enable_python_dispatcher
from torch._export import utils as export_utils

# `torch.export.load` takes a path and unpickles; what reads the parts of a file has no public name.
from torch._export.serde import schema as program_schema, serialize as serde
from torch._export.serde.union import _Union as SchemaUnion

# What run_decompositions raises for a program that writes one value to two buffers.
from torch._export.verifier import SpecViolationError

# A graph's fake tensors belong to a mode that a new fake tensor has to share.
from torch._guards import detect_fake_mode

# The call-delegate operator has no public name in torch.
from torch._higher_order_ops.executorch_call_delegate import executorch_call_delegate

# Rules of fake tensors for operators, which conversions add to.
from torch._subclasses import fake_impls

# Tells tensors without memory apart; what a mode has made of real tensors belongs to it.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.export import ExportedProgram, ExportGraphSignature, _trace, exported_program
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.fx import _lazy_graph_module, _symbolic_trace, traceback

# Generates Python code only when a graph module is called; most partitions never are.
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental import proxy_tensor

# The names that torch.fx's partitioner takes in its arguments.
from torch.fx.node import _get_qualified_name

# Whose answer for each node, and whose table of all downstream nodes, have private names.
from torch.fx.passes.infra import partitioner as fx_partitioner
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.infra.pass_manager import PassManager as FxPassManager
from torch.fx.passes.operator_support import OperatorSupportBase

# An ExportedProgram describes its inputs and outputs by pytree specs.
from torch.utils import _pytree as pytree

from exir_lowering._upstream.locks import Shared, conversion

__all__ = [
    "CALL_DELEGATE",
    "DECOMPOSITIONS",
    "FAKE_TENSOR_READER",
    "SCHEMA_MAJOR",
    "WAITING",
    "ConversionState",
    "DelegatedProgram",
    "EdgeProgramManager",
    "EmittedCall",
    "FakeCopies",
    "FakeTensor",
    "LoweredBackendModule",
    "SpecViolationError",
    "add_last_named_data",
    "add_named_data",
    "adding_to_data_files",
    "allowed_operators",
    "argument_names",
    "assemble_program",
    "checks_validity",
    "context_reader",
    "cord_piece",
    "data_file_contents",
    "delegate_info",
    "dtype_of",
    "edge_record",
    "emitting",
    "executorch_runtime",
    "fake_mode_of",
    "fix_signature",
    "flat_call_signature",
    "forget_delegates",
    "from_schema",
    "function_modes",
    "fused",
    "gen_edge_manager",
    "guards_code_of",
    "has_symbols",
    "import_quantized_kernels",
    "is_union",
    "is_view",
    "known_operators",
    "lacks_out_variant",
    "lazy_graph_module",
    "listening",
    "manager_contents",
    "memory_of",
    "mutates_arguments",
    "named_data",
    "named_data_entries",
    "named_data_pieces",
    "namedtuple_context",
    "namedtuple_fields",
    "note_mistyped",
    "open_program",
    "operator_name",
    "operator_packet",
    "operator_schema",
    "out_variant",
    "place_named_data",
    "preserved_ops_left_over",
    "proposing_with",
    "pte_contents",
    "pytree",
    "qualified_operator",
    "read_program",
    "read_tables",
    "refused",
    "registered_operators",
    "registered_type",
    "registered_types",
    "schema_names",
    "serialized",
    "set_cord_piece",
    "shape_env_of",
    "size_hint",
    "transform",
    "with_allowed",
    "with_original",
    "without_validity_checks",
    "write_buffer",
    "write_tables",
    "written_arguments",
]

CALL_DELEGATE = executorch_call_delegate
# How the context of a named tuple is read, by which such types are told from others.
namedtuple_context = pytree._namedtuple_deserialize
gen_edge_manager = _gen_edge_manager_for_partitioners


def lazy_graph_module(root: Mapping[str, Any], graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """Return a graph module that compiles its Python code at its first call, if there is one.

    Args:
        root: The attributes that the graph's get_attr nodes name.
        graph: The graph; it is not copied.
    """
    return _LazyGraphModule(dict(root), graph)


def transform(program: ExportedProgram, passes: Any) -> Any:
    """Run passes, or a manager of passes, over an Edge program, which they may change, as ExecuTorch does.

    `EdgeProgramManager.transform` does it for all methods, of which it copies those without passes with their weights.
    """
    if isinstance(passes, FxPassManager):
        result = _transform_with_pass_manager(program, passes)
    else:
        result = _transform(program, *passes)
    # Passes add constants as attributes; programs have them as inputs.
    return lift_constant_tensor_pass(result) if isinstance(result, ExportedProgram) else result


def manager_contents(manager: EdgeProgramManager) -> tuple[dict[str, ExportedProgram], dict[str, Any]]:
    """Return the programs of a manager by method, in their order, and the values of its constant methods."""
    return dict(manager._edge_programs), dict(manager._config_methods or {})


def fake_mode_of(graph_module: torch.fx.GraphModule) -> FakeTensorMode | None:
    """Return the fake mode of a graph's placeholders, None when they have no fake tensor."""
    values = [node.meta.get("val") for node in graph_module.graph.nodes if node.op == "placeholder"]
    mode: FakeTensorMode | None = detect_fake_mode(values)
    return mode


def assemble_program(
    *,
    graph_module: torch.fx.GraphModule,
    signature: ExportGraphSignature,
    state_dict: dict[str, Any],
    constants: dict[str, Any],
    range_constraints: dict[Any, Any],
    module_call_graph: list[ModuleCallEntry],
    example_inputs: tuple[tuple[Any, ...], dict[str, Any]] | None,
    verifiers: Sequence[Any],
    guards_code: Sequence[str],
    kind: type[ExportedProgram] = ExportedProgram,
) -> ExportedProgram:
    """Make an ExportedProgram of parts that are valid already.

    The constructor interprets every node again, generates the module's code and looks for duplicate getitems: as
    much work as the rest of lowering, for nodes that were verified when the input was built. What this package
    changes (signatures, the calls) is checked by `checks.py` instead.
    """
    program = object.__new__(kind)
    program._graph_module = graph_module
    program._graph_signature = signature
    program._state_dict = state_dict
    program._range_constraints = range_constraints
    program._module_call_graph = module_call_graph
    program._example_inputs = example_inputs
    program._constants = constants
    program._verifiers = list(verifiers)
    program._guards_code = list(guards_code)
    return program


class _FixedSignature(ExportGraphSignature):
    """A signature that nobody changes, which makes each of its tables once; its copies are ordinary ones."""

    def __reduce__(self) -> Any:
        # torch's tables are read-only views, which cannot be copied.
        return ExportGraphSignature, (self.input_specs, self.output_specs)


for _name, _table in vars(ExportGraphSignature).items():
    if isinstance(_table, property) and _table.fget is not None:
        _cached = cached_property(_table.fget)
        _cached.__set_name__(_FixedSignature, _name)
        setattr(_FixedSignature, _name, _cached)


def fix_signature(program: ExportedProgram) -> None:
    """Let a program, whose signature is not to change from now on, make each table of its signature once.

    torch makes one of all parameters whenever a name is looked up; partitioners look up each operand of each operator.
    """
    signature = program.graph_signature
    program._graph_signature = _FixedSignature(signature.input_specs, signature.output_specs)


class DelegatedProgram(ExportedProgram):
    """The program of a partition, which eager PyTorch runs when it meets the delegate call.

    In the body of map, scan and while_loop, PyTorch runs it on fake tensors first, and there the weights that the
    partition owns have to be fake too.
    """

    def module(self, check_guards: bool = True) -> torch.fx.GraphModule:
        """Return the program as a module, with fake weights inside of a fake tensor mode."""
        module = super().module(check_guards=check_guards)
        mode = detect_fake_mode(None)
        if mode is not None:
            for part in module.modules():
                tables: list[dict[str, Any]] = [part._parameters, part._buffers, part.__dict__]
                for table in tables:
                    for name, value in list(table.items()):
                        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                            table[name] = mode.from_tensor(value, static_shapes=True)
        return module


def guards_code_of(program: ExportedProgram) -> list[str]:
    """Return the input guards that export recorded."""
    return list(program._guards_code)


def flat_call_signature(signature: ExportGraphSignature) -> ModuleCallEntry:
    """Describe a call that takes and returns flat lists of values."""
    in_spec = pytree.tree_flatten((tuple(signature.user_inputs), {}))[1]
    out_spec = pytree.tree_flatten(list(signature.user_outputs))[1]
    return ModuleCallEntry("", ModuleCallSignature(inputs=[], outputs=[], in_spec=in_spec, out_spec=out_spec))


def _operator(target: Any) -> Any:
    """Return the ATen operator that an Edge operator wraps; torch's own operators keep something else under `_op`."""
    return target if isinstance(target, torch._ops.OpOverload) else getattr(target, "_op", target)


def operator_name(target: Any) -> str:
    """Return an operator's name as people write it, such as `aten.add.Tensor`; Edge operators wrap the ATen one."""
    op = _operator(target)
    if isinstance(op, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return str(op)
    return str(getattr(op, "__name__", op))


def operator_packet(target: Any) -> Any:
    """Return an operator without its overload, such as `torch.ops.aten.add`; Edge operators wrap the ATen one."""
    op = _operator(target)
    return getattr(op, "overloadpacket", op)


def argument_names(target: Any) -> tuple[str, ...]:
    """Return the names of an operator's arguments by position; none when it has no schema."""
    schema = getattr(_operator(target), "_schema", None)
    return tuple(argument.name for argument in schema.arguments) if schema is not None else ()


def mutates_arguments(target: Any) -> bool:
    """Tell whether an operator writes into its arguments; no when it has no schema."""
    schema = getattr(_operator(target), "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def known_operators() -> frozenset[str]:
    """Return the names of all operators that are registered, such as `aten.add.Tensor`."""
    names = (name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names())
    return frozenset(name if name.count(".") > 1 else f"{name}.default" for name in names)


def size_hint(size: Any) -> int:
    """Return a size, that of the example inputs when it is symbolic, 1 when it depends on data."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 1 if hint is None else int(hint)


def _replacing(replacements: Callable[[], Sequence[tuple[Any, str, Any]]]) -> Shared:
    """Replace attributes of upstream classes and modules as long as somebody needs it."""

    def replace() -> Callable[[], None]:
        originals = [(owner, name, getattr(owner, name), new) for owner, name, new in replacements()]
        for owner, name, _, new in originals:
            setattr(owner, name, new)

        def restore() -> None:
            for owner, name, original, _ in originals:
                setattr(owner, name, original)

        return restore

    return Shared(replace)


_SWITCHES: Sequence[tuple[Any, str]] = (
    (traceback, "current_meta"),
    (traceback, "current_replay_node"),
    (traceback, "should_preserve_node_meta"),
    (traceback, "_should_preserve_node_meta"),
    (_symbolic_trace, "CURRENT_PATCHER"),
    (_symbolic_trace, "_is_fx_tracing_flag"),
    (proxy_tensor, "_CURRENT_MAKE_FX_TRACER"),
    (_lazy_graph_module, "_use_lazy_graph_module_flag"),
    (_lazy_graph_module, "_force_skip_lazy_graph_module_flag"),
    (_trace, "_EXPORT_FLAGS"),
    (_trace, "_EXPORT_MODULE_HIERARCHY"),
    (export_utils, "_DISABLE_ATEN_TO_ASSERTION_PASS"),
    (torch_compiler, "_is_compiling_flag"),
    (torch_compiler, "_is_exporting_flag"),
    (torch_compiler, "_is_non_strict_tracing_flag"),
    (et_tracer, "TRACER"),
    (torch.nn.Module, "__call__"),
    (torch.nn.Module, "__getattr__"),
)
"""The global variables that tracing switches while it runs, and the methods that it patches."""


class ConversionState:
    """What conversions change in the process while they run, as it is at one moment."""

    def __init__(self) -> None:
        self._switches = [(owner, name, getattr(owner, name)) for owner, name in _SWITCHES if hasattr(owner, name)]
        self._meta = dict(traceback.current_meta)

    def restore(self) -> None:
        """Put everything back: tracing does so itself, unless it was interrupted while it was about to, or is gone."""
        before = {name: value for _, name, value in self._switches}["CURRENT_PATCHER"]
        patcher = _symbolic_trace.CURRENT_PATCHER
        if patcher is not None and patcher is not before:
            for patch in reversed(patcher.patches_made):
                patch.revert()
        for owner, name, value in self._switches:
            if getattr(owner, name) is not value:
                setattr(owner, name, value)
        if traceback.current_meta != self._meta:
            traceback.current_meta.clear()
            traceback.current_meta.update(self._meta)
        for kernels in _decomposing:
            kernels.restore()


class _Kernels:
    """The Python kernels that operators have before a conversion decides which of them it decomposes."""

    def __init__(self, operators: Iterable[Any]) -> None:
        self._tables = [(operator, dict(operator.py_kernels)) for operator in operators]
        self._rules = dict(fake_impls.op_implementations_dict)

    def restore(self) -> None:
        for operator, table in self._tables:
            if operator.py_kernels != table:
                operator.py_kernels.clear()
                operator.py_kernels.update(table)
                operator._dispatch_cache.clear()
        for operator, _ in self._tables:
            rule = self._rules.get(operator)
            if rule is not None:
                fake_impls.op_implementations_dict[operator] = rule
            else:
                fake_impls.op_implementations_dict.pop(operator, None)


_decomposing: list[_Kernels] = []
"""The conversions that have kernels replaced: one inside of the other, as there is a lock."""


def _decompositions() -> list[tuple[Any, str, Any]]:
    override = exported_program._override_composite_implicit_decomp

    @contextmanager
    def restored(operators: Any) -> Iterator[None]:
        kernels = _Kernels(operators)
        _decomposing.append(kernels)
        try:
            with override(operators):
                yield
        finally:
            # torch restores nothing of what it had replaced when it is interrupted in between.
            kernels.restore()
            _decomposing.remove(kernels)

    return [(exported_program, "_override_composite_implicit_decomp", restored)]


DECOMPOSITIONS = _replacing(_decompositions)
"""A context in which what conversions replace in operators is put back however they end."""


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def shape_env_of(value: Any) -> Any:
    """Return the environment that the symbols of a fake tensor or a symbolic number belong to, None if there is none.

    A fake tensor of known sizes has one too: the environment of its mode.
    """
    if isinstance(value, _SYMBOLIC):
        return value.node.shape_env
    return value.fake_mode.shape_env if isinstance(value, FakeTensor) else None


def has_symbols(shape_env: Any, *, unbacked: bool) -> bool:
    """Tell whether a shape environment has symbols; with `unbacked`, whether any depends on data."""
    made = shape_env.unbacked_symint_counter + shape_env.unbacked_symfloat_counter
    return made > 0 or (not unbacked and bool(shape_env.var_to_range))


class FakeCopies:
    """Copies of fake tensors and symbolic numbers, in modes and shape environments of their own.

    What is shared by the values of a program is shared by their copies. torch's deepcopy of a fake tensor keeps both.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}  # with the original, whose id must not be used again meanwhile

    @staticmethod
    def possible(value: Any) -> bool:
        """Tell whether a value can be copied, or needs no copy."""
        return not isinstance(value, torch.Tensor) or (type(value) is FakeTensor and value.layout is torch.strided)

    def copy(self, value: Any) -> Any:
        """Return the copy of a value; the value itself if it is neither a tensor nor symbolic."""
        if isinstance(value, _SYMBOLIC):
            return type(value)(self._of(value.node, self._node)) if value.node.shape_env is not None else value
        return self._of(value, self._tensor) if isinstance(value, FakeTensor) else value

    def _of(self, original: Any, make: Callable[[Any], Any]) -> Any:
        if id(original) not in self._made:
            self._made[id(original)] = (original, make(original))
        return self._made[id(original)][1]

    def _node(self, node: Any) -> Any:
        copied = copy.copy(node)
        copied.shape_env = self._of(node.shape_env, _copy_shape_env)
        return copied

    def _mode(self, mode: FakeTensorMode) -> FakeTensorMode:
        copied: FakeTensorMode = copy.copy(mode)
        copied.enter_stack = []
        converter = mode.fake_tensor_converter
        copied.fake_tensor_converter = FakeTensorConverter(
            copy_data=converter.meta_converter.copy_data, export=converter.export
        )
        if mode.shape_env is not None:
            copied.shape_env = self._of(mode.shape_env, _copy_shape_env)
        return copied

    def _tensor(self, tensor: FakeTensor) -> FakeTensor:
        mode = self._of(tensor.fake_mode, self._mode)
        size, stride = ([self.copy(n) for n in numbers] for numbers in (tensor.size(), tensor.stride()))
        meta = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
        offset = tensor.storage_offset()
        if not isinstance(offset, int) or offset:
            meta = meta.as_strided(size, stride, self.copy(offset))
        copied = FakeTensor(
            mode,
            meta,
            tensor.fake_device,
            constant=tensor.constant,
            real_tensor=tensor.real_tensor,
            pytype=tensor.pytype,
            dispatch_keys=tensor.dispatch_keys,
            requires_grad=tensor.requires_grad,
            _is_param=isinstance(tensor, torch.nn.Parameter),
        )
        if tensor.constant is not None:
            mode.fake_tensor_converter.add_constant_storage_mapping(copied)
        return copied


_VERSIONS = itertools.count(1 << 32, 1 << 32)
"""The first version of each copy of a shape environment; torch counts on from there."""


def _copy_shape_env(shape_env: Any) -> Any:
    """Return a shape environment with the same symbols and the same knowledge of them; nothing is pending in it."""
    copied = copy.copy(shape_env)
    for name, value in vars(shape_env).items():
        if hasattr(value, "copy"):  # the containers: lists, dicts, sets, counters
            table = value.copy()
            for key, entry in table.items() if isinstance(table, dict) else ():
                if isinstance(entry, (list, set)):
                    table[key] = entry.copy()
            setattr(copied, name, table)
    copied.pending_fresh_unbacked_symbols = []
    copied.ignorable_fresh_unbacked_symbols = []
    copied.fake_tensor_cache = {}  # results with symbols of the other environment
    # torch's caches of what an environment knows hold the environment, for ever, until they meet another version.
    copied._version_counter = next(_VERSIONS)
    return copied


Refusal = Callable[[torch.fx.Node, str, str], None]
"""Takes a node, the reason why a partitioner left it, and who said so."""

_listener: ContextVar[Refusal | None] = ContextVar("exir_lowering_listener", default=None)


@contextmanager
def listening(heard: Refusal) -> Iterator[None]:
    """Hear what ExecuTorch's partitioners say of the nodes that they leave, while the context lasts.

    They say it to a logger (WhyNoPartition), to a reporter of their own (WhyNoPartitionReporter), or not at all, when
    torch.fx asks an operator support for them. The methods where they do are replaced on the classes, and put back by
    the last one who listens; each thread hears its own partitioners only.
    """
    token = _listener.set(heard)
    try:
        with _REPORTING:
            yield
    finally:
        _listener.reset(token)


def _say(node: torch.fx.Node, reason: str, by: str) -> None:
    listener = _listener.get()
    if listener is not None:
        listener(node, reason, by)


def refused(support: OperatorSupportBase, node: torch.fx.Node) -> None:
    """Tell who listens that an operator support said no."""
    name = type(support).__name__
    if name != "MatchTag":  # ExecuTorch's mark of what a partitioner chose before
        _say(node, f"{name}.is_node_supported said no", name)


def _reporting() -> list[tuple[Any, str, Any]]:
    why, report = WhyNoPartition.__call__, WhyNoPartitionReporter.report_reject
    supported = CapabilityBasedPartitioner._is_node_supported

    def said(self: WhyNoPartition, node: torch.fx.Node, reason: str) -> None:
        why(self, node, reason)
        _say(node, reason, "")

    def reported(self: WhyNoPartitionReporter, node: torch.fx.Node, reason: str) -> None:
        report(self, node, reason)
        _say(node, reason, "")

    def answered(self: CapabilityBasedPartitioner, node: torch.fx.Node) -> bool:
        answer: bool = supported(self, node)
        if not answer:
            refused(self.operator_support, node)
        return answer

    return [
        (WhyNoPartition, "__call__", said),
        (WhyNoPartitionReporter, "report_reject", reported),
        (CapabilityBasedPartitioner, "_is_node_supported", answered),
    ]


_REPORTING = _replacing(_reporting)


@cache  # the same context for the same function: contexts of several threads end in any order
def proposing_with(propose: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Return a context that replaces how torch.fx's and ExecuTorch's partitioners propose, in all threads.

    Their constructors make a table of everything downstream of every node, quadratic in the graph; it is made when
    somebody asks for it only.
    """
    classes = (CapabilityBasedPartitioner, GroupBasedPartitioner)
    viewers = (fx_partitioner, group_partitioner)
    return _replacing(
        lambda: [
            *((kind, "propose_partitions", propose) for kind in classes),
            *((module, "_DependencyViewer", partial(_LazyTable, module._DependencyViewer)) for module in viewers),
        ]
    )


class _LazyTable:
    """A table of downstream nodes that is made when it is first asked."""

    def __init__(self, table: Callable[[torch.fx.GraphModule], Any], graph_module: torch.fx.GraphModule) -> None:
        self._make, self._graph_module, self._made = table, graph_module, None

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            self._made = self._make(self._graph_module)
        return getattr(self._made, name)


def qualified_operator(node: torch.fx.Node) -> str:
    """Return the name by which torch.fx's partitioner knows a node's operator."""
    return str(_get_qualified_name(node.target))  # type: ignore[arg-type]


def forget_delegates(programs: Iterable[ExportedProgram]) -> None:
    """Drop delegates from torch's cache of results on fake tensors.

    Emission calls delegates on fake tensors. The cache is the process's, or that of a program's symbols; it is never
    cleared, and its keys are the arguments: the delegates, with their payloads and weights.
    """
    modes = [fake_mode_of(program.graph_module) for program in programs]
    own = [mode.shape_env.fake_tensor_cache for mode in modes if mode is not None and mode.shape_env is not None]
    for table in (FakeTensorMode.cache, *own):
        for key in list(table):
            if any(isinstance(part, LoweredBackendModule) for part in key.key):
                table.pop(key, None)


def named_data(data: Mapping[str, bytes], alignment: int) -> Any:
    """Return named data as `PreprocessResult.data_store_output` takes it."""
    store = NamedDataStore()
    for key, content in data.items():
        store.add_named_data(key, content, alignment)
    return store.get_named_data_store_output()


def named_data_entries(module: LoweredBackendModule) -> Iterator[tuple[str, str, int]]:
    """Yield what named data a delegate brings: the key, the data file ("" for the `.pte`), and the bytes."""
    output = module.named_data_store_output
    if output is None:
        return
    for file, entries in {"": output.pte_data, **output.external_data}.items():
        for key, entry in entries.items():
            yield key, file, len(output.buffers[entry.buffer_index])


def function_modes() -> int:
    """Return how many modes there are that torch functions go through: a default device is one."""
    return int(torch._C._len_torch_function_stack())


def version(tensor: torch.Tensor) -> int:
    """Return how often torch has written to a tensor's memory; 0 where it does not count."""
    return 0 if tensor.is_inference() else int(tensor._version)


def versions(tensors: Sequence[Any]) -> list[int]:
    """Return how often torch has written to each of some tensors' memory; what is no tensor is left out.

    It is called twice for each call of a delegate.
    """
    try:
        return [tensor._version for tensor in tensors if type(tensor) is torch.Tensor]
    except RuntimeError:  # tensors of inference mode have no count
        return []


def named_data_pieces(manager: ExecutorchProgramManager) -> dict[str, int]:
    """Return for each key of named data the number of its content in the emitted file: equal contents are one."""
    output = manager._named_data
    every = [output.pte_data, *output.external_data.values()] if output is not None else []
    return {key: entry.buffer_index for entries in every for key, entry in entries.items()}


def place_named_data(module: LoweredBackendModule, file_of: Callable[[str, int], str | None]) -> LoweredBackendModule:
    """Return a delegate whose named data lies in other files; the given one and the data itself stay.

    Args:
        module: The delegate.
        file_of: Returns the data file for a key and its bytes, None for the `.pte` file. What the backend has put into
            a data file itself stays there.
    """
    output = module.named_data_store_output
    if output is None:
        return module
    inside: dict[str, Any] = {}
    outside = {file: dict(entries) for file, entries in output.external_data.items()}
    for key, entry in output.pte_data.items():
        file = file_of(key, len(output.buffers[entry.buffer_index]))
        (inside if file is None else outside.setdefault(file, {}))[key] = entry
    return _with_named_data(module, NamedDataStoreOutput(output.buffers, inside, outside))


def add_named_data(module: LoweredBackendModule, *added: Any) -> LoweredBackendModule:
    """Return a delegate that brings more named data; the given one stays."""
    store = NamedDataStore()
    for output in (module.named_data_store_output, *added):
        if output is not None:
            store.merge_named_data_store(output)
    return _with_named_data(module, store.get_named_data_store_output())


def _with_named_data(module: LoweredBackendModule, output: NamedDataStoreOutput) -> LoweredBackendModule:
    # ExecuTorch has no way to change it; its copies copy the weights of the original program too.
    changed = copy.copy(module)
    changed._named_data_store_output = output
    return changed


def add_last_named_data(edge: EdgeProgramManager, key: str, content: bytes) -> None:
    """Add named data whose segment comes after all others in the `.pte` file; there is no public way to add some."""
    edge._named_data_store.add_named_data(key, content)


DataAddition = Callable[[Sequence[Any]], tuple[str, bytes]]
"""Takes the contents of a data file's segments in order; returns the key and content of a datum that comes last."""

_data_addition: ContextVar[DataAddition | None] = ContextVar("exir_lowering_data_addition", default=None)


@contextmanager
def adding_to_data_files(addition: DataAddition) -> Iterator[None]:
    """Add a named datum to each data file that this thread emits while the context lasts.

    ExecuTorch's store of named data takes a key once, and which data files there are is known to its emitter only.
    """
    token = _data_addition.set(addition)
    try:
        with _ADDING:
            yield
    finally:
        _data_addition.reset(token)


def _adding() -> list[tuple[Any, str, Any]]:
    from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer

    serialize = FlatTensorSerializer.serialize

    def serialized(self: Any, data: DataPayload) -> Any:
        addition = _data_addition.get()
        if addition is not None:
            used = dict.fromkeys(entry.buffer_index for entry in data.named_data.values())
            key, content = addition([data.buffers[index] for index in used])
            entry = DataEntry(buffer_index=len(data.buffers), alignment=1, tensor_layout=None)
            data = DataPayload([*data.buffers, content], {**data.named_data, key: entry})
        return serialize(self, data)

    return [(FlatTensorSerializer, "serialize", serialized)]


_ADDING = _replacing(_adding)


def write_buffer(buffer: Any, file: Any) -> None:
    """Write a segment's content to a file; ExecuTorch has bytes, and buffers that are on the disk."""
    if isinstance(buffer, bytes):
        file.write(buffer)
    else:
        buffer.write_to_file(file)


def delegate_info(result: PreprocessResult) -> Any:
    """Return what a backend wants to be kept in its lowered module's metadata."""
    return result._delegate_info_meta


def checks_validity(config: EdgeCompileConfig) -> bool:
    """Tell whether a configuration asks for the verification of Edge programs."""
    return bool(config._check_ir_validity)


def allowed_operators(config: EdgeCompileConfig) -> list[Any]:
    """Return the operators that a configuration takes though they are not in Core ATen."""
    return list(config._core_aten_ops_exception_list)


def with_allowed(config: EdgeCompileConfig, targets: Iterable[Any], *, checked: bool = True) -> EdgeCompileConfig:
    """Return a configuration of its own that takes more operators, or checks nothing.

    Args:
        config: The configuration; it stays as it is.
        targets: The operators to add.
        checked: Whether Edge programs are checked.
    """
    allowed = dict.fromkeys([*allowed_operators(config), *map(_operator, targets)])
    return replace(config, _core_aten_ops_exception_list=list(allowed), _check_ir_validity=checked)


def note_mistyped(graph_module: torch.fx.GraphModule, note: Callable[[torch.fx.Node, Mapping[str, Any]], None]) -> None:
    """Find the nodes whose dtypes ExecuTorch does not define their operators for.

    Args:
        graph_module: The graph, with Edge operators.
        note: Gets each such node, with its dtypes by argument.

    Raises:
        Exception: Whatever an operator raises on fake tensors; it says nothing of the nodes before.
    """
    validator = EdgeOpArgValidator(graph_module)
    validator.violating_ops = _Violations(note)
    inputs = [node.meta.get("val") for node in graph_module.graph.nodes if node.op == "placeholder"]
    with enable_python_dispatcher(), fake_mode_of(graph_module) or nullcontext():
        validator.run(*inputs)


class _Violations(dict[Any, Any]):
    """The validator's table of violations, which keeps one for each operator; this one tells all."""

    def __init__(self, note: Callable[[torch.fx.Node, Mapping[str, Any]], None]) -> None:
        super().__init__()
        self._note = note

    def __setitem__(self, target: Any, violation: Any) -> None:
        types, node = violation
        self._note(node, types)


def out_variant(target: Any) -> str | None:
    """Return the name of the operator that computes the same into given memory, None when there is none."""
    with suppress(RuntimeError, AssertionError):  # how both say that there is none
        if isinstance(target, (EdgeOpOverload, BackendOpOverload)):
            return str(target.to_out_variant().name())
        return str(to_out_variant(target)[0].name())
    return None


def lacks_out_variant(node: torch.fx.Node) -> bool:
    """Tell whether ExecuTorch's emission needs an out variant of a node's operator that does not exist."""
    target = node.target
    if not isinstance(target, (torch._ops.OpOverload, EdgeOpOverload, BackendOpOverload)):
        return False
    if target in to_out_var_skiplist or is_out_variant(target._schema.name, target._schema.overload_name):
        return False
    schema = _get_overload_schema(target)
    inplace = schema is not None and schema.kind().name == "inplace"
    return not inplace and out_variant(target) is None


def fused(program: ExportedProgram, operators: set[str]) -> set[str]:
    """Return which operators ExecuTorch's fusion of quantized patterns removes from a program, which it changes.

    Raises:
        Exception: Whatever it raises for a program that it cannot take.
    """
    left = quant_fusion_and_const_prop_pass(program).graph_module
    graphs = [module.graph for module in left.modules() if isinstance(module, torch.fx.GraphModule)]
    return operators - {operator_name(node.target) for graph in graphs for node in graph.nodes}


def written_arguments(target: Any) -> tuple[str, ...]:
    """Return the names of the arguments that an operator writes to; none when it has no schema."""
    schema = getattr(_operator(target), "_schema", None)
    arguments = schema.arguments if schema is not None else ()
    return tuple(argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write)


def is_view(target: Any) -> bool:
    """Tell whether an operator returns a view of its first argument."""
    return bool(getattr(_operator(target), "is_view", False))


def memory_of(tensor: Any) -> tuple[int, int] | None:
    """Return where a tensor's elements start, and its storage; None for what has no memory."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor) or not tensor.untyped_storage().nbytes():
        return None
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())


def without_validity_checks() -> EdgeCompileConfig:
    """Return the configuration that ExecuTorch gives to programs with delegates, which its verifier does not take."""
    return EdgeCompileConfig(_check_ir_validity=False)


@dataclass(frozen=True, slots=True)
class EmittedCall:
    """An instruction that calls a kernel or a delegate.

    Attributes:
        instruction: Its number in the method.
        handle: The debug handle that its node had.
        module: The delegate's module, None for a kernel.
        delegate: The delegate's number in the method's execution plan, -1 for a kernel.
    """

    instruction: int
    handle: Any
    module: LoweredBackendModule | None
    delegate: int


@dataclass(slots=True)
class _Emissions:
    """What is emitted: the calls by method, and the method that each state of an emitter belongs to."""

    methods: dict[str, list[EmittedCall]]
    states: list[tuple[Any, list[EmittedCall]]]


_emissions: ContextVar[_Emissions | None] = ContextVar("exir_lowering_emissions", default=None)


@contextmanager
def emitting() -> Iterator[Mapping[str, list[EmittedCall]]]:
    """List the calls that are emitted while the context lasts by method, those in nested graphs included.

    The emitter's own tables have the calls of a method's top graph only.
    """
    emissions = _Emissions({}, [])
    token = _emissions.set(emissions)
    try:
        with _EMITTING:
            yield emissions.methods
    finally:
        _emissions.reset(token)


def _waiting() -> list[tuple[Any, str, Any]]:
    def alone(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def waiting(*args: Any, **kwargs: Any) -> Any:
            with conversion():
                return function(*args, **kwargs)

        return waiting

    manager = EdgeProgramManager
    methods = [(manager, name) for name in ("__init__", "transform", "to_backend", "to_executorch")]
    # What to_edge and to_edge_transform_and_lower call before they have a manager.
    functions = [(et_program, name) for name in ("_generate_edge_program", "_gen_edge_manager_for_partitioners")]
    return [(owner, name, alone(getattr(owner, name))) for owner, name in methods + functions]


WAITING = _replacing(_waiting)
"""A context in which ExecuTorch's own conversions take the lock of conversions."""


def _emitting() -> list[tuple[Any, str, Any]]:
    start, add = et_emitter._TopLevelEmitter.__init__, et_emitter._Emitter._add_debug_handle

    def started(self: Any, name: str, *args: Any, **kwargs: Any) -> None:
        start(self, name, *args, **kwargs)
        emissions = _emissions.get()
        if emissions is not None:
            emissions.states.append((self.emitter_state, emissions.methods.setdefault(name, [])))

    def added(self: Any, emitter_id: int, target: Any, lowered_module: Any = None) -> None:
        emissions, handle = _emissions.get(), self.node.meta.get("debug_handle")
        add(self, emitter_id, target, lowered_module)
        # Methods are emitted one after the other; the emitters of nested graphs have their method's state.
        if emissions is not None and emissions.states and emissions.states[-1][0] is self.emitter_state:
            instruction = self.instruction_start_offset + emitter_id
            delegate = -1 if lowered_module is None else len(self.emitter_state.delegates) - 1
            emissions.states[-1][1].append(EmittedCall(instruction, handle, lowered_module, delegate))

    return [
        (et_emitter._TopLevelEmitter, "__init__", started),
        (et_emitter._Emitter, "_add_debug_handle", added),
    ]


_EMITTING = _replacing(_emitting)


def edge_record(programs: Mapping[str, ExportedProgram], manager: ExecutorchProgramManager) -> Any:
    """Return ExecuTorch's ETRecord of an emitted program.

    Args:
        programs: The Edge programs that were lowered; the Inspector looks debug handles up in them.
        manager: What was emitted.
    """
    from executorch.devtools.etrecord import ETRecord  # it needs pandas, and is asked for rarely

    record = ETRecord()
    record.add_edge_dialect_program(EdgeProgramManager(dict(programs), None, without_validity_checks()))
    record.add_executorch_program(manager)
    return record


def pte_contents(manager: ExecutorchProgramManager) -> Any:
    """Return the pieces of the `.pte` file; the public `buffer` keeps a joined copy in memory."""
    return manager._pte_data


def registered_type(name: str) -> Any:
    """Return the type that pytree knows by the name that it is written down by; None when there is none.

    `treespec_loads` finds types here too, but imports what else the text names.
    """
    kind = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)
    # Types without such a name share a key.
    own = name != pytree.NO_SERIALIZED_TYPE_NAME_FOUND and kind in pytree.SUPPORTED_SERIALIZED_TYPES
    return kind if own else None


def namedtuple_fields(kind: Any) -> tuple[str, ...] | None:
    """Return the fields of a named tuple's class; None for anything else."""
    return tuple(kind._fields) if pytree.is_namedtuple_class(kind) else None


def context_reader(kind: Any) -> Callable[[Any], Any] | None:
    """Return what reads the context of a registered type in a written structure; None when it is plain JSON."""
    reader: Callable[[Any], Any] | None = pytree.SUPPORTED_SERIALIZED_TYPES[kind].from_dumpable_context
    return reader


def registered_types() -> list[Any]:
    """Return the types that are registered with pytree."""
    return list(pytree.SUPPORTED_NODES)


def registered_operators() -> list[str]:
    """Return the names of the dispatcher's operators, such as "aten::add.Tensor"; a look-up by attribute makes some."""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return names


# How a pickle names the function that makes fake tensors again.
FAKE_TENSOR_READER = f"{serde._reconstruct_fake_tensor.__module__}.{serde._reconstruct_fake_tensor.__qualname__}"
SCHEMA_MAJOR = program_schema.SCHEMA_VERSION[0]


def schema_names() -> dict[str, Any]:
    """Return the classes of the schema of exported programs, which their type hints name."""
    return vars(program_schema)


def from_schema(kind: str, tree: Any) -> Any:
    """Return JSON as a class of the schema of exported programs.

    Raises:
        Exception: It is something else; types of numbers and strings are not checked.
    """
    return serde._dict_to_dataclass(getattr(program_schema, kind), tree)  # type: ignore[no-untyped-call]


def is_union(value: Any) -> bool:
    """Tell whether a value of the schema has one of several fields."""
    return isinstance(value, SchemaUnion)


def dtype_of(code: int) -> torch.dtype | None:
    """Return a dtype by its number in the schema."""
    found: torch.dtype | None = serde._SERIALIZE_TO_TORCH_DTYPE.get(code)
    return found


def read_program(
    serialized: Any, state: dict[str, torch.Tensor], constants: dict[str, torch.Tensor], examples: Any
) -> torch.export.ExportedProgram:
    """Make a program of its parts, as `torch.export.load` does after it took them from the file.

    Args:
        serialized: The `ExportedProgram` of the schema.
        state: The parameters and buffers; a dict is taken as it is, bytes would be unpickled.
        constants: The constants, likewise.
        examples: The example inputs as a tuple, or None.
    """
    return serde.ExportedProgramDeserializer().deserialize(serialized, state, constants, examples)


def cord_piece(cord: Any, number: int) -> bytes:
    """Return a piece of a file that ExecuTorch has put together, the tables for 0."""
    return bytes(cord._buffers[number])


def set_cord_piece(cord: Any, number: int, content: bytes) -> None:
    """Put another content in the place of a piece."""
    cord._byte_size += len(content) - len(cord._buffers[number])
    cord._buffers[number] = content


def read_tables(tables: bytes) -> Any:
    """Read the tables of a `.pte` file, without its segments, as an `executorch.exir.schema.Program`."""
    return _flatbuffer_to_program(tables)


def write_tables(program: Any, segments: int, alignment: int) -> bytes:
    """Write the tables of a `.pte` file, padded so that the segments can follow.

    Args:
        program: The tables; they say where each segment is, relative to the first one.
        segments: How many bytes the segments have together.
        alignment: What the position of the first segment is to be a multiple of.
    """
    flat = _program_to_flatbuffer(program)
    header = _rounded(_ExtendedHeader.EXPECTED_LENGTH, flat.max_alignment)
    size = header + len(flat.data)
    start = _rounded(size, alignment)
    extent = _ExtendedHeader(program_size=size, segment_base_offset=start, segment_data_size=segments)
    tables: bytes = _insert_flatbuffer_header(
        flatbuffer_data=flat.data,
        magic_regex=r"ET[0-9a-zA-Z][0-9a-zA-Z]",
        header_data=extent.to_bytes().ljust(header, b"\0"),
    )
    return tables.ljust(start, b"\0")


def _rounded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def with_original(lowered: LoweredBackendModule, program: ExportedProgram) -> LoweredBackendModule:
    """Return a lowered module with another original program, and all else shared; it has no public way to say so."""
    copied: LoweredBackendModule = copy.copy(lowered)
    copied._original_exported_program = program
    return copied


def data_file_contents(manager: ExecutorchProgramManager) -> dict[str, Any]:
    """Return the pieces of each data file by name; ExecuTorch only writes all of them to a folder."""
    return dict(manager._tensor_data or {})


def open_program(source: str | bytes, data: str | None, *, profiled: bool = False) -> Any:
    """Open a `.pte` file in ExecuTorch's runtime.

    executorch.runtime.Program keeps what it opens to itself: it is one program per file, whose methods share their
    planned memory, so that running one method overwrites the state of another.

    Args:
        source: Its path, or its content; the content has to outlive the program.
        data: The path of its data file.
        profiled: Whether its `write_etdump_result_to_file` can tell what was run, and for how long.

    Returns:
        The runtime's program, whose `load_method` gives methods that share one planned memory.

    Raises:
        RuntimeError: The runtime refuses the file.
    """
    # Not at the top: compiling needs no runtime, whose libraries set themselves up when they are imported.
    runtime = executorch_runtime()._legacy_module
    load = runtime._load_program if isinstance(source, str) else runtime._load_program_from_buffer
    return load(
        source,
        enable_etdump=profiled,
        program_verification=runtime.Verification.InternalConsistency,
        data_path=data,
    )


def serialized(program: Any, named: Mapping[str, bytes], alignment: int) -> bytes:
    """Return a program of ExecuTorch's schema as a `.pte` file.

    Args:
        program: The program; it is changed.
        named: The file's named data.
        alignment: Of the named data.
    """
    data = named_data(named, alignment) if named else None
    return bytes(serialize_pte_binary(PTEFile(program, named_data=data), extract_delegate_segments=True))


@cache  # once: the filters of warnings are those of all threads
def executorch_runtime() -> Any:
    """Return the runtime of the wheel, `executorch.runtime.Runtime`, without its note that it is experimental."""
    with conversion(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from executorch.runtime import Runtime

        return Runtime.get()


def import_quantized_kernels() -> None:
    """Import the kernels of `quantized_decomposed`, which emitting and the runtime need, with their schemas.

    Raises:
        ImportError: They are not there; ExecuTorch's package swallows why.
    """
    import executorch.kernels.quantized  # noqa: F401

    try:
        torch._C._get_schema("quantized_decomposed::quantize_per_tensor", "out")
    except RuntimeError:
        raise ImportError("executorch.kernels.quantized has no library of kernels that loads here") from None


def operator_schema(name: str, overload: str) -> tuple[tuple[str, ...], frozenset[int], int] | None:
    """Return what an operator of a file takes; None when that is not known.

    torch has no public way to a schema by name. Those of `quantized_decomposed` come with their kernels. Only
    operators whose kernels are generated from the schema count: others take their arguments as they like.

    Returns:
        The types of its arguments, in TorchScript's words, which of them it writes to, and how many it returns.
    """
    namespace = name.partition("::")[0]
    if namespace not in ("aten", "dim_order_ops", "quantized_decomposed"):
        return None
    if namespace == "quantized_decomposed":
        with suppress(ImportError):  # then the engine says which kernel is missing
            import_quantized_kernels()
    try:
        schema = torch._C._get_schema(name, overload)
    except RuntimeError:
        return None
    arguments = schema.arguments
    written = {n for n, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write}
    return tuple(str(argument.type) for argument in arguments), frozenset(written), len(schema.returns)


def preserved_ops_left_over(name: str, program: ExportedProgram, partitioners: Sequence[Any]) -> list[Any]:
    """Check that each operator a partitioner kept from decomposition was delegated, as ExecuTorch does at the end.

    Returns:
        The operators that the final verification has to allow.

    Raises:
        RuntimeError: ExecuTorch's own, naming the node, the operator and the partitioner.
    """
    preserved: set[Any] = set()
    for partitioner in partitioners:
        ops, supported = partitioner.ops_to_not_decompose(program)
        if not _can_skip_using_EDGE_DO_NOT_DECOMP(partitioner, program):
            ops = _remove_invalid_ops_for_not_decompose(ops)
        preserved.update(ops)
        _sanity_check_graph_for_non_decomp_ops(
            name,
            program,
            set(preserved),
            supported,
            partitioner_name=type(partitioner).__name__,
            generate_error=True,
        )
    return sorted(preserved, key=str)
