"""Where the new bytes go: the content of a file's places, the keys by which delegates find it, and the digests.

Nothing moves: a file has the same layout whatever the values are, as it stores once only what is made of the same.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, TypeVar

import numpy
import numpy.typing
import torch

from exir_lowering.errors import InputError
from exir_lowering.pte import assembling, container, digests, provenance, slots
from exir_lowering.pte.flatbuffer import CorruptError, Table, root
from exir_lowering.pte.recipes import Place, digest_for, origin_of, replay, substitute

_HEAD = 256  # bytes at the start by which contents are told apart
_SMALL = 1 << 16  # bytes or elements of what is not worth a thread

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Filled: TypeAlias = "tuple[Place, memoryview, tuple[str, str] | None]"
"""A place, its content, and the old and new SHA-256 of that by which delegates find it, if it is new."""


class _File:
    """A file with new content."""

    def __init__(self, old: memoryview, is_program: bool) -> None:
        extent = container.read_pte(old) if is_program else container.read_ptd(old)
        of = slots.Program if is_program else slots.FlatTensor
        self.tables = root(old[: extent.tables])
        self.old, self.new, self.base = old, memoryview(bytearray(len(old))), extent.base
        self._ranges = list(container.segment_ranges(self.tables.tables(of.SEGMENTS)))
        self.named = list(self.tables.tables(of.NAMED_DATA))
        self.filled: dict[int, _Filled] = {}  # by where it starts

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
            initial = next(self.tables.tables(slots.Program.MUTABLE_DATA_SEGMENTS), None)
            table = initial if place.kind == "initial" else self.tables.table(slots.Program.CONSTANT_SEGMENT)
            if table is None:
                raise CorruptError(f"it has no segment for {place.kind} {place.number}")
            start, end = self.segment(table.number(slots.SubsegmentOffsets.SEGMENT_INDEX, "I"))
            start += table.numbers(slots.SubsegmentOffsets.OFFSETS, "Q")[place.number]
        else:
            start, end = self.segment_of(self.named[place.number])
        if start + place.size > end:
            raise CorruptError("its recipes are for content that it does not have")
        return start

    def fill(self, who: str, place: Place, values: Mapping[str, torch.Tensor]) -> tuple[int, _Filled]:
        """Write a place's content; return it, and where it starts."""
        start, content = self.start_of(place), None
        old = self.old[start : start + place.size]
        if place.kind == "initial" and (cleared := [n for n in place.names if n in values and not values[n].any()]):
            why = "starts at 0 now, which a file does not store. Lower the model again."
            raise InputError(f"{who}: {cleared[0]!r} {why}")
        for recipe in place.recipes:
            lacking = [name for name in recipe.names if name not in values]
            if lacking and len(lacking) < len(recipe.names):
                given = next(name for name in recipe.names if name in values)
                raise InputError(
                    f"{who}: {lacking[0]!r} is missing: the file has what is computed from it and {given!r}."
                )
            made = old if lacking or not recipe.names else replay(recipe, values, place.size)
            if content is not None and not _same(made, content):
                raise _split(who, place.names)
            content = made
        content, keys = old if content is None else content, None
        if place.prefix is not None and not _same(content, old):
            key = self.named[place.number].text(slots.NamedData.KEY)
            keys = key.removeprefix(place.prefix), digest_for(origin_of(place.recipes), content)
        numpy.copyto(_view(self.new[start : start + place.size]), _view(content))  # which lets other threads run
        return start, (place, content, keys)

    def add(self, who: str, start: int, filled: _Filled) -> None:
        """Note what was filled; several places may be the same bytes."""
        place, content, _ = filled
        other = self.filled.setdefault(start, filled)
        if not _same(other[1], content):
            raise _split(who, [*place.names, *other[0].names])

    def complete(self, replaced: Mapping[str, str]) -> None:
        """Write what stays as it is, with other keys in the tables."""
        end = 0
        for start, (place, *_) in sorted(self.filled.items(), key=lambda item: item[0]):
            if start < end:
                raise CorruptError("its recipes make the same bytes twice")
            self.new[end:start] = self.old[end:start]
            end = start + place.size
        self.new[end:] = self.old[end:]
        self.replace((0, self.base), replaced)

    def replace(self, area: tuple[int, int], replaced: Mapping[str, str]) -> None:
        """Replace digests in keys."""
        start, end = area
        self.new[start:end] = substitute(self.new[start:end], replaced)


def _same(one: memoryview, other: memoryview) -> bool:
    """Compare content; memoryviews do that byte by byte."""
    return one is other or (one[:_HEAD] == other[:_HEAD] and numpy.array_equal(_view(one), _view(other)))


def _view(content: memoryview) -> numpy.typing.NDArray[numpy.uint8]:
    return numpy.frombuffer(content, numpy.uint8)


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
    lacking = {place.kind for place in places} - {"constant", "initial", "named", *files}
    if lacking:
        raise InputError(f"{who}: the data file {min(lacking)!r} is missing. Give it by `data`.")
    of = [files.get(place.kind, main) for place in places]
    replaced = {}

    def fill(number: int) -> tuple[int, _Filled]:
        with torch.no_grad():  # which each thread has of its own
            return of[number].fill(who, places[number], values)

    made = spread(fill, range(len(places)), [place.size for place in places])
    for file, (start, filled) in zip(of, made, strict=True):
        file.add(who, start, filled)
        if filled[2] is not None:
            replaced[filled[2][0]] = filled[2][1]
    for file in (main, *files.values()):
        file.complete(replaced)
    for number in _payloads(main.tables):
        main.replace(main.segment(number), replaced)
    _replace_provenance(main, replaced)
    sealed = {name: _seal_data(file) for name, file in files.items()}
    start, end = main.segment(main.last)
    tables = bytearray(main.new[: main.base])
    first, *_, last = assembling.seal(tables, [main.new[main.base : start]], sealed, lambda one, made: made.write(one))
    main.new[: main.base], main.new[start:end] = first, last
    return main.new, {name: file.new for name, file in files.items()}


def spread(function: Callable[[_Item], _Result], items: Sequence[_Item], sizes: Sequence[int]) -> list[_Result]:
    """Call a function for each item, for large ones in threads; small ones would wait for each other there."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing, copying and torch let other threads run
        large = {at: pool.submit(function, items[at]) for at, size in enumerate(sizes) if size > _SMALL}
        return [large[at].result() if at in large else function(item) for at, item in enumerate(items)]


def _split(who: str, names: Sequence[str]) -> InputError:
    shown = ", ".join(map(repr, list(dict.fromkeys(names))[:3]))
    return InputError(
        f"{who}: {shown}: what the file has of them was equal when the model was lowered, and is stored once; now it "
        f"differs. Lower the model again with these values."
    )


def _payloads(program: Table) -> set[int]:
    """Return the segments with the payloads of delegates."""
    plans = program.tables(slots.Program.EXECUTION_PLAN)
    delegates = itertools.chain(*(plan.tables(slots.ExecutionPlan.DELEGATES) for plan in plans))
    of = slots.BackendDelegateDataReference
    found = [table for one in delegates if (table := one.table(slots.BackendDelegate.PROCESSED)) is not None]
    return {one.number(of.INDEX, "I") for one in found if one.number(of.LOCATION, "b") == slots.DataLocation.SEGMENT}


def _replace_provenance(file: _File, replaced: Mapping[str, str]) -> None:
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
