"""Where weights go: into the `.pte` file or into data files next to it; and how many bytes each of them takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from rich.table import Table
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.delegates import named_buffers, place_named_data
from exir_lowering._upstream.emission import named_data_pieces
from exir_lowering.errors import InputError, exception_text
from exir_lowering.pte.printing import make_table
from exir_lowering.steps.file import File

Policy: TypeAlias = "str | Callable[[str, int], str | None]"
"""The data file of all weights, or a function from a weight's key and bytes to its file, None for the `.pte`."""

_Names: TypeAlias = dict[tuple[str, str], list[str]]
_DEFAULT_FILE = "_default_external_constant"  # of ExecuTorch, for external_constants=True
_BLOCK = 2**20  # bytes that are compared at a time
_START = 64  # bytes by which contents are told apart before they are compared
_NOT_IN_A_NAME = frozenset("/\\\0")
_FILE = "constant_tag"  # ExecuTorch's key of node.meta for the data file of a constant, which its emitter reads


@dataclass(frozen=True, slots=True)
class StoredData:
    """Bytes that a file holds under one name.

    Attributes:
        kind: "payload" of a delegate, "data" that delegates find by its key, or "constant" of the host's operators,
            literals aside.
        key: The partition of a payload, the key of data, the name of a constant in the model.
        bytes: How many bytes; content with several names is stored once, and counted under that of a constant, or
            under the first.
        file: The data file, "" for the `.pte` file.
        methods: The methods that use it, in order.
        also: The other names of the same bytes, each with its kind.
    """

    kind: Literal["payload", "data", "constant"]
    key: str
    bytes: int
    file: str
    methods: tuple[str, ...]
    also: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """What `also` says, "" if it is empty."""
        return ", ".join(
            [f"also {name}" for name in self.also[:1]] + [f"{len(self.also) - 1} more"] * (len(self.also) > 1)
        )


def place_weights(file: File) -> None:
    """Move the named data of delegates, and the host's constants except literals, to where a policy puts them.

    The policy is called once per key and size.
    """
    policy = file.options.external_weights
    if policy is None:
        return
    if file.config.external_constants:
        raise InputError(
            "external_weights: the config also sets external_constants. Remove one of them; external_weights also "
            "places the weights of delegates."
        )

    if not isinstance(policy, str) and not callable(policy):
        raise InputError(
            f"external_weights: got {policy!r}, expected the name of a data file, or a function from a weight's key "
            "and bytes to the name of its file."
        )

    @cache  # an answer may change, and the file and its report have to agree
    def decide(key: str, size: int) -> str | None:
        try:
            name: Any = policy if isinstance(policy, str) else policy(key, size)
        except MemoryError:
            raise
        except Exception as error:
            raise InputError(
                f"external_weights: {policy!r} raised {exception_text(error)} for {key!r} of {size} bytes."
            ) from error
        if name is None:
            return None
        if not isinstance(name, str) or not name.removesuffix(".ptd") or not _NOT_IN_A_NAME.isdisjoint(name):
            raise InputError(
                f"external_weights: got {name!r} for {key!r}, expected the name of a file next to the .pte file, such "
                "as 'weights', or None for the .pte file itself."
            )
        return name.removesuffix(".ptd")

    for program in file.programs.values():
        for node, name, value in _constants(program):
            node.meta[_FILE] = decide(name, value.numel() * value.element_size())
        for _, module, attribute in graphs.delegates(program.graph_module):
            setattr(module, attribute, place_named_data(getattr(module, attribute), decide))


def _constants(program: ExportedProgram) -> Iterator[tuple[Node, str, torch.Tensor]]:
    """Yield what a program reads and does not write, except literals, which ExecuTorch keeps in the `.pte` file."""
    written = graphs.written_state(program)
    for node, spec in graphs.lifted_inputs(program).items():
        value = graphs.lifted_value(program, spec.target)
        if isinstance(value, torch.Tensor) and spec.target not in written and "_lifted_tensor" not in node.name:
            yield node, str(spec.target), value


def list_stored(file: File) -> None:
    """List what a file and its data files store, the largest first; equal contents are stored once in each."""
    named, theirs = named_data_pieces(file.manager), file.config.external_constants
    # The contents, by their file and size and how they begin, with the names of each and the methods that use it.
    found: dict[tuple[bool, str, int, bytes | None], list[tuple[Any, _Names]]] = defaultdict(list)

    def add(where: str, content: Any, kind: str, key: str, method: str) -> None:
        start = bytes(content[:_START]) if isinstance(content, (bytes, np.ndarray)) else None
        alike = found[kind == "payload", where, len(content), start]
        equal = (names for other, names in alike if other is content or (start is not None and _same(other, content)))
        names = next(equal, None)
        if names is None:
            alike.append((content, names := {}))
        names.setdefault((kind, key), []).append(method)

    for method, program in file.programs.items():
        for path, module, attribute in graphs.delegates(program.graph_module):
            delegate = getattr(module, attribute)
            add("", delegate.processed_bytes, "payload", ".".join((method, *path, attribute)), method)
            for key, where, _ in named_buffers(delegate.named_data_store_output):
                add(where and f"{where}.ptd", named[key], "data", key, method)
        for node, target, value in _constants(program):
            if node.users:
                default = _DEFAULT_FILE if theirs else node.meta.get(_FILE)
                where = (theirs(node) if callable(theirs) else default) or ""
                add(where and f"{where}.ptd", _memory(value), "constant", target, method)
    rows = []
    for (_, where, size, _), contents in found.items():
        for _, names in contents:
            (kind, key), *others = sorted(names, key=lambda name: name[0] != "constant")
            methods = tuple(dict.fromkeys(method for each in names.values() for method in each))
            rows.append(StoredData(kind, key, size, where, methods, tuple(map(" ".join, others))))  # type: ignore[arg-type]
    file.stored = tuple(sorted(rows, key=lambda row: (-row.bytes, row.kind, row.key)))


def _memory(value: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the bytes of a constant as they are emitted."""
    size = value.numel() * value.element_size()
    if value.untyped_storage().nbytes() != size:
        value = value.contiguous()
    found: np.ndarray[Any, Any] = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).numpy()[:size]
    return found


def _same(one: Any, other: Any) -> bool:
    """Return whether contents of one size are equal, a block at a time."""
    one, other = np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)
    return all(np.array_equal(one[at : at + _BLOCK], other[at : at + _BLOCK]) for at in range(0, len(one), _BLOCK))


def table(rows: Sequence[StoredData], limit: int | None = None) -> Table:
    """Return a table of what is stored; beyond the limit of rows, one more row sums up the rest."""
    lines: list[tuple[str, ...]] = [
        (row.kind, row.key, f"{row.bytes:,}", row.file or ".pte", ", ".join(row.methods), row.note)
        for row in rows[:limit]
    ]
    rest = rows[limit:] if limit is not None else ()
    if rest:
        lines.append(("", f"{len(rest)} more", f"{sum(row.bytes for row in rest):,}", "", "", ""))
    columns = ("kind", "key", "bytes", "file", "methods", "note")
    return make_table(columns, lines, ("bytes",), "Stored data")
