"""Read a file into a report: its tables only, so that it takes as long for a file of 1 GB as for a small one."""

from __future__ import annotations

import heapq
import itertools
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from exir_lowering.inspection import memory
from exir_lowering.inspection.report import (
    ByteRange,
    Call,
    DelegateReport,
    FileReport,
    Flow,
    Kind,
    MethodReport,
    Stored,
)
from exir_lowering.pte import assembling, container, digests, files, format as file_format, manifest, provenance
from exir_lowering.pte.code import DELEGATE, FREE, JUMP, KERNEL, MOVE, Code, PlanInstruction, items
from exir_lowering.pte.container import Data
from exir_lowering.pte.debug_info import SUFFIX, DebugInfo, MethodDebug
from exir_lowering.pte.files import MappedFile
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.kernel_signatures import signature
from exir_lowering.pte.payloads import PayloadContent, reader
from exir_lowering.pte.provenance import MethodProvenance, Provenance
from exir_lowering.pte.signatures import MethodSignature
from exir_lowering.pte.value_kinds import Tensor

_WORDS: Mapping[int, str] = {MOVE: "move", JUMP: "jump", FREE: "free"}


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
    state = {_memory_of(code, value): one.name for value, one in zip(spec.state, shown.state, strict=True)}
    calls: list[Call] = []
    flows: dict[tuple[int, int, Hashable], Flow] = {}
    made: dict[Hashable, int] = {}  # the last call that wrote to some memory, or made a value without memory
    seen: set[int] = set()  # the values that were written
    given, begun = {_memory_of(code, value) for value in code.inputs}, dict[int, int]()
    for number, instruction in enumerate(each for chain in code.chains for each in chain):
        read, written = (_with_items(code, values) for values in _ends(code, spec, instruction))
        for value in (*read, *(value for value in written if value in seen)):
            place = _memory_of(code, value)
            if place in made:
                tensor = code.values[value].content
                size = tensor.size if isinstance(tensor, Tensor) and not tensor.unbound else 0
                flows.setdefault((made[place], number, place), Flow(made[place], number, value, size))
            begun.setdefault(value, made.get(place, 0 if place in given else number))
        begun.update((value, number) for value in written if value not in begun)
        made.update((_memory_of(code, value), number) for value in written)
        seen.update(written)
        places = ([_memory_of(code, value) for value in values] for values in (read, written))
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


def _memory_of(code: Code, value: int) -> Hashable:
    storage = code.storage[value]
    return value if storage is None or storage.planned is None else storage.planned


_EXPECTED = "the path or the content of a .pte or .ptd file"
_CONTENT = frozenset({"constant", "state", "payload", "named data"})
_OURS: Mapping[str, Kind] = {assembling.MODULE: "module", provenance.KEY: "provenance", digests.KEY: "digests"}


def inspect(source: str | os.PathLike[str] | bytes, *, data: files.Given = None) -> FileReport:
    """Report what is in a file, without running any of it.

    It reads the file's tables and those of XNNPACK's payloads, never weights. It may be called from any thread.

    Args:
        source: The path of a `.pte` or `.ptd` file, or its content: of this package, or of ExecuTorch.
        data: The `.ptd` data files of a `.pte` file, for a report of them too; they are not needed.

    Returns:
        The report.

    Raises:
        InputError: It is something else, or is damaged.
    """
    file = files.open_file(source, "inspect", _EXPECTED, ".pte")
    given = files.read_data_files(data, "inspect")
    if files.kind_of_content(file.content) is files.PTD:
        return _read_data(file, file.parse(container.read_data, files.PTD))
    name = file.source if isinstance(file.source, str) else file.name
    found = file.parse(partial(_read_program, name, find_debug(file)), files.PTE)
    return replace(found, data=tuple(_read_data(one.file, one.weights) for one in given.files))


def _read_program(name: str, debug: Mapping[str, MethodDebug], content: memoryview) -> FileReport:
    """Make the report of a `.pte` file; raise a CorruptError when it is damaged."""
    methods, data = file_format.read_checked(content)
    return _Reader(content, data, provenance.read(data.named), debug).report(name, methods)


def _read_data(file: MappedFile, named: Mapping[str, container.Weight]) -> FileReport:
    """Make the report of a `.ptd` file."""
    content, stored = file.content, []
    extent = container.read_ptd(content)
    parts = [ByteRange(0, extent.tables, "tables"), ByteRange(0, container.size(content), "header")]
    for key, weight in named.items():
        kind: Kind = "digests" if key.startswith(digests.DATA_KEY) else "named data"
        start, size = _place(content, weight.content), len(weight.content)
        parts.append(ByteRange(start or 0, size, kind, key))
        if kind == "named data":
            stored.append(Stored(kind, key, str(weight.layout) if weight.layout else "", size, start))
    ranges = _cover(len(content), parts)
    sealed = any(key.startswith(digests.DATA_KEY) for key in named)
    name = file.source if isinstance(file.source, str) else file.name
    return FileReport(name, ".ptd", len(content), (), _ordered(stored), ranges, sealed=sealed)


def find_debug(file: MappedFile) -> Mapping[str, MethodDebug]:
    """Return what the debug information beside a file says of its methods, by name, if it is about this file."""
    path = Path(file.source).with_suffix(SUFFIX) if isinstance(file.source, str) and Path(file.source).name else None
    if path is None or not path.is_file() or not digests.is_sealed(file.content):
        return {}
    try:
        info = DebugInfo.from_json(path.read_bytes())
    except (OSError, ValueError) as error:
        warnings.warn(f"The debug information {str(path)!r} is not used: {error}.", stacklevel=3)
        return {}
    return info.methods if info.digest == digests.identity(file.content) else {}


def _ordered(stored: Iterable[Stored]) -> tuple[Stored, ...]:
    return tuple(sorted(stored, key=lambda one: (-one.bytes, one.kind, one.title, one.key)))


@dataclass(slots=True)
class _Reader:
    """Makes the report of a `.pte` file."""

    file: memoryview
    data: Data
    known: Provenance | None
    debug: Mapping[str, MethodDebug]
    parts: list[ByteRange] = field(default_factory=list)  # of the file, the outer ones first
    read_payload: Callable[[str, memoryview], PayloadContent | None] = field(default_factory=reader)
    # What is stored, by where it is, and who uses it.
    stored: dict[tuple[object, ...], Stored] = field(default_factory=dict)
    users: dict[tuple[object, ...], dict[str, None]] = field(default_factory=lambda: defaultdict(dict))

    def report(self, name: str, methods: Mapping[str, tuple[Code, MethodSpec]]) -> FileReport:
        """Return the report."""
        self._add_outline()
        for key, content in self.data.named.items():
            self._add(_OURS.get(key, "named data"), key, self._name(key), content, len(content))
        shown = file_format.program_signatures({name: spec for name, (_, spec) in methods.items()})
        made = tuple(self._method(code, spec, shown[name]) for name, (code, spec) in methods.items())
        stored = [replace(one, users=tuple(self.users[where])) for where, one in self.stored.items()]
        return FileReport(
            *(name, ".pte", len(self.file), made, _ordered(one for one in stored if one.kind in _CONTENT)),
            _cover(len(self.file), self.parts),
            self.known,
            digests.KEY in self.data.named,
            families=manifest.read({name: spec for name, (_, spec) in methods.items()}),
        )

    def _add_outline(self) -> None:
        """Add the parts that everything else is in."""
        self.parts.append(ByteRange(0, container.read_pte(self.file).tables, "tables"))
        self.parts.append(ByteRange(0, container.size(self.file), "header"))
        listed = (self.data.constants, *self.data.initial)
        tensors = {_place(self.file, segment) for one in listed for _, segment in one}
        for number, segment in enumerate(self.data.segments):
            start = _place(self.file, segment)
            if start is not None:
                kind: Kind = "padding" if start in tensors else "rest"
                self.parts.append(ByteRange(start, len(segment), kind, f"segment {number}" * (kind == "rest")))

    def _add(self, kind: Kind, key: str, name: str, content: memoryview | None, size: int, *users: str) -> None:
        """Add content of the file, or of a data file if it is None."""
        start = _place(self.file, content) if content is not None and size else None
        where: tuple[object, ...] = (key,) if start is None else (start, size)
        before = self.stored.get(where)
        if before is not None:  # one weight under several names: the host's name says more than a delegate's key
            kind = kind if kind == "constant" else before.kind
            key, name = before.key if before.kind == "named data" else key, before.name or name
        self.stored[where] = Stored(kind, key, name, size, start)
        self.users[where].update(dict.fromkeys(users))
        if start is not None:
            self.parts.append(ByteRange(start, size, kind, name or key))

    def _name(self, key: str) -> str:
        """Return the model's name of named data, "" if that is not known."""
        return self.known.weights.get(key, "") if self.known is not None else ""

    def _method(self, code: Code, spec: MethodSpec, signature: MethodSignature) -> MethodReport:
        made = self.known.methods.get(code.name) if self.known is not None else None
        self._add_tensors(code, made or MethodProvenance())
        delegates = tuple(self._delegate(code, number) for number in range(len(code.payloads)))
        stored = enumerate(code.storage)
        names = {index: storage.label or "" for index, storage in stored if storage is not None}
        names.update(made.values if made else {})
        weights = [[self._name(key) for key in one.weights] for one in delegates]
        origin = Modules(self.debug.get(code.name, MethodDebug({}, (), {})), names, weights)
        calls, flows, begun = list_calls(code, spec, signature, origin)
        kernels = Counter(call.name for call in calls if call.kind == "kernel")
        used = memory.measure(code, signature, spec.state, begun)
        return MethodReport(signature, delegates, dict(sorted(kernels.items())), used, calls, flows)

    def _add_tensors(self, code: Code, known: MethodProvenance) -> None:
        """Add the weights of the host, and the first values of state."""
        for index, (value, storage) in enumerate(zip(code.values, code.storage, strict=True)):
            tensor = value.content
            if not isinstance(tensor, Tensor) or storage is None or not tensor.stored:
                continue
            name = known.values.get(index) or storage.label or ""
            kind: Kind = "state" if tensor.planned else "constant"
            content, size = storage.content, tensor.size
            if content is not None and not tensor.unbound:
                start = _place(self.file, content)
                self._add(kind, f"{kind} at byte {start}", name, content[:size], size, code.name)
            elif storage.name is not None:
                self._add(kind, storage.name, name, None, size, code.name)

    def _delegate(self, code: Code, number: int) -> DelegateReport:
        payload, user = code.payloads[number], f"{code.name}/{number}"
        self._add("payload", f"payload {user}", "", payload.content, len(payload.content), user)
        known = self.read_payload(payload.backend, payload.content)
        operators, weights = ((), {}) if known is None else (known.operators, known.weights)
        for key, size in weights.items():
            content = self.data.named.get(key)
            self._add("named data", key, self._name(key), content, size if content is None else len(content), user)
        return DelegateReport(
            *(number, payload.backend, len(payload.content), payload.specs, operators, tuple(weights))
        )


def _place(file: memoryview, part: memoryview) -> int | None:
    """Return where in a file a part of it starts; None for a part without bytes."""
    if not len(part):
        return None
    return _address(part) - _address(file)


def _address(content: memoryview) -> int:
    return int(np.frombuffer(content, np.uint8).__array_interface__["data"][0])


def _cover(size: int, parts: Iterable[ByteRange]) -> tuple[ByteRange, ...]:
    """Return ranges that cover a file in order: a byte in several parts is of the last, one in none padding or rest."""
    given = [part for part in parts if part.size]
    end = max((part.start + part.size for part in given), default=0)
    outside = [ByteRange(0, end, "padding"), ByteRange(end, size - end, "rest")]
    found: list[ByteRange] = []
    for start, stop, part in _pieces([one for one in outside if one.size] + given):
        last = found[-1] if found else None
        if last is not None and (last.kind, last.what) == (part.kind, part.what):
            found[-1] = ByteRange(last.start, stop - last.start, last.kind, last.what)
        else:
            found.append(ByteRange(start, stop - start, part.kind, part.what))
    return tuple(found)


def _pieces(parts: list[ByteRange]) -> Iterator[tuple[int, int, ByteRange]]:
    """Yield, in order, from where to where which of the parts is on top: the last of those that are there."""
    starts = sorted(range(len(parts)), key=lambda number: parts[number].start)
    edges = sorted({edge for part in parts for edge in (part.start, part.start + part.size)})
    on_top: list[int] = []
    begun = 0
    for start, stop in itertools.pairwise(edges):
        while begun < len(starts) and parts[starts[begun]].start <= start:
            heapq.heappush(on_top, -starts[begun])
            begun += 1
        while parts[-on_top[0]].start + parts[-on_top[0]].size <= start:
            heapq.heappop(on_top)
        yield start, stop, parts[-on_top[0]]
