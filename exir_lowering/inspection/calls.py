"""The instructions of a method: what each calls, of which modules it is, and what goes from one to another."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from exir_lowering.inspection.report import Call, Flow
from exir_lowering.pte.code import Code
from exir_lowering.pte.dataflow import DELEGATE, FREE, JUMP, KERNEL, MOVE, PlanInstruction
from exir_lowering.pte.debug_info import MethodDebug
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.instructions import items
from exir_lowering.pte.kernel_signatures import signature
from exir_lowering.pte.signatures import MethodSignature
from exir_lowering.pte.value_kinds import Tensor

_WORDS = {MOVE: "move", JUMP: "jump", FREE: "free"}


@dataclass(frozen=True, slots=True)
class Modules:
    """Finds the modules of a method's instructions."""

    debug: MethodDebug
    names: Mapping[int, str]  # of values
    weights: Sequence[Sequence[str]]  # the names of those that each delegate reads
    found: set[int] = field(default_factory=set)  # the delegates whose modules were found

    def find(self, number: int, instruction: PlanInstruction) -> tuple[str, ...]:
        """Return the paths of the modules that an instruction is from: of each delegate once, as it may have many."""
        kind, target, values = instruction
        if kind == DELEGATE:
            if target in self.found:
                return ()
            self.found.add(target)
        handles = self.debug.kernels.get(number, ()) if kind == KERNEL else ()
        if kind == DELEGATE and target < len(self.debug.delegates):
            handles = self.debug.delegates[target].handles
        nodes = (node for handle in handles for node in self.debug.nodes.get(handle, ()))
        paths = [node.modules[-1].partition(": ")[0] for node in nodes if node.modules]
        named = self.weights[target] if kind == DELEGATE else (self.names.get(value, "") for value in values)
        return tuple(dict.fromkeys(filter(None, paths or (name.rpartition(".")[0] for name in named))))


def list_calls(
    code: Code, spec: MethodSpec, shown: MethodSignature, modules: Modules
) -> tuple[tuple[Call, ...], tuple[Flow, ...], dict[int, int]]:
    """Return a method's instructions with their modules, what flows between them, and since when values have memory.

    What a view is of, which no instruction makes, is known by its memory. What a value is given after another one had
    written it, as in a branch, comes from both, one through the other.
    """
    state = {_place(code, value): one.name for value, one in zip(spec.state, shown.state, strict=True)}
    calls: list[Call] = []
    flows: dict[tuple[int, int, Hashable], Flow] = {}
    made: dict[Hashable, int] = {}  # the last call that wrote to some memory, or made a value without memory
    seen: set[int] = set()  # the values that were written
    given, begun = {_place(code, value) for value in code.inputs}, dict[int, int]()
    for number, instruction in enumerate(each for chain in code.chains for each in chain):
        read, written = (_with_items(code, values) for values in _ends(code, spec, instruction))
        for value in (*read, *(value for value in written if value in seen)):
            place = _place(code, value)
            if place in made:
                tensor = code.values[value].content
                size = tensor.size if isinstance(tensor, Tensor) and not tensor.unbound else 0
                flows.setdefault((made[place], number, place), Flow(made[place], number, value, size))
            begun.setdefault(value, made.get(place, 0 if place in given else number))
        begun.update((value, number) for value in written if value not in begun)
        made.update((_place(code, value), number) for value in written)
        seen.update(written)
        places = ([_place(code, value) for value in values] for values in (read, written))
        kept = (tuple(dict.fromkeys(state[place] for place in known if place in state)) for known in places)
        origin, called = modules.find(number, instruction), instruction[1] if instruction[0] == DELEGATE else None
        calls.append(Call(number, *_name(code, instruction), instruction[2], origin, called, *kept))
    return tuple(calls), tuple(flows.values()), begun


def _name(code: Code, instruction: PlanInstruction) -> tuple[str, str]:
    kind, target, _ = instruction
    if kind == KERNEL:
        return "kernel", ".".join(filter(None, code.operators[target]))
    if kind == DELEGATE:
        return "delegate", f"{target} ({code.payloads[target].backend})"
    return _WORDS[kind], _WORDS[kind]


def _ends(code: Code, spec: MethodSpec, instruction: PlanInstruction) -> tuple[Sequence[int], Sequence[int]]:
    """Return the values that an instruction reads, and those that it writes."""
    kind, target, values = instruction
    if kind != KERNEL:
        count = spec.delegations[target].counts[0] if kind == DELEGATE else int(kind == MOVE)
        cut = max(len(values) - count, 0)
        return values[:cut], values[cut:]
    name, overload = code.operators[target]
    known, last = signature(name, overload), {len(values) - 1}
    # An operator that nothing is known of writes to its last value, as a view does.
    at: Collection[int] = {*known.written, *range(len(known.types), len(values))} or last if known else last
    in_place = name.endswith("_") and name != "aten::copy_"
    read = [value for number, value in enumerate(values) if in_place or number not in at]
    return read, [value for number, value in enumerate(values) if number in at]


def _with_items(code: Code, values: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(item for value in values for item in items(code.values, value)))


def _place(code: Code, value: int) -> Hashable:
    storage = code.storage[value]
    return value if storage is None or storage.planned is None else storage.planned
