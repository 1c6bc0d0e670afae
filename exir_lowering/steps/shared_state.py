"""State that the methods of a file share: what was one memory when it was exported, or what the caller says.

ExecuTorch's runtime shares memory between methods by number, all or nothing: so all state is in memory 2 then.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from executorch.exir import ExecutorchBackendConfig
from executorch.exir.passes import MemoryPlanningPass
from networkx.utils import UnionFind
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind, OutputSpec, TensorArgument
from torch.fx import GraphModule

from exir_lowering import graphs
from exir_lowering.errors import InputError
from exir_lowering.graphs.copies import memory_key, memory_span
from exir_lowering.model import EdgeMethod, ExtractedMethod, State, TaggedMethod
from exir_lowering.steps.file import File

ShareState: TypeAlias = bool | Literal["auto"] | Sequence[str]
"""What is shared: "auto" what was one memory, True what has one name, names what they name, False nothing."""

_MEMORY = 2
_DATA_FILE = "constant_tag"  # the key of node.meta under which ExecuTorch finds the data file of a constant
_READ_BEHIND = 64  # XNNPACK reads that far behind a tensor

_KEEPS = (
    "keeps it, but the runtime shares only state that it holds itself. Leave state on the host: own_state=False for "
    "the partitioners of this package, no tag_mutated_buffer in one of ExecuTorch. Or emit with share_state=False."
)


class _Member(NamedTuple):
    """A lifted input of a method that may be state."""

    method: str
    name: str
    tensor: torch.Tensor
    read: bool
    written: bool


def list_states(methods: Iterable[EdgeMethod]) -> tuple[State, ...]:
    """List each memory that methods write and keep; it is shared if several methods have it, and one writes it."""
    members: list[_Member] = []
    for method in methods:
        given, program, own = method.converted_from or method.program, method.program, list[_Member]()
        written = graphs.written_state(program)
        tables = (given.state_dict, given.constants, program.state_dict, program.constants)
        for node, spec in graphs.lifted_inputs(program).items():
            name = str(spec.target)
            tensor = next((table[name] for table in tables if isinstance(table.get(name), torch.Tensor)), None)
            if tensor is not None and (node.users or name in written):
                own.append(_Member(method.name, name, tensor, bool(node.users), name in written))
        members += sorted(own, key=lambda member: not member.written)
    names = {member.name for member in members if member.written}
    memories = {memory_key(member.tensor) for member in members if member.written}
    groups: dict[Hashable, dict[str, _Member]] = {}
    for member in members:
        key = memory_key(member.tensor)
        if member.name in names or key in memories:
            group = groups.setdefault(key, {})
            if member.method in group:  # under another name
                group = groups.setdefault((key, member.method, member.name), {})
            group[member.method] = member
    overlaps, states = _list_overlaps(members), []
    for group in groups.values():
        tensor = next(iter(group.values())).tensor
        writers = tuple(name for name, member in group.items() if member.written)
        states.append(
            State(
                {name: member.name for name, member in group.items()},
                tuple(name for name, member in group.items() if member.read),
                writers,
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                tensor.numel() * tensor.element_size(),
                len(group) > 1 and bool(writers),
                tuple(overlaps.get(memory_key(tensor), ())),
            )
        )
    return tuple(states)


def _list_overlaps(members: Iterable[_Member]) -> dict[Hashable, dict[tuple[str, str], None]]:
    """Return, for memory that is written, what of other methods lies in it but is not the same elements."""
    found: dict[Hashable, dict[tuple[str, str], None]] = {}
    spans = [(span, member) for member in members if (span := memory_span(member.tensor)) is not None]
    begun: list[tuple[tuple[int, int], _Member]] = []
    for span, member in sorted(spans, key=itemgetter(0)):
        begun = [(other, earlier) for other, earlier in begun if other[1] > span[0]]
        for one, two in [pair for _, other in begun for pair in ((member, other), (other, member))]:
            if one.written and one.method != two.method and memory_key(one.tensor) != memory_key(two.tensor):
                found.setdefault(memory_key(one.tensor), {})[two.method, two.name] = None
        begun.append((span, member))
    return found


def choose(file: File) -> None:
    """Choose the states of a file: those that are to be shared as one, all others by method."""
    states, share, planning = file.report.states, file.options.share_state, file.config.memory_planning_pass
    for state in states if share is not False else ():
        for other, name in state.overlapping:
            method, own = next(iter(state.names.items()))
            raise InputError(
                f"share_state: {name!r} of method {other!r} is a view of {own!r} of method {method!r}, or overlaps it, "
                "and is written: only state of the same elements, shape and strides can be shared. Register the same "
                "tensor in both, and view it in the model; or emit with share_state=False."
            )
    passes = list(planning.values()) if isinstance(planning, Mapping) else [planning]
    if any(getattr(each, "share_mutable_buffers", False) for each in passes):
        if share is False:
            raise InputError(
                "share_state: got False, but the memory planning pass of the config has share_mutable_buffers=True. "
                "Remove one of them."
            )
        share = True if share == "auto" else share
    elif share == "auto" and not all(getattr(each, "alloc_mutable_buffers", True) for each in passes):
        share = False  # who gives the methods memory for their buffers shares it, or not
    if share == "auto":
        file.states = tuple(each for state in states for each in ([state] if state.shared else _split(state)))
        return
    known = dict.fromkeys(name for state in states for name in state.names.values())
    chosen = (known if share else {}) if isinstance(share, bool) else _check_names(states, known, share)
    found: list[State] = []
    for state in states:
        found += _split(state) if chosen.keys().isdisjoint(state.names.values()) else [state]
    for name in chosen:
        same = [state for state in found if name in state.names.values()]
        if len(same) > 1:
            place = found.index(same[0])
            found = [state for state in found if state not in same]
            found.insert(place, _join(name, same))
    file.states = tuple(found)


def _check_names(states: Sequence[State], known: Mapping[str, None], share: Any) -> dict[str, None]:
    several = isinstance(share, (Sequence, set, frozenset)) and not isinstance(share, str)
    if not several or not all(isinstance(name, str) for name in share):
        raise InputError(f'share_state: got {share!r}, expected "auto", True, False or a list of names of state.')
    for name in share:
        if name not in known:
            listed = ", ".join(map(repr, known)) or "no state"
            raise InputError(f"share_state: {name!r} is not state of any method. They have {listed}.")
        if len({method for state in states if name in state.names.values() for method in state.names}) < 2:
            raise InputError(f"share_state: {name!r} is state of one method only, so there is nothing to share.")
    return dict.fromkeys(share)


def _split(state: State) -> Iterator[State]:
    for method, name in state.names.items():
        only = {method: name}
        read, written = (tuple(one for one in users if one == method) for users in (state.read_by, state.written_by))
        yield replace(state, names=only, read_by=read, written_by=written, shared=False)


def _join(name: str, states: Sequence[State]) -> State:
    first, *others = states
    names, read, written = dict(first.names), first.read_by, first.written_by
    for other in others:
        one, two = next(iter(names)), next(iter(other.names))
        if (first.dtype, first.shape) != (other.dtype, other.shape):
            raise InputError(
                f"share_state: {name!r} is {first.dtype} {list(first.shape)} in method {one!r} and {other.dtype} "
                f"{list(other.shape)} in method {two!r}: they cannot be one state. Name the ones to share, or rename "
                "one of them in the model."
            )
        if both := names.keys() & other.names.keys():
            raise InputError(
                f"share_state: method {min(both)!r} has two buffers that other methods share with {name!r}. Name the "
                "ones to share."
            )
        names.update(other.names)
        read, written = read + other.read_by, written + other.written_by
    return replace(first, names=names, read_by=read, written_by=written, shared=bool(written))


def shareable(states: Iterable[State]) -> list[set[tuple[str, str]]]:
    """Return what may be one memory in a file, whatever will be asked of `choose`: methods with their names for it."""
    states = list(states)
    sets, first = UnionFind(range(len(states))), dict[Hashable, int]()
    for number, state in enumerate(states):
        for name in state.names.values():
            sets.union(first.setdefault((name, state.dtype, state.shape), number), number)
    groups = [{item for number in group for item in states[number].names.items()} for group in sets.to_sets()]
    return [members for members in groups if len({method for method, _ in members}) > 1]


def list_namesakes(states: Iterable[State]) -> list[tuple[str, tuple[str, ...]]]:
    """List what several methods write under one name, with one shape, but do not share: names and methods."""
    writers: dict[Any, tuple[str, ...]] = {}
    for state in states:
        for method, name in state.names.items():
            if method in state.written_by and not state.shared:
                key = (name, state.dtype, state.shape)
                writers[key] = (*writers.get(key, ()), method)
    return [(key[0], methods) for key, methods in writers.items() if len(methods) > 1]


def elsewhere(states: Iterable[State], method: str) -> frozenset[str]:
    """Return the names of what a method shares with others: delegates must not have it, as they keep it."""
    return frozenset(state.names[method] for state in states if state.shared and method in state.names)


def placed(
    states: Iterable[State],
    methods: Iterable[tuple[EdgeMethod, Sequence[TaggedMethod]]],
    extracted: Iterable[ExtractedMethod],
) -> tuple[State, ...]:
    """Return states with who keeps those that a partitioner asked for, by tagging them or by `own_state`."""
    asking: dict[tuple[str, str], str] = {}
    for method, tagged in methods:
        for one in tagged:
            written = graphs.written_state(one.program)
            for node, spec in graphs.lifted_inputs(one.program).items():
                tag: Any = node.meta.get(graphs.DELEGATION_TAG)
                if tag in one.destinations and spec.target in written:
                    asking.setdefault((method.name, str(spec.target)), one.destinations[tag].backend_id)
        owning = [type(one).__name__ for one in method.partitioners if getattr(one, "own_state", False) is True]
        for name in graphs.written_state(method.program) if owning else ():
            asking.setdefault((method.name, name), owning[0])
    keeping = {
        (partition.method, name): partition.backend_id
        for method in extracted
        for partition in method.partitions
        for name in graphs.written_state(partition.program)
    }

    def describe(state: State) -> str:
        why = "methods share it" if state.shared else "it is not in one partition alone that returns something else too"
        keys = [key for key in state.names.items() if key in asking and state.written_by]
        kept = (keeping.get(key, f"the runtime, not by {asking[key]}: {why}") for key in keys)
        return " and ".join(dict.fromkeys(kept))

    return tuple(replace(state, kept=describe(state)) for state in states)


def check(file: File) -> None:
    """Check that no delegate writes what its method shares, or reads what another method writes."""
    for method, program in file.lowered.programs.items():
        shared = {state.names[method]: state for state in file.states if state.shared and method in state.names}
        for _, module, attribute in graphs.delegates(program.graph_module) if shared else ():
            lowered: Any = getattr(module, attribute)
            own = graphs.written_state(lowered.original_module)
            for name in (str(spec.target) for spec in graphs.lifted_inputs(lowered.original_module).values()):
                if name not in shared:
                    continue
                other = next(one for one in (*shared[name].written_by, *shared[name].names) if one != method)
                problem = _KEEPS if name in own else (
                    f"reads it: it is a constant there, with the value that it had at export, whatever {other!r} "
                    f"writes. Leave the operators of {method!r} that read it on the host: a RuledPartitioner with "
                    "deny(...) for them, or no partitioner for the method."
                )  # fmt: skip
                raise InputError(
                    f"The buffer {name!r} is state that the methods {method!r} and {other!r} share, but in {method!r} "
                    f"a delegate of {lowered.backend_id!r} {problem}"
                )


def share(file: File) -> None:
    """Make the private copies share state, with its initial values, for which memory is planned apart."""
    shared = {(method, name): state for state in file.states if state.shared for method, name in state.names.items()}
    if not shared:
        return
    config, copies = file.config, file.programs
    places: dict[Hashable, int] = {}
    offsets: dict[str, dict[str, int]] = {}
    initial: dict[int, tuple[str, torch.Tensor]] = {}
    planners = {method: _planner(config.memory_planning_pass, method) for method in copies}
    alignment = max(planner.alignment for planner in planners.values())
    end = 0
    for method, program in copies.items():
        written = graphs.written_state(program)
        for node, spec in graphs.lifted_inputs(program).items():
            name = str(spec.target)
            state = shared.get((method, name))
            tensor = graphs.lifted_value(program, name)
            if (state is None and name not in written) or not isinstance(tensor, torch.Tensor):
                continue
            if state is not None:
                other, expected = initial.setdefault(id(state), (method, tensor))
                if memory_key(tensor) != memory_key(expected) and not torch.equal(*map(_bytes, (tensor, expected))):
                    raise InputError(
                        f"share_state: {name!r} starts with different values in the methods {other!r} and {method!r}, "
                        "so it cannot be one state. Export both from the same state of the model, or do not share it."
                    )
                spec.kind, spec.persistent = InputKind.BUFFER, name in program.state_dict
                node.meta.pop(_DATA_FILE, None)
                if bool(tensor.count_nonzero()):
                    node.meta["et_init_buffer"] = True
                if name not in written and config.do_quant_fusion_and_const_prop:
                    # It writes it as it is, which emits nothing: ExecuTorch would fold a constant.
                    output = program.graph.output_node()
                    output.args = ((node, *output.args[0]),)
                    mutation = OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(node.name), name)
                    program.graph_signature.output_specs.insert(0, mutation)
            key = (method, name) if state is None else id(state)
            if key not in places:
                places[key] = end
                end += -(-tensor.numel() * tensor.element_size() // alignment) * alignment
            offsets.setdefault(method, {})[name] = places[key]
    file.config = replace(config, memory_planning_pass=planners)
    file.place_state = {
        name: partial(_place, found, end + _READ_BEHIND, planners[name].alignment) for name, found in offsets.items()
    }


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _planner(planning: Any, method: str) -> MemoryPlanningPass:
    given = planning
    if isinstance(planning, Mapping):
        given = planning.get(method, ExecutorchBackendConfig().memory_planning_pass)
    if not isinstance(given, MemoryPlanningPass) or not given.alloc_mutable_buffers:
        raise InputError(
            f"share_state: the memory of method {method!r} is planned by {type(given).__name__}, which cannot leave "
            "out state that is shared: expected ExecuTorch's MemoryPlanningPass, with alloc_mutable_buffers=True. "
            "Emit with share_state=False to share nothing."
        )
    planner = copy.copy(given)
    planner.alloc_mutable_buffers = planner.share_mutable_buffers = False
    return planner


def _place(
    offsets: Mapping[str, int], size: int, alignment: int, module: GraphModule, signature: ExportGraphSignature
) -> None:
    """Place the state of a method, which was not planned, in a memory that all methods have in common."""
    sizes, left, buffers = module.meta["non_const_buffer_sizes"], dict(offsets), signature.inputs_to_buffers
    for node in module.graph.find_nodes(op="placeholder"):
        name = buffers.get(node.target)
        if name in left:
            spec = node.meta["spec"]
            if spec.const:  # only read here, and so taken for a weight
                node.meta.pop(_DATA_FILE, None)
            spec.realign(alignment)
            spec.mem_id, spec.mem_offset = _MEMORY, left.pop(name)
    if left or len(sizes) != _MEMORY:
        what = f"a pass of the config has removed {min(left)!r}" if left else "more than one memory is planned"
        raise InputError(f"share_state: state cannot be shared: {what}. Change the config, or share nothing.")
    sizes.append(size)
