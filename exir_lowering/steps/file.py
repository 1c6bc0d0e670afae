"""What emission works on: what a lowering made, how it is to be emitted, and the file while it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from executorch.exir import ExecutorchBackendConfig
from torch.export import ExportedProgram
from torch.fx import GraphModule

from exir_lowering._upstream.emission import EmittedCall, GivenValue
from exir_lowering.model import State
from exir_lowering.options import MemoryPlanner
from exir_lowering.plans.report import Report
from exir_lowering.pte.debug_info import MethodDebug
from exir_lowering.pte.provenance import Provenance

if TYPE_CHECKING:
    from exir_lowering.steps.memory_planning import Planning
    from exir_lowering.steps.placement import Policy
    from exir_lowering.steps.shared_state import ShareState


@dataclass(frozen=True, slots=True)
class EmitOptions:
    """How to emit; `LoweredMethods.emit` says what each of them means."""

    config: ExecutorchBackendConfig | None = None
    constant_methods: Mapping[str, Any] | None = None
    external_weights: Policy | None = None
    keep_originals: bool = False
    etrecord: bool = False
    share_state: ShareState = "auto"
    provenance: bool = True
    reserved: Mapping[str, bytes] = field(default_factory=dict)  # what a module puts into the file's last segments


@dataclass(frozen=True, slots=True, eq=False)
class Lowered:
    """What a lowering made, for the file; `LoweredMethods` says what each field is."""

    programs: Mapping[str, ExportedProgram]
    report: Report
    edge_programs: Mapping[str, ExportedProgram] = field(default_factory=dict)
    constant_methods: Mapping[str, Any] = field(default_factory=dict)
    fast: bool = True
    in_place: bool = False
    unchanged: Mapping[str, ExportedProgram] = field(default_factory=dict)
    made_by: Provenance = field(default_factory=Provenance)
    memory_planner: MemoryPlanner = "greedy"
    require_memory: int | None = None


@dataclass(slots=True, eq=False)
class File:
    """A file while it is made: each row of the tables of `emit` reads and changes it, one after the other."""

    lowered: Lowered  # what is known, and the programs, which nothing changes
    options: EmitOptions
    report: Report  # of the lowering; sealers add what they find out
    config: ExecutorchBackendConfig = field(default_factory=ExecutorchBackendConfig)
    constant_methods: Mapping[str, Any] = field(default_factory=dict)
    states: Sequence[State] = ()
    programs: dict[str, ExportedProgram] = field(default_factory=dict)  # private copies
    place_state: Mapping[str, Callable[[GraphModule, Any], None]] = field(default_factory=dict)  # where it is shared
    planning: Planning | None = None
    reserved: Mapping[str, bytes] = field(default_factory=dict)  # named data behind all other, in order
    # What ExecuTorch's emitter returns, and what was recorded of each method meanwhile.
    manager: Any = None
    calls: Mapping[str, Sequence[EmittedCall]] = field(default_factory=dict)
    values: Mapping[str, Sequence[GivenValue]] = field(default_factory=dict)
    # What goes with the file.
    etrecord: Any = None
    debug: Mapping[str, MethodDebug] = field(default_factory=dict)
