"""Read a file into a report: its tables only, so that it takes as long for a file of 1 GB as for a small one."""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from exir_lowering.inspection import memory
from exir_lowering.inspection.report import ByteRange, DelegateReport, FileReport, Kind, MethodReport, Stored
from exir_lowering.pte import assembling, container, digests, files, format as file_format, manifest, provenance
from exir_lowering.pte.code import KERNEL, Code
from exir_lowering.pte.container import Data
from exir_lowering.pte.files import MappedFile
from exir_lowering.pte.format import Checked, MethodSpec
from exir_lowering.pte.payloads import PayloadContent
from exir_lowering.pte.provenance import MethodProvenance, Provenance
from exir_lowering.pte.signatures import MethodSignature
from exir_lowering.pte.value_kinds import Tensor

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
    if files.kind_of(file.source) is files.PTD:
        return _read_data(file, file.parse(container.read_data, files.PTD))
    name = file.source if isinstance(file.source, str) else file.name
    found = file.parse(partial(_read_program, name), files.PTE)
    return replace(found, data=tuple(_read_data(one.file, one.weights) for one in given.files))


def _read_program(name: str, content: memoryview) -> FileReport:
    """Make the report of a `.pte` file; raise a CorruptError when it is damaged."""
    methods, data = file_format.read_checked(content)
    return _Reader(content, data, provenance.read(data.named)).report(name, methods)


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


def _ordered(stored: Iterable[Stored]) -> tuple[Stored, ...]:
    return tuple(sorted(stored, key=lambda one: (-one.bytes, one.kind, one.title, one.key)))


@dataclass(slots=True)
class _Reader:
    """Makes the report of a `.pte` file."""

    file: memoryview
    data: Data
    known: Provenance | None
    parts: list[ByteRange] = field(default_factory=list)  # of the file, the outer ones first
    # What is stored, by where it is, and who uses it.
    stored: dict[tuple[object, ...], Stored] = field(default_factory=dict)
    users: dict[tuple[object, ...], dict[str, None]] = field(default_factory=lambda: defaultdict(dict))

    def report(self, name: str, methods: Mapping[str, Checked]) -> FileReport:
        """Return the report."""
        self._add_outline()
        for key, content in self.data.named.items():
            self._add(_OURS.get(key, "named data"), key, self._name(key), content, len(content))
        specs = {name: spec for name, (_, spec, _) in methods.items()}
        shown = file_format.program_signatures(specs)
        made = tuple(self._method(*one, shown[name]) for name, one in methods.items())
        stored = [replace(one, users=tuple(self.users[where])) for where, one in self.stored.items()]
        return FileReport(
            *(name, ".pte", len(self.file), made, _ordered(one for one in stored if one.kind in _CONTENT)),
            _cover(len(self.file), self.parts),
            self.known,
            digests.KEY in self.data.named,
            families=manifest.read(specs),
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

    def _method(
        self, code: Code, spec: MethodSpec, checked: Sequence[PayloadContent | None], signature: MethodSignature
    ) -> MethodReport:
        made = self.known.methods.get(code.name) if self.known is not None else None
        constants = self._add_tensors(code, made or MethodProvenance())
        delegates = tuple(self._delegate(code, number, one) for number, one in enumerate(checked))
        names = (code.operators[target] for kind, target, _ in code.instructions() if kind == KERNEL)
        kernels = Counter(".".join(filter(None, name)) for name in names)
        used, device = memory.measure(code, spec, signature), memory.on_device(code, spec, checked, constants)
        return MethodReport(signature, delegates, dict(sorted(kernels.items())), used, device)

    def _add_tensors(self, code: Code, known: MethodProvenance) -> int:
        """Add the weights of the host, and the first values of state; return how many bytes the former are."""
        sizes = dict[object, int]()  # by where they are
        for index, tensor in enumerate(value.content for value in code.values):
            if not isinstance(tensor, Tensor) or not tensor.stored:
                continue
            name = known.values.get(index) or tensor.label or ""
            kind: Kind = "constant" if tensor.planned is None else "state"
            content, size = tensor.content, tensor.size
            if content is not None and not tensor.unbound:
                start = _place(self.file, content)
                self._add(kind, f"{kind} at byte {start}", name, content[:size], size, code.name)
            elif tensor.external:
                start = None
                self._add(kind, str(tensor.label), name, None, size, code.name)
            else:
                continue
            if tensor.constant:
                sizes[tensor.label if start is None else start] = size
        return sum(sizes.values())

    def _delegate(self, code: Code, number: int, checked: PayloadContent | None) -> DelegateReport:
        payload, user = code.payloads[number], f"{code.name}/{number}"
        self._add("payload", f"payload {user}", "", payload.content, len(payload.content), user)
        operators, weights = ((), {}) if checked is None else (checked.operators, checked.weights)
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
    layers = [one for one in outside if one.size] + given
    edges = np.unique([edge for one in layers for edge in (one.start, one.start + one.size)])
    top = np.zeros(max(len(edges) - 1, 0), dtype=np.int64)
    for number, one in enumerate(layers):
        first, last = np.searchsorted(edges, (one.start, one.start + one.size))
        top[first:last] = number
    found: list[ByteRange] = []
    for (start, stop), number in zip(itertools.pairwise(edges.tolist()), top.tolist(), strict=True):
        part, before = layers[number], found[-1] if found else None
        if before is not None and (before.kind, before.what) == (part.kind, part.what):
            start = found.pop().start
        found.append(ByteRange(start, stop - start, part.kind, part.what))
    return tuple(found)
