"""Where weights go: into the `.pte` file or into data files next to it; and how many bytes each of them takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from executorch.exir import ExecutorchBackendConfig, ExecutorchProgramManager
from rich.table import Table
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.delegates import named_data_entries, place_named_data
from exir_lowering._upstream.emission import named_data_pieces
from exir_lowering.errors import InputError, exception_text
from exir_lowering.pte.printing import make_table

Policy: TypeAlias = "str | Callable[[str, int], str | None]"
"""The data file of all weights, or a function from a weight's key and bytes to its file, None for the `.pte`."""

_DEFAULT_FILE = "_default_external_constant"  # of ExecuTorch, for external_constants=True
_BLOCK = 2**20  # what is compared at a time
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


def place(programs: Mapping[str, ExportedProgram], config: ExecutorchBackendConfig, policy: Policy) -> None:
    """Move the named data of delegates, and the host's constants except literals, to where a policy puts them.

    The programs are copies; the policy is called once per key and size.
    """
    if config.external_constants:
        raise InputError(
            "external_weights: the config also sets external_constants. Remove one of them; external_weights also "
            "places the weights of delegates."
        )
    decided: dict[tuple[str, int], str | None] = {}

    def decide(key: str, size: int) -> str | None:
        """Ask once: an answer may change, and the file and its report have to agree."""
        if (key, size) not in decided:
            decided[key, size] = _file(policy, key, size)
        return decided[key, size]

    for program in programs.values():
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


def _file(policy: Policy, key: str, size: int) -> str | None:
    name = policy if isinstance(policy, str) else _ask(policy, key, size)
    if name is None:
        return None
    if not isinstance(name, str) or not name.removesuffix(".ptd") or not _NOT_IN_A_NAME.isdisjoint(name):
        raise InputError(
            f"external_weights: got {name!r} for {key!r}, expected the name of a file next to the .pte file, such as "
            "'weights', or None for the .pte file itself."
        )
    return name.removesuffix(".ptd")


def _ask(policy: Any, key: str, size: int) -> Any:
    if not callable(policy):
        raise InputError(
            f"external_weights: got {policy!r}, expected the name of a data file, or a function from a weight's key "
            "and bytes to the name of its file."
        )
    try:
        return policy(key, size)
    except MemoryError:
        raise
    except Exception as error:
        raise InputError(
            f"external_weights: {policy!r} raised {exception_text(error)} for {key!r} of {size} bytes."
        ) from error


def list_stored(
    programs: Mapping[str, ExportedProgram],
    config: ExecutorchBackendConfig,
    manager: ExecutorchProgramManager,
) -> tuple[StoredData, ...]:
    """List what a file and its data files store, the largest first; the programs are those that the emitter got."""
    contents = _Contents(named_data_pieces(manager))
    theirs = config.external_constants
    file_of = theirs if callable(theirs) else lambda node: _DEFAULT_FILE if theirs else node.meta.get(_FILE)
    names: dict[Any, dict[tuple[str, str], list[str]]] = {}
    for method, program in programs.items():
        for content, kind, key in _entries(method, program, file_of, contents):
            names.setdefault(content, {}).setdefault((kind, key), []).append(method)
    rows = []
    for content, known in names.items():
        file, size, _ = content
        (kind, key), *others = sorted(known, key=lambda name: name[0] != "constant")
        methods = tuple(dict.fromkeys(method for each in known.values() for method in each))
        also = tuple(" ".join(other) for other in others)
        rows.append(StoredData(kind, key, size, file, methods, also))  # type: ignore[arg-type]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.kind, row.key)))


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


class _Contents:
    """Contents by file: equal ones are stored once."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named, self._known = named, defaultdict[tuple[str, int], list[Any]](list)
        self._data: dict[tuple[str, str], tuple[str, int, int]] = {}

    def of_data(self, key: str, file: str, size: int) -> tuple[str, int, int]:
        """Return what identifies named data: its file, its size, its number among those."""
        if (key, file) not in self._data:
            content = self._named[key]
            plain = np.frombuffer(content, np.uint8) if isinstance(content, bytes) else content
            self._data[key, file] = self._number(file, size, plain)
        return self._data[key, file]

    def of_constant(self, value: torch.Tensor, file: str) -> tuple[str, int, int]:
        """Return what identifies a constant."""
        size = value.numel() * value.element_size()
        if value.untyped_storage().nbytes() != size:
            value = value.contiguous()
        memory = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
        return self._number(file, size, memory.numpy()[:size])

    def _number(self, file: str, size: int, content: Any) -> tuple[str, int, int]:
        known = self._known[file, size]
        for number, other in enumerate(known):
            if other is content or _are_equal(other, content):
                return file, size, number
        known.append(content)
        return file, size, len(known) - 1


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether contents of the same size are equal; those on disk are not looked at."""
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return False
    blocks = range(0, len(one), _BLOCK)
    return all(np.array_equal(one[start : start + _BLOCK], other[start : start + _BLOCK]) for start in blocks)


def _entries(
    method: str,
    program: ExportedProgram,
    file_of: Callable[[Node], str | None],
    contents: _Contents,
) -> Iterator[tuple[Any, str, str]]:
    """Yield what a method stores: its content, its kind and its name."""
    for path, module, name in graphs.delegates(program.graph_module):
        delegate = getattr(module, name)
        payload = "", len(delegate.processed_bytes), delegate.processed_bytes
        yield payload, "payload", ".".join((method, *path, name))
        for key, file, size in named_data_entries(delegate):
            yield contents.of_data(key, file and f"{file}.ptd", size), "data", key
    for node, target, value in _constants(program):
        if node.users:
            file = file_of(node) or ""
            yield contents.of_constant(value, file and f"{file}.ptd"), "constant", target
