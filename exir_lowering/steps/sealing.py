"""What comes after ExecuTorch's emitter: what was recorded is put together, and the file's pieces are completed."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from executorch.exir.tensor import ALIGNMENT
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream import emission
from exir_lowering._upstream.edge import edge_record
from exir_lowering._upstream.emission import EmittedCall
from exir_lowering.errors import InputError, exception_text, explained
from exir_lowering.graphs import debug_handles, sources
from exir_lowering.plans.lowering_plan import LoweringPlan, require_memory
from exir_lowering.plans.planned import Later, PlannedMemory
from exir_lowering.pte import assembling, digests, provenance
from exir_lowering.pte.debug_info import DebugDelegate, DebugNode, MethodDebug
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.steps.file import File
from exir_lowering.steps.provenance import complete, narrowed_in_file

P = TypeVar("P", bound=LoweringPlan)


def with_memory(planned: P, plan: Callable[[], Mapping[str, PlannedMemory]]) -> P:
    """Return a plan with the memory of methods, which is planned when somebody asks for it."""
    memory = Later(plan)
    return replace(planned, methods=tuple(replace(method, _memory=memory) for method in planned.methods))


def bound_memory(file: File, *, device: bool = False) -> None:
    """Report the memory that was planned, and check that it is not more than was allowed."""
    memory = file.planning.describe(device=device) if file.planning is not None else {}
    file.report = replace(with_memory(file.report, lambda: memory), states=tuple(file.states))
    require_memory(memory, file.lowered.require_memory)


def report_narrowed(file: File) -> None:
    """Report the dimensions that passes of the emission have narrowed."""
    file.report = replace(file.report, narrowed=narrowed_in_file(file))


def check_numbers(file: File) -> None:
    """Check that the file numbers its delegates as the originals that it keeps are numbered."""
    plans = {plan.name: plan for plan in file.manager.executorch_program.execution_plan}
    for method, program in file.lowered.programs.items() if file.options.keep_originals else ():
        expected = [getattr(module, name).backend_id for _, module, name in graphs.delegates(program.graph_module)]
        emitted = [delegate.id for delegate in plans[method].delegates]
        if emitted != expected:
            raise InputError(
                f"keep_originals: method {method!r} was emitted with the delegates {emitted}, expected {expected}: a "
                "pass of the config changed the calls, so the kept graphs would belong to other delegates. Remove "
                "keep_originals or the pass."
            )


def make_etrecord(file: File) -> None:
    """Make ExecuTorch's record for its Inspector."""
    if not file.options.etrecord:
        return
    named = {name: debug_handles.copy_with_handles(one) for name, one in file.lowered.edge_programs.items()}
    what = "etrecord: ExecuTorch's ETRecord cannot be made"
    with explained(lambda error: InputError(f"{what}: {exception_text(error)}")):
        file.etrecord = edge_record(named, file.manager)


def share_weights(file: File) -> None:
    """Remove the copies of constants that delegates have as named data from the `.pte` file; see `pte.assembling`."""
    cord, aligned = emission.pte_contents(file.manager), file.config.constant_tensor_alignment or ALIGNMENT
    alignments = emission.named_data_alignments(file.manager)
    pieces = assembling.share(emission.cord_pieces(cord), alignments, file.config.segment_alignment, aligned)
    if pieces is not None:
        emission.set_cord_pieces(cord, pieces)


def write_provenance(file: File) -> None:
    """Write how the file was made into the space that was reserved for it."""
    if not file.options.provenance:
        return
    cord, content = emission.pte_contents(file.manager), complete(file).encode()
    emission.set_cord_pieces(cord, assembling.fill(emission.cord_pieces(cord), provenance.KEY, content))


def record_debug(file: File) -> None:
    """Describe what the debug handles of the instructions stand for."""
    lowered = file.lowered
    file.debug = {
        name: _method(program.graph_module, file.calls.get(name, ()), lowered.unchanged.get(name))
        for name, program in lowered.programs.items()
    }


def _method(owner: GraphModule, calls: Sequence[EmittedCall], unchanged: ExportedProgram | None) -> MethodDebug:
    nodes: dict[int, list[DebugNode]] = {}
    _describe(owner, nodes)
    delegates: dict[int, DebugDelegate] = {}
    kernels: dict[int, tuple[int, ...]] = {}
    for call in calls:
        if call.module is not None:
            module = call.module.original_module.graph_module
            _describe(module, nodes)
            known = _handle_map((call.module.meta or {}).get("debug_handle_map"))
            handles = tuple(dict.fromkeys(handle for handle, _, _ in _operators(module)))
            delegates[call.delegate] = DebugDelegate(call.module.backend_id, call.instruction, handles, known)
        elif isinstance(call.handle, int) and call.handle > 0:
            kernels[call.instruction] = (call.handle,)
    if unchanged is not None:
        unchanged = debug_handles.copy_with_handles(unchanged)
        _describe(unchanged.graph_module, nodes, known=frozenset(nodes))
    found = {handle: tuple(nodes[handle]) for handle in sorted(nodes)}
    return MethodDebug(found, tuple(delegates[index] for index in sorted(delegates)), kernels)


def _describe(graph_module: GraphModule, nodes: dict[int, list[DebugNode]], *, known: Container[int] = ()) -> None:
    """Add the operators of a graph, and of the graphs nested in it, whose handles are not known."""
    for handle, name, node in _operators(graph_module):
        if handle not in known:
            frames = graphs.stack(node)
            modules = tuple(f"{module}: {kind}" for module, kind in graphs.modules(node))
            described = DebugNode(name, graphs.operator_name(node), modules, frames, sources.find_innermost(frames))
            nodes.setdefault(handle, []).append(described)


def _operators(graph_module: GraphModule) -> Iterator[tuple[int, str, Node]]:
    """Yield the operators that have a debug handle, with it and with their names."""
    for path, node in graphs.every_node(graph_module):
        handle = debug_handles.handle(node)
        if handle is not None and graphs.is_operator(node):
            yield handle, graphs.qualified_name(path, node), node


def _handle_map(given: Any) -> dict[int | str, tuple[int, ...]]:
    """Return the valid part of a backend's map: ExecuTorch accepts anything."""

    def is_number(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    found: dict[int | str, tuple[int, ...]] = {}
    for key, value in given.items() if isinstance(given, Mapping) else ():
        if isinstance(key, str) or is_number(key):
            found[key] = tuple(sorted(filter(is_number, debug_handles.as_tuple(value))))
    return {key: found[key] for key in sorted(found, key=lambda key: (isinstance(key, str), key))}


def write_digests(file: File) -> None:
    """Write the digests into the space that was reserved for them; see `pte.digests`."""
    data: dict[str, str] = {}
    for name, cord in emission.data_file_contents(file.manager).items():
        tables, *content = emission.cord_pieces(cord)
        digest = digests.data_digest(tables, digests.ZEROS, bytes(content[-1]))
        emission.set_cord_pieces(cord, [digests.with_data_digest(tables, digests.ZEROS, digest), *content])
        data[data_name(name)] = digest
    cord = emission.pte_contents(file.manager)
    first, *content, last = emission.cord_pieces(cord)
    if bytes(last) != digests.RESERVED:
        raise CorruptError("the reserved segment is not its last one")
    emission.set_cord_pieces(cord, assembling.seal(bytearray(first), content, data, emission.write_buffer))


def data_segments(buffers: Sequence[Any]) -> tuple[str, bytes]:
    """Return the key and content of the digests that come after a data file's segments."""
    made: list[bytes] = []
    for buffer in buffers:
        one = digests.Hash()
        emission.write_buffer(buffer, one)
        made.append(one.digest())
    return digests.data_key(), b"".join([*made, digests.END])


def data_name(name: str) -> str:
    """Return the name of a data file from ExecuTorch's tag for it."""
    return name if name.endswith(".ptd") else f"{name}.ptd"


def data_contents(manager: Any) -> Mapping[str, Any]:
    """Return the pieces of each data file by its name."""
    return {data_name(name): cord for name, cord in emission.data_file_contents(manager).items()}
