"""Add constant methods to a `.pte` file, and remove them, without copying its payloads and weights.

ExecuTorch writes constant methods when it emits a program. Here they are added to an existing file: only its tables are
rewritten, and the one segment that holds the constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from executorch.exir import schema
from executorch.exir.scalar_type import ScalarType

from exir_lowering._upstream.files import read_tables, write_tables
from exir_lowering.errors import InputError
from exir_lowering.pte import container, digests, header
from exir_lowering.pte.dtypes import CODES

Piece = bytes | memoryview

_ALIGNMENT = 16  # of a tensor among the constants, as ExecuTorch has it
_LARGEST = 4096  # any larger alignment is chance, and need not be kept
_BASE = 128


def rewrite(content: memoryview, keep: Callable[[str], bool], constants: Mapping[str, Sequence[Any]]) -> list[Piece]:
    """Return a `.pte` file in pieces, with other constant methods, sealed if it was before.

    `format.read_program` read the file already. Trailing constants that only removed methods use are removed too. The
    new methods return bools, ints, floats, strs and tensors; payloads and weights are pieces of the old file.
    InputError: The file has its constants in its tables, as files of old versions of ExecuTorch do, or its digests are
    damaged.
    """
    extent = header.read_pte(content)
    base = extent.base
    program = read_tables(bytes(content[: extent.tables]))
    if program.constant_buffer:
        raise InputError("Methods cannot be added to a file of an old version of ExecuTorch. Make the file again.")
    segments: list[list[Piece]] = [[content[base + s.offset : base + s.offset + s.size]] for s in program.segments]
    aligned = [
        _find_alignment(base) if s.offset == 0 else min(_find_alignment(s.offset), _find_alignment(base))
        for s in program.segments
    ]
    seal = _take_seal(program, segments, aligned)
    kept = [plan for plan in program.execution_plan if keep(plan.name)]
    gone = [plan for plan in program.execution_plan if not keep(plan.name)]
    offsets, pieces = _trim(program.constant_segment, segments, kept, gone)
    inside = _find_inside(program, len(segments), sum(map(len, pieces)))
    for name, outputs in constants.items():
        kept.append(_plan(name, _add_values(outputs, offsets, pieces)))
    index = program.constant_segment.segment_index
    if index >= len(segments):
        index = len(segments)
        segments.append([])
        aligned.append(_BASE)
    segments[index] = pieces
    program.execution_plan = kept
    program.constant_segment = schema.SubsegmentOffsets(segment_index=index, offsets=offsets)
    if seal is None:
        return _assemble(program, segments, aligned, _find_alignment(base), inside)
    return _seal(program, segments, aligned, _find_alignment(base), inside, seal.data)


def _find_inside(program: Any, count: int, size: int) -> dict[int, int]:
    """Return which of the first segments are among the constants that stay, and where there."""
    index, found = program.constant_segment.segment_index, {}
    if index < count:
        around = program.segments[index].offset
        for number, one in enumerate(program.segments[:count]):
            start = one.offset - around
            if number != index and one.size and start >= 0 and start + one.size <= size:
                found[number] = start
    return found


def _add_values(outputs: Iterable[Any], offsets: list[int], pieces: list[Piece]) -> list[Any]:
    """Return what a constant method returns, and add its tensors to the constants: their offsets and content."""
    values, end = [], sum(map(len, pieces))
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            values.append(schema.EValue(_scalar(output)))
            continue
        pieces.append(bytes(-end % _ALIGNMENT))
        offsets.append(end + len(pieces[-1]))
        pieces.append(bytes(output.reshape(-1).view(torch.uint8).numpy()))
        end = offsets[-1] + len(pieces[-1])
        values.append(schema.EValue(_tensor(output, len(offsets) - 1)))
    return values


def _take_seal(program: Any, segments: list[list[Piece]], aligned: list[int]) -> digests.Seal | None:
    """Take the seal out of a file, and return it; None when there is none."""
    found = [datum for datum in program.named_data or [] if datum.key == digests.KEY]
    if not found:
        return None
    (datum,) = found
    try:
        seal = digests.decode(b"".join(segments[datum.segment_index]))
    except digests.SealError as error:
        raise InputError(f"The file is damaged: {error}. Make it again.") from None
    if datum.segment_index != len(segments) - 1:
        raise InputError("The file was changed by another tool: its digests are not its last segment. Make it again.")
    program.named_data.remove(datum)
    del segments[-1], aligned[-1]
    return seal


def _seal(
    program: Any,
    segments: list[list[Piece]],
    aligned: list[int],
    base: int,
    inside: Mapping[int, int],
    data: Mapping[str, str],
) -> list[Piece]:
    """Return a file with a seal as its last segment."""
    program.named_data = [*(program.named_data or []), schema.NamedData(digests.KEY, len(segments))]
    reserved = bytes(digests.size(len(segments) - len(inside), data))
    pieces = _assemble(program, [*segments, [reserved]], [*aligned, _BASE], base, inside)
    parts = container.parts([(segment.offset, segment.size) for segment in program.segments])
    starts = [len(pieces[0]) + start for start, _ in parts]
    ranges = digests.RangeDigests(starts)
    for piece in pieces:
        ranges.write(piece)
    first, *rest = ranges.digests()
    return [*pieces[:-1], digests.Seal(first, tuple(rest), data).encode()]


def _find_alignment(position: int) -> int:
    """Return the alignment of a position, which the new file keeps."""
    return max(min(position & -position, _LARGEST), _ALIGNMENT)


def _trim(
    constants: schema.SubsegmentOffsets, segments: Sequence[list[Piece]], kept: Iterable[Any], gone: Iterable[Any]
) -> tuple[list[int], list[Piece]]:
    """Return the constants without the trailing ones that only removed methods use."""
    offsets = list(constants.offsets) or [0]
    pieces = list(segments[constants.segment_index]) if constants.segment_index < len(segments) else []
    unused = _constants(gone)
    if unused:
        count = max(min(unused), max(_constants(kept), default=0) + 1)
        if count < len(offsets):
            pieces = [pieces[0][: offsets[count]]]
            offsets = offsets[:count]
    return offsets, pieces


def _constants(plans: Iterable[Any]) -> set[int]:
    """Return the numbers of the constants that plans use; a tensor in planned memory has an initial value instead."""
    values = chain.from_iterable(plan.values for plan in plans)
    tensors = (value.val for value in values if isinstance(value.val, schema.Tensor))
    return {tensor.data_buffer_idx for tensor in tensors if tensor.allocation_info is None} - {0}


def _assemble(
    program: Any, segments: Sequence[list[Piece]], aligned: Sequence[int], base: int, inside: Mapping[int, int]
) -> list[Piece]:
    """Return the file; the segments in `inside` are where that says, among the constants."""
    pieces: list[Piece] = []
    end = 0
    program.segments = [schema.DataSegment(offset=0, size=sum(map(len, parts))) for parts in segments]
    for number, (parts, alignment) in enumerate(zip(segments, aligned, strict=True)):
        if number not in inside:
            pieces.append(bytes(-end % alignment))
            program.segments[number].offset = end + len(pieces[-1])
            pieces += parts
            end = program.segments[number].offset + program.segments[number].size
    for number, offset in inside.items():
        program.segments[number].offset = program.segments[program.constant_segment.segment_index].offset + offset
    return [header.add_pte_header(write_tables(program), max(base, _BASE), end), *pieces]


def _plan(name: str, values: list[Any]) -> Any:
    """Return a method without instructions: its outputs are its own values."""
    return schema.ExecutionPlan(
        name=name,
        container_meta_type=schema.ContainerMetadata("", ""),
        values=values,
        inputs=[],
        outputs=list(range(len(values))),
        chains=[schema.Chain(inputs=[], outputs=[], instructions=[], stacktrace=None)],
        operators=[],
        delegates=[],
        non_const_buffer_sizes=[0],
    )


def _scalar(value: bool | int | float | str) -> Any:
    if isinstance(value, bool):
        return schema.Bool(value)
    if isinstance(value, int):
        return schema.Int(value)
    return schema.Double(value) if isinstance(value, float) else schema.String(value)


def _tensor(tensor: torch.Tensor, index: int) -> Any:
    return schema.Tensor(
        scalar_type=ScalarType(CODES[tensor.dtype]),
        storage_offset=0,
        sizes=list(tensor.shape),
        dim_order=list(range(tensor.dim())),
        requires_grad=False,
        layout=0,
        data_buffer_idx=index,
        allocation_info=None,
        shape_dynamism=schema.TensorShapeDynamism.STATIC,
    )
