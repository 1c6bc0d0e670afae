"""Where the new bytes go: the content of a file's places, the keys by which delegates find it, and the digests.

Nothing moves: a file has the same layout as long as the same tensors are equal, which are stored once.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import xxhash

from exir_lowering.errors import InputError
from exir_lowering.pte import assembling, container, digests, header, provenance, slots
from exir_lowering.pte.flatbuffer import CorruptError, Table, root
from exir_lowering.pte.recipes import Place, raw, replay

_THREADS = 4
_DIGEST = re.compile(rb"[0-9a-f]{64}")


@dataclass(slots=True)
class _File:
    """A file with new content."""

    old: memoryview
    new: bytearray
    base: int  # where its segments start
    ranges: list[tuple[int, int]]  # of its segments, from there
    named: list[Table]
    places: list[tuple[int, Place]] = field(default_factory=list)  # with where they start in the file

    @classmethod
    def open(cls, content: memoryview, program: bool) -> _File:
        """Open a program, or a data file."""
        extent = header.read_pte(content) if program else header.read_ptd(content)
        of = slots.Program if program else slots.FlatTensor
        tables = root(content[: extent.tables])
        ranges = list(container.segment_ranges(tables.tables(of.SEGMENTS)))
        return cls(content, bytearray(len(content)), extent.base, ranges, list(tables.tables(of.NAMED_DATA)))

    def segment(self, number: int) -> memoryview:
        """Return the new content of a segment."""
        start, size = self.ranges[number]
        return memoryview(self.new)[self.base + start : self.base + start + size]

    def segment_of(self, number: int) -> int:
        """Return which segment a named datum is in."""
        return self.named[number].number(slots.NamedData.SEGMENT_INDEX, "I")

    def add(self, place: Place, offsets: Mapping[str, tuple[int, Sequence[int]]]) -> None:
        """Add a place; `offsets` are those of constants and of initial state, with their segment."""
        if place.kind in offsets:
            segment, starts = offsets[place.kind]
            at = starts[place.number]
        else:
            segment, at = self.segment_of(place.number), 0
        start, size = self.ranges[segment]
        if at + place.size > size:
            raise CorruptError("its recipes are for content that it does not have")
        self.places.append((self.base + start + at, place))

    def replace_digests(self, area: memoryview, replaced: Mapping[bytes, bytes]) -> None:
        """Replace digests in keys."""
        area[:] = _DIGEST.sub(lambda found: replaced.get(found[0], found[0]), bytes(area))


def rewrite(
    who: str, program: memoryview, data: Mapping[str, memoryview], places: Sequence[Place], values: Mapping[str, torch.Tensor]
) -> tuple[bytearray, dict[str, bytearray]]:
    """Return a program and its data files with other values of some weights.

    Raise an InputError where that is not possible without lowering again, and a CorruptError for a damaged file.
    """
    tables, _ = container.open_program(program)
    files = {"": _File.open(program, True), **{name: _File.open(content, False) for name, content in data.items()}}
    offsets = _offsets(tables)
    for place in places:
        file = "" if place.kind in ("constant", "initial", "named") else place.kind
        if file not in files:
            raise InputError(f"{who}: the data file {file!r} is missing. Give it by `data`.")
        files[file].add(place, offsets)
    keys: list[tuple[str, memoryview]] = []
    for file in files.values():
        keys += _fill(who, file, values)
    replaced = _digests(keys)
    for file in files.values():
        file.replace_digests(memoryview(file.new)[: file.base], replaced)
    for segment in _payloads(tables, files[""]):
        files[""].replace_digests(files[""].segment(segment), replaced)
    _replace_provenance(files[""], replaced)
    sealed = {name: _seal_data(file) for name, file in files.items() if name}
    return _seal(files[""], sealed), {name: file.new for name, file in files.items() if name}


def _digests(keys: Sequence[tuple[str, memoryview]]) -> dict[bytes, bytes]:
    """Return the SHA-256 of contents, by which delegates find them, by the old ones."""

    def new(part: Sequence[tuple[str, memoryview]]) -> list[tuple[bytes, bytes]]:
        return [(old.encode(), hashlib.sha256(content).hexdigest().encode()) for old, content in part]

    with ThreadPoolExecutor(_THREADS) as pool:  # hashing lets other threads run
        return dict(itertools.chain(*pool.map(new, [keys[number::_THREADS] for number in range(_THREADS)])))


def _offsets(tables: Table) -> dict[str, tuple[int, Sequence[int]]]:
    found: dict[str, tuple[int, Sequence[int]]] = {}
    lists = [("constant", tables.table(slots.Program.CONSTANT_SEGMENT))]
    lists += [("initial", one) for one in tables.tables(slots.Program.MUTABLE_DATA_SEGMENTS)]
    for kind, table in lists:
        index = 0 if table is None else table.number(slots.SubsegmentOffsets.SEGMENT_INDEX, "I")
        found[kind] = index, () if table is None else table.numbers(slots.SubsegmentOffsets.OFFSETS, "Q")
    return found


def _fill(who: str, file: _File, values: Mapping[str, torch.Tensor]) -> list[tuple[str, memoryview]]:
    """Write the new content; return that of named data whose key has its digest, with the old digest."""
    filled: dict[int, tuple[Place, memoryview]] = {}
    keys = []
    for start, place in file.places:
        old, content = file.old[start : start + place.size], _content(who, place, values)
        kept = any(values.keys().isdisjoint(one.names) for one in place.recipes) or not place.recipes
        first = filled.get(start)
        if content is not None and (kept and place.recipes and content != old or (first and content != first[1])):
            raise _split(who, place.names + (first[0].names if first else []))
        if content is not None and place.prefix is not None:
            keys.append((file.named[place.number].text(slots.NamedData.KEY).removeprefix(place.prefix), content))
        if first is None or content is not None:
            filled[start] = place, old if content is None else content
    _check_merged(who, file, filled)
    end, new = 0, memoryview(file.new)
    for start, (place, made) in sorted(filled.items(), key=lambda item: item[0]):
        if start < end:
            raise CorruptError("its recipes make the same bytes twice")
        new[end:start], new[start : start + place.size] = file.old[end:start], made
        end = start + place.size
    new[end:] = file.old[end:]
    return keys


def _content(who: str, place: Place, values: Mapping[str, torch.Tensor]) -> memoryview | None:
    """Return the new content of a place, None if it stays what it is."""
    content: memoryview | None = None
    for recipe in place.recipes:
        lacking = [name for name in recipe.names if name not in values]
        if lacking and len(lacking) < len(recipe.names):
            raise InputError(
                f"{who}: state_dict lacks {lacking[0]!r}: the file has what was computed from it and "
                f"{next(name for name in recipe.names if name in values)!r} together. Give both."
            )
        if lacking:
            continue
        made = raw(replay(recipe, values))
        if len(made) != place.size:
            raise CorruptError(f"a recipe makes {len(made)} bytes, expected {place.size}")
        if content is not None and made != content:
            raise _split(who, place.names)
        content = made
    return content


def _split(who: str, names: Sequence[str]) -> InputError:
    shown = ", ".join(map(repr, list(dict.fromkeys(names))[:3]))
    return InputError(
        f"{who}: {shown} had the same content when the model was lowered, and are stored once; now they differ. Lower the "
        "model again with these values."
    )


def _check_merged(who: str, file: _File, filled: Mapping[int, tuple[Place, memoryview]]) -> None:
    """Refuse values that a lowering would store once, which differed before."""
    known: dict[tuple[int, bytes], int] = {}
    for start, (place, content) in filled.items():
        if place.kind == "initial" or not place.size:
            continue
        other = known.setdefault((place.size, xxhash.xxh3_128_digest(content)), start)
        if other != start and file.old[start : start + place.size] != file.old[other : other + place.size]:
            names = ", ".join(map(repr, [*place.names[:2], *filled[other][0].names[:2]]))
            raise InputError(
                f"{who}: {names} have the same content now, which a lowering stores once; they differed when the model was "
                "lowered. Lower the model again with these values."
            )


def _payloads(tables: Table, file: _File) -> list[int]:
    """Return the segments with the payloads of delegates."""
    found = []
    for plan in tables.tables(slots.Program.EXECUTION_PLAN):
        for delegate in plan.tables(slots.ExecutionPlan.DELEGATES):
            where = delegate.table(slots.BackendDelegate.PROCESSED)
            if where is not None and where.number(slots.BackendDelegateDataReference.LOCATION, "b") == slots.DataLocation.SEGMENT:
                found.append(where.number(slots.BackendDelegateDataReference.INDEX, "I"))
    if any(number >= len(file.ranges) for number in found):
        raise CorruptError("a payload is in a segment that there is not")
    return list(dict.fromkeys(found))


def _replace_provenance(file: _File, replaced: Mapping[bytes, bytes]) -> None:
    """Replace the digests in the provenance, whose names are sorted."""
    for number, entry in enumerate(file.named):
        if entry.text(slots.NamedData.KEY) == provenance.KEY:
            area = file.segment(file.segment_of(number))
            file.replace_digests(area, replaced)
            known = provenance.read({provenance.KEY: area})
            text = known.encode() if known is not None else b""
            if len(text) != len(area):
                raise CorruptError("its provenance is not as it was written")
            area[:] = text


def _seal_data(file: _File) -> str:
    """Renew the digests of a data file, and return its own."""
    key = next((k for k in (one.text(slots.NamedData.KEY) for one in file.named) if k.startswith(digests.DATA_KEY)), None)
    if key is None:
        raise CorruptError("a data file has no digests")
    last = len(file.ranges) - 1
    area = file.segment(last)
    area[:] = digests.encode_segments(digests.XXH3.of(file.segment(number)) for number in range(last))
    old, tables = key.removeprefix(digests.DATA_KEY), bytes(file.new[: file.base])
    new = digests.data_digest(tables, old, bytes(area))
    file.new[: file.base] = digests.with_data_digest(tables, old, new)
    return new


def _seal(file: _File, data: Mapping[str, str]) -> bytearray:
    end = file.base + file.ranges[-1][0]
    content = [memoryview(file.new)[file.base : end]]
    *_, last = pieces = assembling.seal(bytearray(file.new[: file.base]), content, data, lambda piece, made: made.write(piece))
    content[0].release()
    file.new[: file.base], file.new[end:] = pieces[0], last
    return file.new
