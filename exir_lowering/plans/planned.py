"""What `lower` does, and why, as values: every operator, with its partition or the reason why it has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from exir_lowering._upstream import locks
from exir_lowering.model import Adjustment, Legalization, RefusedRewrite, Rejection, Rewriting
from exir_lowering.pte.device_memory import DeviceMemory

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """One operator of a method.

    Attributes:
        name: Its name in the Edge program, with the path of the nested graph that holds it.
        operator: The operator, such as `aten.add.Tensor`.
        partition: The id of its partition, None on the host.
        module: The path of the module that it came from, "" if not known.
        source: The model's source line, "" if not known.
        inputs: The names of the operators whose results it reads.
        result_bytes: Bytes of its result.
        flops: Its floating-point operations.
        calls: The paths of the nested graphs that it calls, as in the names of the operators there.
    """

    name: str
    operator: str
    partition: str | None
    module: str
    source: str
    inputs: tuple[str, ...]
    result_bytes: int
    flops: int
    calls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedPartition:
    """One partition.

    Attributes:
        id: Its id, as in `Partition`.
        backend_id: The backend that it goes to.
        nodes: The names of its operators.
        operators: How many of each operator it has.
        weight_bytes: Bytes of the parameters, buffers and constants that it reads.
        bytes_in: Bytes that it is given in each call.
        bytes_out: Bytes that it returns in each call.
        flops: Its floating-point operations.
    """

    id: str
    backend_id: str
    nodes: tuple[str, ...]
    operators: Mapping[str, int]
    weight_bytes: int
    bytes_in: int
    bytes_out: int
    flops: int


@dataclass(frozen=True, slots=True)
class HostNode:
    """An operator that stays on the host.

    Attributes:
        node: Its name.
        operator: The operator.
        reasons: Why: one reason for each partitioner that was asked, in their order.
        module: The path of the module that it came from.
        source: The model's source line.
    """

    node: str
    operator: str
    reasons: tuple[Rejection, ...]
    module: str
    source: str

    @property
    def reason(self) -> str:
        """The reasons in one text."""
        return "; ".join(dict.fromkeys(rejection.reason for rejection in self.reasons))

    @property
    def by(self) -> str:
        """Who gave the reasons."""
        return ", ".join(dict.fromkeys(rejection.by for rejection in self.reasons))


@dataclass(frozen=True, slots=True)
class RefusedMerge:
    """Two partitions of a backend that cannot be merged.

    Attributes:
        first: The id of the one that runs first.
        second: The id of the other.
        path: Names of the nodes on a path from the first to the second that leaves both: if merged, they would depend
            on themselves.
    """

    first: str
    second: str
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor that is in planned memory when most of it is in use.

    Attributes:
        name: Its name: that of an input, of state, or of the node that makes it.
        made_by: The operator or the backend that makes it; "input" or "state".
        dtype: The type of its elements.
        shape: Its shape; the largest one if it is dynamic.
        bytes: Its size.
        source: The model's source line, "" if not known.
    """

    name: str
    made_by: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """The memory that ExecuTorch's runtime allocates for a method's tensors.

    Attributes:
        bytes: How much it allocates.
        peak: How much of that is in use at most: less, if tensors leave gaps.
        tensors: What is in use then, the largest first.
        device: What the method will take on a device with its weights and backends; in plans only.
    """

    bytes: int
    peak: int
    tensors: tuple[LiveTensor, ...]
    device: DeviceMemory | None = field(default=None, compare=False)


class Later(Generic[_T]):
    """What is found out about methods when somebody asks for it: that takes longer than all else in a plan."""

    def __init__(self, find: Callable[[], Mapping[str, _T]] | None) -> None:
        self._find, self._known = find, dict[str, _T]()

    def of(self, method: str) -> _T | None:
        """Return what is known of a method, None if it cannot be found out."""
        with locks.conversion():
            if self._find is not None:
                self._known, self._find = dict(self._find()), None
        return self._known.get(method)

    def __getstate__(self) -> dict[str, Any]:
        self.of("")
        return {"_find": None, "_known": self._known}


@dataclass(frozen=True, slots=True)
class MethodPlan:
    """One method.

    Attributes:
        name: The method's name.
        nodes: Every operator, nested graphs included; getitem and delegate calls do not count.
        partitions: Its partitions, in call order.
        host: The operators that stay on the host.
        adjustments: Partitions that a partitioner dropped or cut, and operators that its checks could not keep whole.
        refused_merges: For each partition and the next one of its backend, the path that prevents merging them.
        weight_bytes: Bytes of all parameters, buffers and constants that its operators read.
        delegated_weight_bytes: Bytes of those that partitions read.
        rewritings: What rewrites changed before the partitioners saw the method.
        refused_rewrites: What they did not change although it has the right form, and why.
        legalized: What was replaced on the host, since it does not run there, or not right.
        model: The class of the model, "" if not known.
        partitioners: The classes of the partitioners, in priority order.
    """

    name: str
    nodes: tuple[PlannedNode, ...]
    partitions: tuple[PlannedPartition, ...]
    host: tuple[HostNode, ...]
    adjustments: tuple[Adjustment, ...]
    refused_merges: tuple[RefusedMerge, ...]
    weight_bytes: int
    delegated_weight_bytes: int
    rewritings: tuple[Rewriting, ...] = ()
    refused_rewrites: tuple[RefusedRewrite, ...] = ()
    legalized: tuple[Legalization, ...] = ()
    model: str = ""
    partitioners: tuple[str, ...] = ()
    _memory: Later[PlannedMemory] | None = field(default=None, compare=False, repr=False)
    _advice: Later[tuple[str, ...]] | None = field(default=None, compare=False, repr=False)

    @property
    def memory(self) -> PlannedMemory | None:
        """The memory that `emit()` plans for it; None in a report that was not asked, or if it cannot be emitted.

        A plan plans it when it is first asked for, and keeps the graphs until then.
        """
        return None if self._memory is None else self._memory.of(self.name)

    @property
    def advice(self) -> tuple[str, ...]:
        """What would leave less on the host, and how much; a plan tries it when this is first asked for."""
        return (self._advice.of(self.name) or ()) if self._advice is not None else ()

    @property
    def delegated(self) -> int:
        """How many operators run in delegates."""
        return len(self.nodes) - len(self.host)

    @property
    def coverage(self) -> float:
        """The delegated share of the operators, 0 to 1; 1 for a method without operators."""
        return self.delegated / len(self.nodes) if self.nodes else 1.0

    @property
    def flops_coverage(self) -> float:
        """The delegated share of the floating-point operations, 0 to 1; 1 for a method without any."""
        total = sum(node.flops for node in self.nodes)
        return sum(partition.flops for partition in self.partitions) / total if total else 1.0

    @property
    def weights_coverage(self) -> float:
        """The share of the weight bytes that delegates read, 0 to 1; 1 for a method without weights."""
        return self.delegated_weight_bytes / self.weight_bytes if self.weight_bytes else 1.0
