"""Finish what is emitted: each weight is there once, and digests of all parts go into the files; see `pte.digests`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from executorch.exir import ExecutorchBackendConfig, ExecutorchProgramManager
from executorch.exir.tensor import ALIGNMENT

from exir_lowering._upstream import emission
from exir_lowering._upstream.delegates import add_last_named_data
from exir_lowering.errors import InvariantError
from exir_lowering.pte import assembling, digests, provenance
from exir_lowering.pte.flatbuffer import CorruptError


@contextmanager
def reserving(edge: Any, reserved: Mapping[str, bytes], with_provenance: bool) -> Iterator[None]:
    """Reserve named data, and space for the digests, in what an `EdgeProgramManager` emits while the context lasts."""
    first = {provenance.KEY: provenance.RESERVED} if with_provenance else {}
    for key, content in (*first.items(), *reserved.items(), (digests.KEY, digests.RESERVED)):
        add_last_named_data(edge, key, content)
    with emission.adding_to_data_files(_data_segments):
        yield


def share(manager: ExecutorchProgramManager, config: ExecutorchBackendConfig) -> None:
    """Remove the copies of constants that delegates have as named data from the `.pte` file; see `pte.assembling`."""
    cord, aligned = emission.pte_contents(manager), config.constant_tensor_alignment or ALIGNMENT
    alignments = emission.named_data_alignments(manager)
    try:
        pieces = assembling.share(emission.cord_pieces(cord), alignments, config.segment_alignment, aligned)
    except CorruptError as error:
        raise InvariantError(f"Weights cannot be shared: {error}.") from None
    if pieces is not None:
        emission.set_cord_pieces(cord, pieces)


def fill(manager: ExecutorchProgramManager, key: str, content: bytes) -> None:
    """Write named data into the space that was reserved for it; raise an InvariantError if it is missing."""
    cord = emission.pte_contents(manager)
    try:
        emission.set_cord_pieces(cord, assembling.fill(emission.cord_pieces(cord), key, content))
    except CorruptError as error:
        raise InvariantError(f"{key!r} cannot be written into the file: {error}.") from None


def seal(manager: ExecutorchProgramManager) -> None:
    """Write the digests into the space that was reserved when the file was emitted; InvariantError if it is missing."""
    data = {name: _seal_data(cord) for name, cord in emission.data_file_contents(manager).items()}
    _seal_program(emission.pte_contents(manager), {data_name(name): digest for name, digest in data.items()})


def identity(manager: ExecutorchProgramManager) -> str:
    """Return what identifies the `.pte` file that was sealed, in hexadecimal."""
    return digests.identity(bytes(emission.cord_pieces(emission.pte_contents(manager))[-1]))


def data_name(name: str) -> str:
    """Return the name of a data file from ExecuTorch's tag for it."""
    return name if name.endswith(".ptd") else f"{name}.ptd"


def _data_segments(buffers: Sequence[Any]) -> tuple[str, bytes]:
    """Return the key and content of the digests that come after a data file's segments."""
    made: list[bytes] = []
    for buffer in buffers:
        one = digests.RangeDigests([len(buffer)])
        emission.write_buffer(buffer, one)
        made += one.digests()
    return digests.data_key(), digests.encode_segments(made)


def _seal_data(cord: Any) -> str:
    tables, *content = emission.cord_pieces(cord)
    try:
        digest = digests.data_digest(tables, digests.XXH3.zeros, bytes(content[-1]))
        emission.set_cord_pieces(cord, [digests.with_data_digest(tables, digests.XXH3.zeros, digest), *content])
    except digests.SealError as error:
        raise InvariantError(f"An emitted data file cannot be sealed: {error}.") from error
    return digest


def _seal_program(cord: Any, data: Mapping[str, str]) -> None:
    first, *content, last = emission.cord_pieces(cord)
    if bytes(last) != digests.RESERVED:
        raise InvariantError("An emitted program cannot be sealed: the reserved segment is not its last one.")
    try:
        emission.set_cord_pieces(cord, assembling.seal(bytearray(first), content, data, emission.write_buffer))
    except CorruptError as error:
        raise InvariantError(f"An emitted program cannot be sealed: {error}.") from None
