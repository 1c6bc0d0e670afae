"""What is in a file, as values and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from exir_lowering.inspection import text
from exir_lowering.plans.views import plain
from exir_lowering.pte.device_memory import DeviceMemory
from exir_lowering.pte.manifest import Line
from exir_lowering.pte.payloads import PayloadOperator
from exir_lowering.pte.printing import Shown
from exir_lowering.pte.provenance import Provenance
from exir_lowering.pte.signatures import MethodSignature

VERSION = 2  # increased when a field of the JSON changes its meaning or is removed

Kind = Literal[
    "header", "tables", "padding", "constant", "state", "payload", "named data", "module", "provenance", "digests",
    "rest",
]  # fmt: skip
"""What bytes of a file are: "state" is an initial value of state, "rest" is bytes that nothing refers to."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Consecutive bytes of a file."""

    start: int  # the first of them
    size: int  # how many
    kind: Kind  # what they are
    what: str = ""  # the content, such as the name of a weight; "" if the kind is enough


@dataclass(frozen=True, slots=True)
class Stored:
    """Content that a file has, or looks for in a data file."""

    kind: Kind
    key: str  # of named data; for other content, where it starts, or its name in a data file
    name: str  # what the model calls it, "" if that is not known
    bytes: int
    start: int | None  # where it is in the file, None if it is in a data file
    users: tuple[str, ...] = ()  # who is known to read it: methods, and delegates as "method/number"

    @property
    def title(self) -> str:
        """Its name, or else its key."""
        return self.name or self.key


@dataclass(frozen=True, slots=True)
class DelegateReport:
    """A part of a method that a backend executes."""

    number: int  # which of the method's delegates it is, from 0
    backend: str
    payload_bytes: int
    compile_specs: tuple[tuple[str, bytes], ...]  # the partitioner's options for the backend
    operators: tuple[PayloadOperator, ...] = ()  # in the payload; () if its backend is not XNNPACK
    weights: tuple[str, ...] = ()  # the keys of the named data that it is known to read


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor in planned memory."""

    value: int  # its number in the method
    name: str  # that of an input, an output or state, or of the instruction that makes it
    dtype: str
    shape: tuple[int, ...]  # the largest one if it is dynamic
    arena: int  # the number of its planned memory
    offset: int  # the byte where it starts there
    bytes: int
    first: int  # the instruction that first writes to it, or reads it
    last: int  # the last instruction that uses it; the number of instructions if it lasts longer


@dataclass(frozen=True, slots=True)
class Arena:
    """One planned memory of a method."""

    number: int
    bytes: int
    peak: int  # the most bytes in use at once
    at: int  # the instruction at that time
    tensors: tuple[int, ...]  # the values in use then, the largest first


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that a method takes at run time."""

    arenas: tuple[Arena, ...]
    tensors: tuple[PlannedTensor, ...]  # in the arenas, by value
    bytes: int  # of all arenas; neither what backends allocate nor weights, which are mapped or read


@dataclass(frozen=True, slots=True)
class MethodReport:
    """A method of a file."""

    signature: MethodSignature  # what it takes, returns and keeps
    delegates: tuple[DelegateReport, ...]  # the parts of it that backends execute
    kernels: Mapping[str, int]  # how often it calls each kernel, such as "aten::add.out"
    memory: Memory  # the memory that it takes at run time
    device: DeviceMemory  # everything that it takes on a device

    @property
    def name(self) -> str:
        """Its name."""
        return self.signature.name


@dataclass(frozen=True, slots=True)
class FileReport(Shown):
    """What is in a `.pte` or `.ptd` file, as `inspect` returns it.

    Attributes:
        name: How it was given: its path, or "the .pte content of 8 bytes".
        format: ".pte" or ".ptd".
        size: In bytes.
        methods: The methods, sorted by name.
        stored: Weights, payloads and named data, the largest first.
        ranges: Every byte of the file once, in order.
        provenance: How the file was made, according to itself; None if it does not say.
        sealed: Whether the file has digests of its parts. They are not compared here: `load(verify="full")` does.
        data: The reports of the data files that were given.
        families: The methods of families in order of preference, with the backends and the sizes that they are for.
    """

    name: str
    format: Literal[".pte", ".ptd"]
    size: int
    methods: tuple[MethodReport, ...]
    stored: tuple[Stored, ...]
    ranges: tuple[ByteRange, ...]
    provenance: Provenance | None = None
    sealed: bool = False
    data: tuple[FileReport, ...] = ()
    families: tuple[Line, ...] = ()

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends that it needs, sorted."""
        return tuple(sorted({each.backend for method in self.methods for each in method.delegates}))

    def bytes_by_kind(self) -> dict[str, int]:
        """Return how many bytes are of each kind, the largest first."""
        found: Counter[str] = Counter()
        for part in self.ranges:
            found[part.kind] += part.size
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def summary(self, *, width: int = 100) -> str:
        """Return at most ten lines; see `to_text`."""
        return text.summary(self, width)

    def to_text(self, *, width: int = 120) -> str:
        """Return it as plain text, the summary first; `width` is that of a line, in characters."""
        return text.to_text(self, width)

    def to_json(self) -> str:
        """Return it as JSON: `{"version": 2, "name", ...}`, the fields of this class and of what it holds.

        Equal files give equal text, but for the name. Element types are words such as "float32", bytes are hexadecimal.
        """
        return json.dumps(as_data(self), indent=2)

    def kernels_yaml(self) -> str:
        """Return the kernels as the file that ExecuTorch's selective build takes, each with the number of its calls.

        Its `gen_selected_ops` has it as OPS_SCHEMA_YAML, its `gen_oplist` as `--ops_schema_yaml_path`.
        """
        counts = sum((Counter(method.kernels) for method in self.methods), Counter[str]())
        # JSON's strings are YAML's, whatever characters a file has in its names.
        return "".join(f"- op: {json.dumps(name)}  # {count}\n" for name, count in sorted(counts.items())) or "[]\n"

    def __repr__(self) -> str:
        return f"FileReport({self.name}: {self.size:,} bytes, {len(self.methods)} methods)"


def as_data(value: Any) -> dict[str, Any]:
    """Return a value, a dataclass or a mapping, as `to_json` writes it."""
    return {"version": VERSION, **plain(value)}
