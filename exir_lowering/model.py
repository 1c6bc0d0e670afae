"""The values that flow down the line: frozen, typed and printable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from executorch.exir.backend.backend_details import PreprocessResult
    from executorch.exir.backend.compile_spec_schema import CompileSpec
    from executorch.exir.backend.partitioner import DelegationSpec, Partitioner
    from torch.export import ExportedProgram


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a node stays on the host.

    Attributes:
        method: The method that the node belongs to.
        node: The node's name, with the path of the nested graph that holds it.
        target: The operator.
        reason: The reason, in words.
        by: Who gave the reason: a partitioner's class, or a step of the compiler.
        code: The kind of reason, for use in code: "op", "dtype", "dropped", "unclaimed", ...
    """

    method: str
    node: str
    target: str
    reason: str
    by: str
    code: str = "unclaimed"

    def __str__(self) -> str:
        return f"{self.method}: {self.node} ({self.target}) stays on the host: {self.reason} [{self.by}]"


@dataclass(frozen=True, slots=True)
class Adjustment:
    """How a partitioner changed a partition that it could have made.

    Attributes:
        method: The method.
        kind: "dropped" (its nodes stay on the host), "cut" (it became several), "skipped" (a whole backend), or
            "decomposed" (of an operator that it might have kept whole, the check raised).
        nodes: The names of the affected nodes, with the path of the nested graph that holds them.
        reason: Why, in words, with figures.
        by: Who did it.
    """

    method: str
    kind: Literal["dropped", "cut", "skipped", "decomposed"]
    nodes: tuple[str, ...]
    reason: str
    by: str

    def __str__(self) -> str:
        what = f"{len(self.nodes)} nodes from {self.nodes[0]} to {self.nodes[-1]}" if self.nodes else "nothing"
        return f"{self.method}: {self.kind} {what}: {self.reason} [{self.by}]"


@dataclass(frozen=True, slots=True)
class RefusedPartition:
    """Operators that a backend failed on, so that they went to the next partitioner or stay on the host.

    Attributes:
        method: The method.
        backend_id: The backend.
        nodes: The names of the operators, with the path of the nested graph that holds them.
        sources: The model's lines that they come from.
        failure: What the backend raised, and where.
    """

    method: str
    backend_id: str
    nodes: tuple[str, ...]
    sources: tuple[str, ...]
    failure: str

    def __str__(self) -> str:
        what = self.nodes[0] if len(self.nodes) == 1 else f"{len(self.nodes)} operators from {self.nodes[0]}"
        return f"{self.method}: {self.backend_id} failed on {what}: {self.failure.partition(chr(10))[0]}"


@dataclass(frozen=True, slots=True)
class NarrowedDimension:
    """A dynamic dimension of an input that may have fewer sizes in the file than in the program that was given.

    Attributes:
        method: The method.
        input: The name of the input.
        dimension: Its dimension, from 0.
        given: The smallest and the largest size in the program; None for an unbounded largest size.
        converted: The same after the conversion to Edge dialect; instead of an unbounded largest size that of the
            example, as ExecuTorch plans memory for it.
        source: The model's source line that reads the input first, "" if not known.
    """

    method: str
    input: str
    dimension: int
    given: tuple[int, int | None]
    converted: tuple[int, int | None]
    source: str = field(default="", compare=False)

    def __str__(self) -> str:
        if self.given[1] is None and self.converted[1] is not None:
            line = f" ({self.source})" if self.source else ""
            return (
                f"{self.method}: dimension {self.dimension} of {self.input} has no largest size in the program; the "
                f"file takes at most {self.converted[1]}, that of the example, for which memory is planned: export "
                f'with a Dim that has a max, or lower with bounds={{"{self.input}.{self.dimension}": ...}}{line}'
            )
        given, converted = (f"{low}..{'' if high is None else high}" for low, high in (self.given, self.converted))
        return (
            f"{self.method}: dimension {self.dimension} of {self.input} is {given} in the program; the conversion to "
            f"Edge dialect narrowed it to {converted}, so results for other sizes are uncertain: verify tests them"
        )


@dataclass(frozen=True, slots=True)
class Rewriting:
    """What a rewrite did in one place.

    Attributes:
        method: The method.
        rewrite: The name of the rewrite.
        removed: The names of the nodes that are gone, the one whose value is computed in another way first.
        operators: Their operators, in that order.
        made: The names of the nodes that were added.
        kept: The name of the node that has the value now: one that was added, or that existed.
        bytes_saved: Bytes of results that are no longer written, minus those of new results; may be negative.
        source: The model's source line, "" if not known.
    """

    method: str
    rewrite: str
    removed: tuple[str, ...]
    operators: tuple[str, ...]
    made: tuple[str, ...]
    kept: str
    bytes_saved: int
    source: str

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.method}: {self.rewrite}: {', '.join(self.removed)} -> {self.kept}{where}"


@dataclass(frozen=True, slots=True)
class Legalization:
    """Which operators took the place of one on the host that does not run there, or not right.

    Attributes:
        method: The method.
        node: The node that is gone, with the path of the nested graph that held it.
        operator: Its operator.
        reason: Why it was replaced, as a clause.
        made: The nodes that were added.
        source: The model's source line, "" if not known.
    """

    method: str
    node: str
    operator: str
    reason: str
    made: tuple[str, ...]
    source: str

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.method}: {self.node} ({self.operator}) -> {len(self.made)} operators: {self.reason}{where}"


@dataclass(frozen=True, slots=True)
class RefusedRewrite:
    """Why a rewrite did not change a node that has the right form.

    Attributes:
        method: The method.
        rewrite: The name of the rewrite.
        node: The name of the node.
        operator: Its operator.
        reason: The reason, in words.
        advice: What would allow it, "" if nothing is known.
        source: The model's source line, "" if not known.
    """

    method: str
    rewrite: str
    node: str
    operator: str
    reason: str
    advice: str
    source: str

    def __str__(self) -> str:
        advice = f" {self.advice}" if self.advice else ""
        return f"{self.method}: {self.rewrite} left {self.node} ({self.operator}) alone: {self.reason}.{advice}"


@dataclass(frozen=True, slots=True)
class State:
    """Memory that methods keep for later calls: a buffer, or a weight that is written.

    Attributes:
        names: What it is called in each method that has it.
        read_by: The methods that read it.
        written_by: The methods that write it; () if only other memory of one of these names is written.
        dtype: The type of its elements.
        shape: Its shape.
        bytes: Its size.
        shared: Whether what one method writes is what the others read.
        overlapping: What has a part of its memory in other methods, or has it in another form: methods and names.
        kept: Who keeps it between calls, and why if a partitioner asked for it in vain; "" if none asked.
    """

    names: Mapping[str, str]
    read_by: tuple[str, ...]
    written_by: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    shared: bool
    overlapping: tuple[tuple[str, str], ...] = ()
    kept: str = ""

    def __str__(self) -> str:
        names = "/".join(dict.fromkeys(self.names.values()))
        read, written = (" and ".join(methods) or "none" for methods in (self.read_by, self.written_by))
        shared = "shared" if self.shared else "not shared"
        kept = f", kept by {self.kept}" if self.kept else ""
        return f"{names}: {self.bytes:,} B, read by {read}, written by {written}, {shared}{kept}"


@dataclass(frozen=True, slots=True)
class EdgeMethod:
    """One method in Edge dialect."""

    name: str
    program: ExportedProgram  # in Edge dialect; no step changes it
    partitioners: tuple[Partitioner, ...] = ()  # in priority order
    converted_from: ExportedProgram | None = None  # None if it was given in Edge dialect
    left_to_executorch: tuple[str, ...] = ()  # steps of the conversion, with the reasons
    adjustments: tuple[Adjustment, ...] = ()  # of the conversion, to partitioners whose checks raise
    rewrites: tuple[str, ...] = ()  # the names of those that were tried
    unchanged: ExportedProgram | None = None  # before them; None if they changed nothing
    rewritings: tuple[Rewriting, ...] = ()
    refused_rewrites: tuple[RefusedRewrite, ...] = ()  # what could have been changed, and why it was not
    legalized: tuple[Legalization, ...] = ()  # what does not run on the host, or not right, and was replaced

    def __str__(self) -> str:
        origin = "given in Edge dialect" if self.converted_from is None else "converted to Edge dialect"
        names = ", ".join(type(partitioner).__name__ for partitioner in self.partitioners) or "no partitioner"
        return f"method {self.name}, {origin}, for {names}\n{self.program.graph}"


@dataclass(frozen=True, slots=True)
class TaggedMethod:
    """One method after one partitioner."""

    name: str
    program: ExportedProgram  # a private copy; claimed nodes carry `meta["delegation_tag"]`
    destinations: Mapping[str, DelegationSpec]  # by tag
    rejections: tuple[Rejection, ...] = ()  # of nodes that the partitioner did not claim
    adjustments: tuple[Adjustment, ...] = ()  # of partitions that it dropped or cut

    def __str__(self) -> str:
        lines = [f"tagged method {self.name}: {len(self.destinations)} tags"]
        lines += [f"  {tag} -> {spec.backend_id}" for tag, spec in self.destinations.items()]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class CallSite:
    """Where a partition is called from."""

    owner: str  # the method whose program holds the call
    graph_path: tuple[str, ...]  # of attributes, to the nested graph module with the call; () for the top graph
    target: str  # the attribute under which that graph module holds the delegate

    def __str__(self) -> str:
        return ".".join((self.owner, *self.graph_path, self.target))


@dataclass(frozen=True, slots=True)
class Partition:
    """The nodes of one tag as a program of their own."""

    id: str  # unique across all methods, and the same in every run
    method: str  # from which it was taken
    tag: str  # the partitioner's
    backend_id: str
    compile_specs: tuple[CompileSpec, ...]
    program: ExportedProgram  # in Edge dialect; placeholders in the order of LIFTED_ORDER, then user inputs
    site: CallSite
    nodes: tuple[str, ...] = ()  # the method's nodes that it took, with the paths of their graphs

    def __str__(self) -> str:
        return f"partition {self.id} -> {self.backend_id} at {self.site}\n{self.program.graph}"


@dataclass(frozen=True, slots=True)
class ExtractedMethod:
    """One method whose claimed nodes moved into partitions."""

    name: str
    program: ExportedProgram  # the owner: the rest, with a pending delegate call for each partition so far
    partitions: tuple[Partition, ...]  # top graph first, in call order
    rejections: tuple[Rejection, ...] = ()  # of nodes that were claimed but had to stay on the host

    def __str__(self) -> str:
        return "\n".join([f"method {self.name}\n{self.program.graph}", *map(str, self.partitions)])


@dataclass(frozen=True, slots=True)
class BackendGroup:
    """All partitions, of all methods, that go to one backend in a single `preprocess_all` call."""

    backend_id: str
    partitions: tuple[Partition, ...]  # in the order of the methods, then of the calls

    def __str__(self) -> str:
        return "\n".join([f"group {self.backend_id}", *(f"  {p.id} at {p.site}" for p in self.partitions)])


@dataclass(frozen=True, slots=True)
class LoweredPartition:
    """A partition and the result of its backend."""

    partition: Partition
    result: PreprocessResult

    def __str__(self) -> str:
        return f"lowered {self.partition.id}: {len(self.result.processed_bytes)} bytes"
