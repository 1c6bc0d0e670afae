"""Where weights go: into the `.pte` file or into data files next to it; and how many bytes each of them takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from executorch.exir import ExecutorchBackendConfig, ExecutorchProgramManager
from rich import box
from rich.table import Table
from rich.text import Text
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.delegates import named_data_entries, place_named_data
from exir_lowering._upstream.emission import named_data_pieces
from exir_lowering.errors import InputError
from exir_lowering.errors.interrupts import let_through

Policy: TypeAlias = "str | Callable[[str, int], str | None]"
"""The data file of all weights, or a function from a weight's key and bytes to its file, None for the `.pte`."""

_DEFAULT_FILE = "_default_external_constant"  # of ExecuTorch, for external_constants=True
_NOT_IN_A_NAME = frozenset("/\\\0")
_FILE = "constant_tag"  # ExecuTorch's key of node.meta for the data file of a constant, which its emitter reads


@dataclass(frozen=True, slots=True)
class StoredData:
    """Bytes that a file holds under one name.

    Attributes:
        kind: "payload" of a delegate, "data" that delegates find by its key, or "constant" of the host's operators,
            literals aside.
        key: The partition of a payload, the key of data, the name of a constant in the model.
        bytes: How many bytes; content with several keys is stored once, and counted under the first.
        file: The data file, "" for the `.pte` file.
        methods: The methods that use it, in order.
    """

    kind: Literal["payload", "data", "constant"]
    key: str
    bytes: int
    file: str
    methods: tuple[str, ...]


def place(programs: Mapping[str, ExportedProgram], config: ExecutorchBackendConfig, policy: Policy) -> None:
    """Move the delegates' named data and the host's constants to where a policy puts them.

    Args:
        programs: Copies of the lowered programs: their delegates are replaced, their constants are marked. Literals
            stay in the `.pte` file.
        config: How they are emitted.
        policy: Where weights go. It is called with the keys of named data and the names of parameters and buffers, once
            per key and size.

    Raises:
        InputError: The policy is invalid, or the configuration also sets one.
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
    written = set(program.graph_signature.buffers_to_mutate.values())
    for node, spec in graphs.lifted_inputs(program).items():
        value = program.state_dict.get(spec.target, program.constants.get(spec.target))
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
    except Exception as error:
        let_through(error)
        raise InputError(
            f"external_weights: {policy!r} raised {type(error).__name__}: {error} for {key!r} of {size} bytes."
        ) from error


def list_stored(
    programs: Mapping[str, ExportedProgram], config: ExecutorchBackendConfig, manager: ExecutorchProgramManager
) -> tuple[StoredData, ...]:
    """List what a file and its data files store, the largest first.

    Args:
        programs: The programs, as they were handed to the emitter.
        config: How they were emitted.
        manager: What was emitted.
    """
    pieces = named_data_pieces(manager)
    theirs = config.external_constants
    file_of = theirs if callable(theirs) else lambda node: _DEFAULT_FILE if theirs else node.meta.get(_FILE)
    users: dict[tuple[str, str, str, int], list[str]] = {}
    seen: dict[Any, tuple[str, str, str, int]] = {}
    for method, program in programs.items():
        for content, entry in _entries(method, program, file_of, pieces):
            methods = users.setdefault(seen.setdefault(content, entry), [])
            if method not in methods:
                methods.append(method)
    rows = [
        StoredData(kind, key, size, file, tuple(methods))  # type: ignore[arg-type]
        for (kind, key, file, size), methods in users.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.kind, row.key)))


def table(rows: Sequence[StoredData], limit: int | None = None) -> Table:
    """Return a table of what is stored.

    Args:
        rows: What `stored` returned.
        limit: How many rows to show; one more row sums up the rest.
    """
    shown = Table(title="Stored data", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in ("kind", "key", "bytes", "file", "methods"):
        shown.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
    for row in rows[:limit]:
        shown.add_row(*map(Text, (row.kind, row.key, f"{row.bytes:,}", row.file or ".pte", ", ".join(row.methods))))
    rest = rows[limit:] if limit is not None else ()
    if rest:
        shown.add_row("", f"{len(rest)} more", f"{sum(row.bytes for row in rest):,}", "", "")
    return shown


def _entries(
    method: str, program: ExportedProgram, file_of: Callable[[Node], str | None], pieces: Mapping[str, int]
) -> Iterator[tuple[Any, tuple[str, str, str, int]]]:
    """Yield what a method stores, with a name for its content: the emitter keeps equal contents once."""
    for path, module, name in graphs.delegates(program.graph_module):
        delegate = getattr(module, name)
        payload = delegate.processed_bytes
        yield ("payload", payload), ("payload", ".".join((method, *path, name)), "", len(payload))
        for key, file, size in named_data_entries(delegate):
            yield ("data", pieces[key]), ("data", key, file and f"{file}.ptd", size)
    for node, name, value in _constants(program):
        if node.users:
            file = file_of(node) or ""
            place = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride())
            size = value.numel() * value.element_size()
            yield ("constant", place), ("constant", name, file and f"{file}.ptd", size)
