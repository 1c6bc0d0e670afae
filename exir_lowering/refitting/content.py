"""Where the new bytes go: the content of a file's places, the keys by which delegates find it, and the digests.

Nothing moves: a file has the same layout as long as the same tensors are equal, which are stored once.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

from exir_lowering.errors import InputError
from exir_lowering.pte import assembling, container, digests, header, provenance, slots
from exir_lowering.pte.flatbuffer import CorruptError, Table, root
from exir_lowering.pte.recipes import Place, replay

_THREADS = 4
_DIGEST = re.compile(rb"[0-9a-f]{64}")
_AGAIN = "Lower the model again with these values."


class _File:
    """A file with new content."""

    def __init__(self, old: memoryview, is_program: bool) -> None:
        extent = header.read_pte(old) if is_program else header.read_ptd(old)
        of = slots.Program if is_program else slots.FlatTensor
        self.tables = root(old[: extent.tables])
        self.old, self.new, self.base = old, memoryview(bytearray(len(old))), extent.base
        self._ranges = list(container.segment_ranges(self.tables.tables(of.SEGMENTS)))
        self.named = list(self.tables.tables(of.NAMED_DATA))
        self.filled: dict[int, tuple[Place, memoryview]] = {}  # places by where they start, with their content

    @property
    def last(self) -> int:
        """The number of the last segment, which has the digests."""
        return len(self._ranges) - 1

    def segment(self, number: int) -> tuple[int, int]:
        """Return where a segment starts and ends."""
        start, size = self._ranges[number]
        return self.base + start, self.base + start + size

    def segment_of(self, entry: Table) -> tuple[int, int]:
        """Return where a named datum starts and ends."""
        return self.segment(entry.number(slots.NamedData.SEGMENT_INDEX, "I"))

    def start_of(self, place: Place) -> int:
        """Return where a place starts; a CorruptError if it is not in the file."""
        if place.kind in ("constant", "initial"):
            of = slots.Program
            initial = next(self.tables.tables(of.MUTABLE_DATA_SEGMENTS), None)
            table = initial if place.kind == "initial" else self.tables.table(of.CONSTANT_SEGMENT)
            if table is None:
                raise CorruptError(f"it has no segment for {place.kind} {place.number}")
            start, end = self.segment(table.number(slots.SubsegmentOffsets.SEGMENT_INDEX, "I"))
            start += table.numbers(slots.SubsegmentOffsets.OFFSETS, "Q")[place.number]
        else:
            start, end = self.segment_of(self.named[place.number])
        if start + place.size > end:
            raise CorruptError("its recipes are for content that it does not have")
        return start

    def write(self) -> None:
        """Write the new content, and what stays as it is."""
        end = 0
        for start, (place, content) in sorted(self.filled.items(), key=lambda item: item[0]):
            if start < end:
                raise CorruptError("its recipes make the same bytes twice")
            self.new[end:start], self.new[start : start + place.size] = self.old[end:start], content
            end = start + place.size
        self.new[end:] = self.old[end:]

    def replace(self, area: tuple[int, int], replaced: Mapping[bytes, bytes]) -> None:
        """Replace digests in keys."""
        start, end = area
        made = _DIGEST.sub(lambda found: replaced.get(found[0], found[0]), self.new[start:end])
        self.new[start:end] = made


def rewrite(
    who: str,
    program: memoryview,
    data: Mapping[str, memoryview],
    places: Sequence[Place],
    values: Mapping[str, torch.Tensor],
) -> tuple[memoryview, dict[str, memoryview]]:
    """Return a program and its data files with other values of some weights.

    Raise an InputError where that is not possible without lowering again, and a CorruptError for a damaged file.
    """
    main = _File(program, True)
    files = {name: _File(content, False) for name, content in data.items()}
    keys = []
    for place in places:
        file = main if place.kind in ("constant", "initial", "named") else files.get(place.kind)
        if file is None:
            raise InputError(f"{who}: the data file {place.kind!r} is missing. Give it by `data`.")
        content = _fill(who, file, place, values)
        if content is not None and place.prefix is not None:
            key = file.named[place.number].text(slots.NamedData.KEY)
            keys.append((key.removeprefix(place.prefix), content))
    replaced = _hash(keys)
    for file in (main, *files.values()):
        _check_merged(who, file)
        file.write()
        file.replace((0, file.base), replaced)
    for number in _payloads(main.tables):
        main.replace(main.segment(number), replaced)
    _replace_provenance(main, replaced)
    sealed = {name: _seal_data(file) for name, file in files.items()}
    start, end = main.segment(main.last)
    tables = bytearray(main.new[: main.base])
    first, *_, last = assembling.seal(tables, [main.new[main.base : start]], sealed, lambda one, made: made.write(one))
    main.new[: main.base], main.new[start:end] = first, last
    return main.new, {name: file.new for name, file in files.items()}


def _fill(who: str, file: _File, place: Place, values: Mapping[str, torch.Tensor]) -> memoryview | None:
    """Fill a place; return its content, None if it stays what it is."""
    start, content, kept = file.start_of(place), None, not place.recipes
    old = file.old[start : start + place.size]
    other = file.filled.get(start, (place, None))
    for recipe in place.recipes:
        lacking = [name for name in recipe.names if name not in values]
        if lacking and len(lacking) < len(recipe.names):
            given = next(name for name in recipe.names if name in values)
            raise InputError(f"{who}: {lacking[0]!r} is missing: the file has what is computed from it and {given!r}.")
        made = old if lacking else replay(recipe, values)
        if len(made) != place.size:
            raise CorruptError(f"a recipe makes {len(made)} bytes, expected {place.size}")
        if content is not None and made != content:
            raise _split(who, place.names)
        content, kept = made, kept or bool(lacking)
    if content is not None and other[1] is not None and other[1] != content:
        raise _split(who, [*place.names, *other[0].names])
    if content is not None or other[1] is None:
        file.filled[start] = place, old if content is None else content
    return None if content is old else content


def _split(who: str, names: Sequence[str]) -> InputError:
    shown = ", ".join(map(repr, list(dict.fromkeys(names))[:3]))
    return InputError(
        f"{who}: {shown}: what the file has of them was equal when the model was lowered, and is stored once; now it "
        f"differs. {_AGAIN}"
    )


def _check_merged(who: str, file: _File) -> None:
    """Refuse values that a lowering would store once, which differed before."""
    known: dict[tuple[int, bytes], int] = {}
    for start, (place, content) in file.filled.items():
        if place.kind != "initial":
            other = known.setdefault((place.size, xxhash.xxh3_128_digest(content)), start)
            if other != start and file.old[start : start + place.size] != file.old[other : other + place.size]:
                names = ", ".join(map(repr, [*place.names[:2], *file.filled[other][0].names[:2]]))
                raise InputError(f"{who}: {names} are equal now, which is stored once; they were not. {_AGAIN}")


def _hash(keys: Sequence[tuple[str, memoryview]]) -> dict[bytes, bytes]:
    """Return the SHA-256 of contents, by which delegates find them, by the old ones."""

    def hash_some(part: Sequence[tuple[str, memoryview]]) -> list[tuple[bytes, bytes]]:
        return [(old.encode(), hashlib.sha256(content).hexdigest().encode()) for old, content in part]

    with ThreadPoolExecutor(_THREADS) as pool:  # hashing lets other threads run
        return dict(itertools.chain(*pool.map(hash_some, [keys[number::_THREADS] for number in range(_THREADS)])))


def _payloads(program: Table) -> set[int]:
    """Return the segments with the payloads of delegates."""
    plans = program.tables(slots.Program.EXECUTION_PLAN)
    delegates = itertools.chain(*(plan.tables(slots.ExecutionPlan.DELEGATES) for plan in plans))
    of = slots.BackendDelegateDataReference
    found = [table for one in delegates if (table := one.table(slots.BackendDelegate.PROCESSED)) is not None]
    return {one.number(of.INDEX, "I") for one in found if one.number(of.LOCATION, "b") == slots.DataLocation.SEGMENT}


def _replace_provenance(file: _File, replaced: Mapping[bytes, bytes]) -> None:
    """Replace the digests in the provenance, where they are sorted."""
    for entry in file.named:
        if entry.text(slots.NamedData.KEY) == provenance.KEY:
            start, end = file.segment_of(entry)
            file.replace((start, end), replaced)
            known = provenance.read({provenance.KEY: file.new[start:end]})
            text = b"" if known is None else known.encode()
            if len(text) != end - start:
                raise CorruptError("its provenance is not as it was written")
            file.new[start:end] = text


def _seal_data(file: _File) -> str:
    """Renew the digests of a data file, and return its own."""
    old = digests.find_data_digest(entry.text(slots.NamedData.KEY) for entry in file.named) or ""
    start, end = file.segment(file.last)
    areas = map(file.segment, range(file.last))
    file.new[start:end] = digests.encode_segments(digests.XXH3.of(file.new[first:last]) for first, last in areas)
    tables = bytes(file.new[: file.base])
    new = digests.data_digest(tables, old, file.new[start:end])
    file.new[: file.base] = digests.with_data_digest(tables, old, new)
    return new
