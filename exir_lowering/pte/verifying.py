"""Check that files are intact and belong together, by the digests in them; see `exir_lowering.pte.digests`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Literal, TypeAlias

from exir_lowering.errors import InputError
from exir_lowering.pte import container, digests, header
from exir_lowering.pte.data_files import DataFile, DataFiles
from exir_lowering.pte.digests import Seal, SealError
from exir_lowering.pte.flatbuffer import CorruptError, root
from exir_lowering.pte.mapping import MappedFile
from exir_lowering.pte.slots import FlatTensor, Program

Verify: TypeAlias = "bool | Literal['full']"

LIMIT = 32_000_000
"""How many bytes of a program and its data files are read to verify them by default."""


def check_level(verify: object) -> None:
    """Check what a caller wants to be verified; raise an InputError when it is not a valid level."""
    if not (isinstance(verify, bool) or (isinstance(verify, str) and verify == "full")):
        raise InputError(f'load: verify: got {verify!r}, expected True, False or "full".')


def check_program(file: MappedFile, verify: Verify, named: Mapping[str, memoryview] | None = None) -> Seal | None:
    """Check a program's tables, and return its digests, None without any; `verify` is as for `check_all`.

    `named` is the program's named data, if it was read.
    """
    try:
        seal = _seal(file.content, container.open_program(file.content)[1].named if named is None else named)
    except (SealError, CorruptError) as error:
        raise _damage_error(file, str(error)) from None
    if seal is not None and verify:
        base, parts = _parts(file.content)
        if len(parts) != len(seal.segments) + 1 or seal.kind.of(file.content[:base]) != seal.tables:
            raise _change_error(file, "what its tables say")
    return seal


def check_all(file: MappedFile, seal: Seal | None, data: DataFiles, needed: frozenset[str], verify: Verify) -> None:
    """Check that a program's data files belong to it, and that all of them are intact; else raise an InputError.

    `needed` are the weights that it looks for in them. `verify` False checks that the data files are those that were
    emitted with the program; True also all tables, and the rest if it is not larger than `LIMIT`; "full" everything.
    """
    sealed = [(one, _data_digest(one)) for one in data.files]
    if seal is not None:
        for one, digest in sealed:
            _check_tie(file, seal, one, digest, needed)
    if not verify:
        return
    size = len(file.content) + sum(len(one.file.content) for one in data.files)
    whole = verify == "full" or size <= LIMIT
    for one, digest in sealed:
        if digest is not None:
            _check_data(one, digest, whole=whole)
    if seal is not None and whole:
        _check_segments(file, seal)


def _damage_error(file: MappedFile, what: str) -> InputError:
    return InputError(f"{file.name} cannot be loaded: {what}. It was damaged. Make or copy it again.")


def _change_error(file: MappedFile, what: str) -> InputError:
    return InputError(
        f"{file.name} cannot be loaded: {what} is not what was emitted: its digest differs. It was damaged, or changed "
        "after it was emitted. Make or copy it again; verify=False loads what was changed on purpose."
    )


def _parts(content: memoryview) -> tuple[int, list[tuple[int, int]]]:
    """Return where the first segment of a `.pte` file starts, and the parts that its segments are in."""
    extent = header.read_pte(content)
    ranges = list(container.segment_ranges(root(content[: extent.tables]).tables(Program.SEGMENTS)))
    return extent.base, container.parts(ranges)


def _seal(content: memoryview, named: Mapping[str, memoryview]) -> Seal | None:
    """Return the seal of a program, which was already read; None when it has none; a SealError when it is damaged."""
    sealed = named.get(digests.KEY)
    if sealed is None:
        if digests.is_sealed(content):
            raise SealError("it ends with digests that its tables do not mention")
        return None
    return digests.decode(sealed)


def _check_segments(file: MappedFile, seal: Seal) -> None:
    base, parts = _parts(file.content)
    pairs = itertools.pairwise(parts)
    for expected, ((start, number), (end, _)) in zip(seal.segments, pairs, strict=True):
        if seal.kind.of(file.content[base + start : base + end]) != expected:
            raise _change_error(file, _segment(number, base + start, base + end))


def _segment(number: int, start: int, end: int) -> str:
    return f"its segment {number}, bytes {start} to {end},"


def _data_digest(one: DataFile) -> str | None:
    try:
        return digests.find_data_digest(one.weights)
    except SealError as error:
        raise _damage_error(one.file, str(error)) from None


def _check_tie(file: MappedFile, seal: Seal, one: DataFile, digest: str | None, needed: frozenset[str]) -> None:
    """Check that a data file is one of those that were emitted with a program, if the program reads it."""
    if digest in seal.data.values() or needed.isdisjoint(one.weights):
        return
    known = ", ".join(f"{name!r} ({known[:12]}...)" for name, known in seal.data.items()) or "no data file"
    found = f"the digest {digest[:12]}..." if digest is not None else "no digest"
    raise InputError(
        f"{file.name} cannot be loaded with {one.file.name}: the data file belongs to another program, or to this one "
        f"before it was emitted again. It has {found}; the program was emitted with {known}. Give the data file that "
        "was saved with it, or save the artifact again."
    )


def _check_data(one: DataFile, digest: str, *, whole: bool) -> None:
    """Check the tables of a data file, and its segments if wanted."""
    content, listed = one.file.content, one.weights[digests.data_key(digest)].content
    try:
        extent = header.read_ptd(content)
        base = extent.base
        if digests.data_digest(content[:base], digest, listed) != digest:
            raise _change_error(one.file, "what its tables say")
        if not whole:
            return
        expected, kind = digests.decode_segments(listed)
        tables = root(content[: extent.tables]).tables(FlatTensor.SEGMENTS)
        ranges = [(base + offset, size) for offset, size in container.segment_ranges(tables)]
    except (SealError, CorruptError) as error:
        raise _damage_error(one.file, str(error)) from None
    if len(ranges) != len(expected) + 1:
        raise _damage_error(one.file, f"it has {len(ranges)} segments, but digests of {len(expected)}")
    end = base
    for number, (start, size) in enumerate(ranges):
        if any(content[end:start]):
            raise _change_error(one.file, f"bytes {end} to {start}, between two segments,")
        end = start + size
        if number < len(expected) and kind.of(content[start:end]) != expected[number]:
            raise _change_error(one.file, _segment(number, start, end))
