"""Where an error arises: the interpreter executes the file instruction by instruction, beside eager PyTorch.

The file's debug information says from which lines each kernel and delegate came. Where these lead to one node of the
program, the node's value and what the instruction wrote are compared: in the chain, and once more with PyTorch's own
values put in the place of what each instruction wrote, so that an error is that of the instruction alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream import locks
from exir_lowering.pte.debug_info import MethodDebug
from exir_lowering.pte.instructions import KERNEL, items
from exir_lowering.runtime.interpreter.engine import open_interpreter
from exir_lowering.runtime.interpreter.kernels import MethodState, Slot
from exir_lowering.runtime.program import LoadedProgram
from exir_lowering.runtime.source import ProgramFile
from exir_lowering.verification.cases import Call
from exir_lowering.verification.eager import Eager, find_sharing
from exir_lowering.verification.measure import Difference, Tolerance, measure
from exir_lowering.verification.results import LocalError
from exir_lowering.verification.subjects import Subject


def find(
    file: ProgramFile,
    delegates: Mapping[str, Any],
    subjects: Mapping[str, Subject],
    calls: Sequence[Call],
    debug: MethodDebug,
    tolerance: Tolerance,
) -> list[LocalError]:
    """Return the errors of the instructions that can be compared in the last of some calls, in the file's order.

    An error of ours is raised where the interpreter cannot execute the file.
    """
    method = calls[-1].method
    spec = subjects[method].spec
    places = {place.instruction: place for place in _places(subjects[method], debug)}
    wanted = {node for place in places.values() for node in place.nodes}
    found: list[dict[int, tuple[_Place, Difference]]] = []
    for alone in (True, False):
        watch = _Watch(places, wanted, tolerance, alone)
        engine = replace(open_interpreter(file, delegates, "error"), watch=watch)
        if len(engine.codes[method].chains) != 1:  # instructions are numbered in each chain
            return []
        with locks.engine():
            engine.set_up_delegated()
        programs = {name: subject.program for name, subject in subjects.items()}
        program, eager = LoadedProgram(file, engine), Eager(programs, find_sharing(file))
        for call in calls:
            last = call is calls[-1]
            watch.values = {}
            eager.run(call.method, call.inputs, watch.keep if last else None)
            watch.active = last
            program.run(call.method, *call.inputs)
        found.append(watch.found)
    return [
        LocalError(
            spec.kernels.get(at, f"delegate {place.number} ({place.backend})"),
            at,
            local.score,
            found[1][at][1].score,
            local.largest,
            tuple(node.name for node in place.nodes),
            next(filter(None, map(graphs.source_line, place.nodes)), ""),
        )
        for at, (place, local) in sorted(found[0].items())
        if at in found[1]
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """An instruction, and the nodes that may be what it writes."""

    instruction: int
    nodes: tuple[Node, ...]
    outputs: int = 1  # how many values a delegate writes
    number: int = -1  # that of a delegate
    backend: str = ""


@dataclass(slots=True, eq=False)
class _Watch:
    """Compares what instructions write with the values of nodes."""

    places: Mapping[int, _Place]  # by instruction
    wanted: Set[Node]  # theirs
    tolerance: Tolerance
    alone: bool  # whether each instruction gets PyTorch's own values
    active: bool = False
    values: dict[Node, Any] = field(default_factory=dict)
    found: dict[int, tuple[_Place, Difference]] = field(default_factory=dict)

    def keep(self, node: Node, value: Any) -> None:
        """Keep the value of a node: a copy, as another node may write into it."""
        if node in self.wanted:
            parts = value if isinstance(value, (tuple, list)) else (value,)
            self.values[node] = [part.detach().clone() for part in parts if isinstance(part, torch.Tensor)]

    def __call__(self, state: MethodState, position: int, code: int, arguments: tuple[int, ...]) -> None:
        """Compare what an instruction has written."""
        place = self.places.get(position)
        if not self.active or place is None or not arguments:
            return
        last = arguments[-1:] if code == KERNEL else arguments[len(arguments) - place.outputs :]
        values = (state.values[item] for index in last for item in items(state.plan, index))
        slots = [value for value in values if isinstance(value, Slot)]
        made = [part for node in place.nodes for part in self.values.get(node, ())]
        pairs = list(_pair(slots, made, self.tolerance))
        if not pairs:
            return
        worst = max((found for *_, found in pairs), key=lambda each: (each.score, each.largest))
        self.found[position] = (place, worst)
        for slot, value, _ in pairs if self.alone else ():
            slot.write(value)


def _pair(
    slots: Iterable[Slot], values: Sequence[torch.Tensor], tolerance: Tolerance
) -> Iterator[tuple[Slot, torch.Tensor, Difference]]:
    """Yield what was written with the value that it is nearest to, of those that it may be."""
    for slot in slots:
        like = [part for part in values if (part.shape, part.dtype) == (slot.tensor.shape, slot.tensor.dtype)]
        measured = [(part, measure(part, slot.tensor, tolerance, 0.0, None)) for part in like]
        if measured:
            value, found = min(measured, key=lambda each: (each[1].score, each[1].largest))
            yield slot, value, found


def _places(subject: Subject, debug: MethodDebug) -> Iterator[_Place]:
    """Yield the instructions whose nodes are known."""
    nodes = _match(subject, debug)
    last: dict[int, int] = {}  # what was decomposed from a node is complete with the last kernel
    for at, handles in sorted(debug.kernels.items()):
        for handle in handles:
            last[handle] = at
    inside = {handle for delegate in debug.delegates for handle in delegate.handles}
    for handle, at in sorted(last.items(), key=lambda item: item[1]):
        if handle in nodes and handle not in inside:
            yield _Place(at, (nodes[handle],))
    for number, delegate in enumerate(debug.delegates):
        own = [nodes[handle] for handle in delegate.handles if handle in nodes]
        leaving = tuple(node for node in own if any(user not in own for user in node.users))
        counts = subject.spec.delegations[number].counts if number < len(subject.spec.delegations) else ()
        if leaving and len(counts) == 1:
            yield _Place(delegate.instruction, leaving, counts[0], number, delegate.backend_id)


def _match(subject: Subject, debug: MethodDebug) -> dict[int, Node]:
    """Return the node that each debug handle stands for, where its lines and modules lead to one.

    Several nodes may be of one line: they are told apart by their order, if each has a handle, or by their operators.
    """
    given: dict[Any, list[Node]] = {}
    for node in subject.program.graph.nodes:
        if node.op == "call_function" and not graphs.is_getitem(node) and _has_values(node):
            given.setdefault((graphs.stack(node), tuple(path for path, _ in graphs.modules(node))), []).append(node)
    handles: dict[Any, list[int]] = {}
    for handle, (described, *_) in sorted(debug.nodes.items()):
        modules = tuple(module.partition(": ")[0] for module in described.modules)
        handles.setdefault((described.frames, modules), []).append(handle)
    found: dict[int, Node] = {}
    for key, numbers in handles.items():
        nodes = given.get(key, [])
        if len(nodes) == len(numbers):
            found.update(zip(numbers, nodes, strict=True))
            continue
        for number in numbers:
            named = [node for node in nodes if graphs.operator_name(node) == debug.nodes[number][0].operator]
            rivals = [each for each in numbers if debug.nodes[each][0].operator == debug.nodes[number][0].operator]
            if len(named) == len(rivals) == len(debug.nodes[number]) == 1:
                found[number] = named[0]
    return found


def _has_values(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) or (isinstance(value, (tuple, list)) and bool(value))
