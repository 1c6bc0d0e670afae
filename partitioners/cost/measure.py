"""Measure what operators cost: each on its own in ExecuTorch's runtime, with portable kernels and with a backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from executorch.exir.backend.utils import tag_constant_data
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from exir_lowering import (
    Backend,
    CompileSpec,
    DelegationSpec,
    InputError,
    LoadedProgram,
    LoweringOptions,
    Partitioner,
    PartitionResult,
    PreprocessResult,
    graphs,
    load,
    lower,
)
from exir_lowering.graphs import measures
from exir_lowering.partitioners.algorithms.convex import list_computing
from exir_lowering.partitioners.cost.cost_graph import units_together
from exir_lowering.partitioners.cost.tables import CostTable, signature
from exir_lowering.partitioners.supports.support import scopes
from exir_lowering.plugins import HOST, conversion_lock

_AS_IT_IS = LoweringOptions(rewrites="none")
"""What is measured is the operator that a table names."""

_BLOCK = 1 << 14
"""Elements of a tensor of 64 KB, for which allocators do not map new memory each time."""


def measure_costs(
    program: ExportedProgram, partitioner: Partitioner, *, repeat: int = 30, warmup: int = 3
) -> CostTable:
    """Measure the operators of a program on this machine.

    Each operator, with its sizes, becomes a program of its own, as does each group of operators that the partitioner
    keeps together; they run with portable kernels and, if the partitioner takes them, with its backend. All of them run
    in turn, `repeat` times; the shortest time counts. The time of a program without operators, with as many inputs,
    outputs and bytes, is subtracted. `per_call` is the least that a backend needs, and is subtracted from the time of
    its operators; `per_byte` is the time to copy a byte of 4 MB.

    Backends fuse operators, which the times of single ones do not show: so the partitioner's partitions are run too,
    and if they take less time than their operators, the backend's costs are scaled accordingly.

    The entries are signatures. A group's time in the backend is assigned to its operator with the most arithmetic, and
    0 to the others. An operator without a kernel on the host has no entry there. Inputs are random; integers are 0.

    Args:
        program: The program, from torch.export or in Edge dialect, with static shapes. It is not changed.
        partitioner: The partitioner that would delegate it. ExecuTorch's runtime must have its backends.
        repeat: How often each program runs.
        warmup: How often each runs before that, without being timed.

    Returns:
        The table, in seconds.

    Raises:
        InputError: A count is not positive, or an operator has a dynamic shape.
        BackendUnavailableError: The runtime does not have a backend.
    """
    for name, count, least in (("repeat", repeat, 1), ("warmup", warmup, 0)):
        if not isinstance(count, int) or count < least:
            raise InputError(f"measure_costs: got {name}={count!r}, expected a whole number of at least {least}.")
    pieces = _excerpt_operators(program, partitioner)
    whole = _excerpt_partitions(program, partitioner)
    alone = {key: piece.program for key, piece in pieces.items() if len(piece.operators) == 1}
    taken = {key: piece.program for key, piece in (*pieces.items(), *whole.items())}
    runs = _load_probes()
    runs += [_TimedProgram(key, HOST, method, alone[key]) for key, (method, _) in _load(alone, None).items()]
    for key, (method, backend) in _load(taken, partitioner).items():
        if backend is not None:
            runs.append(_TimedProgram(key, backend, method, taken[key]))
    net = _subtract_overheads(_time(runs, repeat, warmup))
    places, per_call = _tabulate_costs(net, pieces)
    for place in per_call:
        measured = [(whole[run.key], seconds) for run, seconds in net if run.key in whole]
        factor = _measure_fusion(measured, places[place], per_call[place])
        places[place] = {key: seconds * factor for key, seconds in places[place].items()}
    return CostTable(places, _time_copy(repeat), per_call)


# -- one program for each operator -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Excerpt:
    """Operators as a program of their own."""

    program: ExportedProgram  # in Edge dialect
    operators: tuple[str, ...]  # their signatures; in a group, the one with the most arithmetic is first


class _KeepingBackend(Backend):
    """Keeps the first partition of each key, instead of lowering it."""

    backend_id = "exir_lowering.measure"

    def __init__(self) -> None:
        self.kept: dict[str, ExportedProgram] = {}

    def preprocess(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        """Keep one partition."""
        self.kept.setdefault(compile_specs[0].value.decode(), program)
        return PreprocessResult(b"")


class _OneByOnePartitioner(Partitioner):  # type: ignore[misc]
    """Makes a partition of each operator or group of operators; what another partitioner wants whole stays whole."""

    def __init__(self, partitioner: Partitioner, *, together: bool) -> None:
        super().__init__()
        self.partitioner, self.together = partitioner, together
        self.operators: dict[str, tuple[str, ...]] = {}
        self.dynamic: list[Node] = []

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], Callable[[Node], bool] | None]:
        """Keep what the other one keeps."""
        kept: tuple[list[Any], Callable[[Node], bool] | None] = self.partitioner.ops_to_not_decompose(ep)
        return kept

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Tag the operators; equal ones get tags with the same key."""
        tags: dict[str, DelegationSpec] = {}
        for nodes in self._units(exported_program):
            operators = sorted((n for n in nodes if graphs.is_operator(n)), key=measures.flops, reverse=True)
            self.dynamic += [node for node in operators if not _is_static(node)]
            signatures = tuple(map(signature, operators))
            key = "; ".join(signatures)
            self.operators[key] = signatures
            tag = f"one_{len(tags)}"
            tags[tag] = DelegationSpec(_KeepingBackend.backend_id, [CompileSpec("key", key.encode())])
            for node in nodes:
                node.meta[graphs.DELEGATION_TAG] = tag
        tag_constant_data(exported_program)
        return PartitionResult(exported_program, tags)

    def _units(self, program: ExportedProgram) -> Iterator[list[Node]]:
        grouped: set[Node] = set()
        if self.together:
            for unit in units_together(program, self.partitioner):
                if sum(map(graphs.is_operator, unit)) > 1:
                    grouped.update(unit)
                    yield unit
        for scope in scopes(program):
            for node in list_computing(scope.graph_module):
                calls = any(True for _ in graphs.nested_graphs(scope.graph_module, node))
                if graphs.is_operator(node) and node not in grouped and not calls and _makes_tensors(node):
                    yield [node, *(user for user in node.users if graphs.is_getitem(user))]


def _makes_tensors(node: Node) -> bool:
    return any(True for _ in measures.tensors(node.meta.get("val")))


def _is_static(node: Node) -> bool:
    values = (source.meta.get("val") for source in (*node.all_input_nodes, node))
    sizes = (size for value in values for tensor in measures.tensors(value) for size in tensor.shape)
    return all(isinstance(size, int) for size in sizes)


class _KeyedPartitioner(Partitioner):  # type: ignore[misc]
    """Makes the partitions that another partitioner makes."""

    def __init__(self, partitioner: Partitioner) -> None:
        super().__init__()
        self.partitioner = partitioner
        self.operators: dict[str, tuple[str, ...]] = {}

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], Callable[[Node], bool] | None]:
        """Keep what the other one keeps."""
        kept: tuple[list[Any], Callable[[Node], bool] | None] = self.partitioner.ops_to_not_decompose(ep)
        return kept

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Tag what the other one tags; each tag is a key."""
        result = self.partitioner(exported_program)
        for scope in scopes(result.tagged_exported_program):
            for node in filter(graphs.is_operator, list_computing(scope.graph_module)):
                tag = node.meta.get(graphs.DELEGATION_TAG)
                if tag is not None:
                    self.operators[tag] = (*self.operators.get(tag, ()), signature(node))
        tags = {
            tag: DelegationSpec(_KeepingBackend.backend_id, [CompileSpec("key", tag.encode())])
            for tag in result.partition_tags
        }
        return PartitionResult(result.tagged_exported_program, tags)


def _excerpt_partitions(program: ExportedProgram, partitioner: Partitioner) -> dict[str, _Excerpt]:
    """Return each partition that a partitioner makes as a program."""
    as_is, keep = _KeyedPartitioner(partitioner), _KeepingBackend()
    lower(program, as_is, backends={_KeepingBackend.backend_id: keep}, options=_AS_IT_IS)
    return {key: _Excerpt(kept, as_is.operators[key]) for key, kept in keep.kept.items() if key in as_is.operators}


def _excerpt_operators(program: ExportedProgram, partitioner: Partitioner) -> dict[str, _Excerpt]:
    """Return each distinct operator and group as a program."""
    found: dict[str, _Excerpt] = {}
    for together in (False, True):
        apart, keep = _OneByOnePartitioner(partitioner, together=together), _KeepingBackend()
        lower(program, apart, backends={_KeepingBackend.backend_id: keep}, options=_AS_IT_IS)
        if apart.dynamic:
            raise InputError(
                f"measure_costs: {signature(apart.dynamic[0])} has a size that is not known ahead of time. Export the "
                f"model with fixed sizes to measure it."
            )
        for key, kept in keep.kept.items():
            found.setdefault(key, _Excerpt(kept, apart.operators[key]))
    return found


class _ReturnFirst(torch.nn.Module):
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return inputs[0]


class _ReturnAll(torch.nn.Module):
    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs


def _make_probes() -> dict[str, ExportedProgram]:
    """Return programs that show what a run takes without operators."""
    small, block = torch.zeros(1), torch.zeros(_BLOCK)
    with conversion_lock():
        return {
            "empty": torch.export.export(_ReturnFirst(), (small,)),
            "inputs": torch.export.export(_ReturnFirst(), (small,) * 5),
            "outputs": torch.export.export(_ReturnAll(), (small,) * 5),
            "block": torch.export.export(_ReturnFirst(), (block,)),
        }


# -- running them ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _TimedProgram:
    """A program that is run repeatedly."""

    key: str
    place: str  # of its operators
    method: Callable[..., Any]  # runs it
    program: ExportedProgram
    seconds: float = float("inf")  # the shortest so far
    inputs: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.inputs = [_make_example(value) for value in _list_user_inputs(self.program)]

    @property
    def outputs(self) -> list[Node]:
        """Its results."""
        (output,) = (node for node in self.program.graph.nodes if node.op == "output")
        return list(output.all_input_nodes)

    @property
    def moved(self) -> int:
        """The bytes of its inputs and results."""
        values = [*_list_user_inputs(self.program), *(node.meta.get("val") for node in self.outputs)]
        return sum(measures.tensor_bytes(tensor) for value in values for tensor in measures.tensors(value))


def _load_probes() -> list[_TimedProgram]:
    probes = _make_probes().items()
    return [_TimedProgram(name, HOST, _load({name: probe}, None)[name][0], probe) for name, probe in probes]


def _list_user_inputs(program: ExportedProgram) -> list[Any]:
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    specs = program.graph_signature.input_specs
    return [
        node.meta.get("val", getattr(spec.arg, "value", None))
        for node, spec in zip(placeholders, specs, strict=True)
        if spec.kind is InputKind.USER_INPUT
    ]


def _make_example(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return made.uniform_() if value.dtype.is_floating_point else made.zero_()


_Loaded = dict[str, tuple[Callable[..., Any], "str | None"]]


def _load(programs: Mapping[str, ExportedProgram], partitioner: Partitioner | None) -> _Loaded:
    """Load programs in one file, each with the backend that has all of it; those that cannot be emitted are omitted."""
    if not programs:
        return {}
    names = {f"m{i}": key for i, key in enumerate(programs)}
    try:
        lowered = lower({name: programs[key] for name, key in names.items()}, partitioner, options=_AS_IT_IS)
        file = load(lowered.emit().buffer)
    except InputError:
        if len(programs) == 1:
            return {}
        keys = list(programs)
        halves = keys[: len(keys) // 2], keys[len(keys) // 2 :]
        first, second = (_load({key: programs[key] for key in half}, partitioner) for half in halves)
        return {**first, **second}
    plans = {plan.name: plan for plan in lowered.report.methods}
    loaded: _Loaded = {}
    for name, key in names.items():
        partitions = plans[name].partitions
        whole = len(partitions) == 1 and not plans[name].host
        loaded[key] = _bind_method(file, name), partitions[0].backend_id if whole else None
    return loaded


def _bind_method(file: LoadedProgram, name: str) -> Callable[..., Any]:
    return lambda *inputs: file.run(name, *inputs)


def _time(runs: Sequence[_TimedProgram], repeat: int, warmup: int) -> list[_TimedProgram]:
    """Run everything in turn; return the runs that the runtime has kernels for."""
    possible = []
    for run in runs:
        try:
            run.method(*run.inputs)
        except InputError:  # the runtime has no kernel, or rejects the inputs
            continue
        possible.append(run)
    for number in range(warmup + repeat):
        for run in possible:
            start = time.perf_counter()
            run.method(*run.inputs)
            passed = time.perf_counter() - start
            if number >= warmup:
                run.seconds = min(run.seconds, passed)
    return possible


# -- what it tells -----------------------------------------------------------------------------------------------------


_Net = list[tuple[_TimedProgram, float]]


def _subtract_overheads(runs: Sequence[_TimedProgram]) -> _Net:
    """Subtract what a run takes without operators: a fixed time, and some for each input, output and byte."""
    probes = {run.key: run for run in runs}
    empty, more = probes["empty"].seconds, len(probes["inputs"].inputs) - 1
    each_input = max(0.0, probes["inputs"].seconds - empty) / more
    each_output = max(0.0, probes["outputs"].seconds - probes["inputs"].seconds) / more
    each_byte = max(0.0, probes["block"].seconds - empty) / probes["block"].moved
    net = []
    for run in runs:
        taken = empty + each_input * (len(run.inputs) - 1) + each_output * (len(run.outputs) - 1)
        net.append((run, max(0.0, run.seconds - taken - each_byte * run.moved)))
    return net


def _tabulate_costs(net: _Net, pieces: Mapping[str, _Excerpt]) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return the costs of operators by place, and of a call by backend: the least that was measured there."""
    net = [(run, seconds) for run, seconds in net if run.key in pieces]
    per_call: dict[str, float] = {}
    for run, seconds in net:
        if run.place != HOST:
            per_call[run.place] = min(seconds, per_call.get(run.place, seconds))
    places: dict[str, dict[str, float]] = {place: {} for place in (HOST, *sorted(per_call))}
    for run, seconds in sorted(net, key=lambda pair: -len(pieces[pair[0].key].operators)):  # single ones count
        first, *others = pieces[run.key].operators
        places[run.place].update(dict.fromkeys(others, 0.0))
        places[run.place][first] = seconds - per_call.get(run.place, 0.0)
    return places, per_call


def _measure_fusion(measured: Sequence[tuple[_Excerpt, float]], costs: Mapping[str, float], call: float) -> float:
    """Return the share of its operators' costs that whole partitions need: backends fuse operators."""
    together = alone = 0.0
    for piece, seconds in measured:
        if all(operator in costs for operator in piece.operators):
            together += max(0.0, seconds - call)
            alone += sum(costs[operator] for operator in piece.operators)
    return min(1.0, together / alone) if alone else 1.0


def _time_copy(repeat: int) -> float:
    """Return what it takes to copy a byte of 4 MB."""
    source = torch.zeros(1 << 20)
    target = torch.empty_like(source)
    shortest = float("inf")
    for _ in range(repeat + 1):
        start = time.perf_counter()
        target.copy_(source)
        shortest = min(shortest, time.perf_counter() - start)
    return shortest / measures.tensor_bytes(source)


__all__ = ["measure_costs"]
