"""The result of `lower`: the lowered programs, which can be emitted to a file or run as a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.export import ExportedProgram

from exir_lowering.plans.views import destinations
from exir_lowering.steps.emit import Artifact, emit
from exir_lowering.steps.file import EmitOptions, Lowered
from exir_lowering.steps.placement import Policy
from exir_lowering.steps.shared_state import ShareState

if TYPE_CHECKING:
    from executorch.exir import ExecutorchBackendConfig

    from exir_lowering.lowered_module import Delegates, LoweredModule

_SHOWN = 8  # how many states `print(lowered)` shows


@dataclass(frozen=True, slots=True, eq=False)
class LoweredMethods(Lowered, Mapping[str, ExportedProgram]):
    """The lowered programs by method name, in the order in which they were given.

    Attributes:
        programs: The programs. Each also runs in eager PyTorch (`.module()`), its delegates by their original graphs.
        report: What was delegated, what was not, and why.
        edge_programs: The programs before lowering, in Edge dialect, rewritten.
        constant_methods: Values for methods that return a constant: those of the EdgeProgramManager that was lowered.
        fast: The option of the lowering, which `emit` follows.
        in_place: Whether `emit` lets elements of buffers be written in place, where nothing reads the old state later:
            where programs are rewritten.
        made_by: What is known of the lowering, which `emit` writes into the file.
        unchanged: The programs before they were rewritten, in Edge dialect, of the methods in which anything was; debug
            handles of what is gone are looked up there.
        memory_planner: The option of the lowering, which `emit` follows.
        require_memory: The option of the lowering in bytes, which `emit` checks again.
    """

    def __getitem__(self, method: str) -> ExportedProgram:
        return self.programs[method]

    def __iter__(self) -> Iterator[str]:
        return iter(self.programs)

    def __len__(self) -> int:
        return len(self.programs)

    def emit(
        self,
        config: ExecutorchBackendConfig | None = None,
        *,
        constant_methods: Mapping[str, Any] | None = None,
        external_weights: Policy | None = None,
        keep_originals: bool = False,
        etrecord: bool = False,
        share_state: ShareState = "auto",
        provenance: bool = True,
    ) -> Artifact:
        """Make the `.pte` file and its data files.

        Args:
            config: ExecuTorch's options for emission, including those per method. A memory planning pass that has an
                algorithm of its own keeps it, whatever `LoweringOptions(memory_planner=...)` says.
            constant_methods: Values, by name, for methods that return a constant. They are added to those of the
                lowered EdgeProgramManager; one with the same name replaces it.
            external_weights: Where to put the weights of delegates and of host operators: the name of a `.ptd`
                data file for all of them, or a function from a weight's key and bytes to the name of its file, or None
                for the `.pte` file itself. ExecuTorch's runtime opens one data file per program.
            keep_originals: Whether the file keeps the original graph of each partition, with its weights, so that
                `load(..., unavailable="fallback")` can execute it in PyTorch where its backend is missing.
            etrecord: Whether to also make ExecuTorch's `ETRecord`, for its Inspector, with the Edge programs' weights.
            share_state: Which of `report.states` methods share: "auto", written state that shared memory at export;
                True, also state of the same name; a list of names, these; False, none.
            provenance: Whether the file says how it was made: versions, options, partitioners, rewrites, and the names
                of inputs, outputs, weights and state. It has no path, no time and no name of a user.

        Returns:
            The artifact. The lowered programs are unchanged and can be emitted again.

        Raises:
            InputError: The programs cannot be emitted, a name is used twice, the policy is invalid, an operator cannot
                be kept, or state cannot be shared.
            MemoryRequirementError: A method takes more memory than the lowering's options allow.
        """
        return emit(
            self,
            EmitOptions(config, constant_methods, external_weights, keep_originals, etrecord, share_state, provenance),
        )

    def module(
        self,
        *,
        delegates: Delegates | None = None,
        config: ExecutorchBackendConfig | None = None,
        external_weights: Policy | None = None,
        keep_originals: bool = False,
        share_state: ShareState = "auto",
    ) -> LoweredModule:
        """Make a module whose methods are called like the original ones, and run with their delegates on this machine.

        If a delegate is not available, there is one `BackendUnavailableWarning`, and methods that need it raise
        `BackendUnavailableError` when called. The module can still be saved, and loaded elsewhere.

        Args:
            delegates: As for `load`.
            config: ExecuTorch's options for emission.
            external_weights: As for `emit`.
            keep_originals: As for `emit`.
            share_state: As for `emit`.

        Returns:
            The module, with separate state, as at export. An EdgeProgramManager's constant methods are attributes.

        Raises:
            InputError: The programs cannot be emitted.
            BackendFailure: A delegate raised while compiling a payload.
            PluginLoadError: A delegate could not be made, or its id is provided twice.
        """
        from exir_lowering.lowered_module.emitting import of_lowered  # lowering itself does not need the runtime

        options = EmitOptions(config, None, external_weights, keep_originals, False, share_state)
        module = of_lowered(self, options, delegates, stacklevel=2)
        for name, value in self.constant_methods.items():
            setattr(module, name, value)
        return module

    def __str__(self) -> str:
        lines = [repr(self)]
        for method in self.report.methods:
            delegates = destinations(method, "no delegate")
            payload = sum(self.report.payload_bytes[partition.id] for partition in method.partitions)
            lines.append(
                f"  {method.name}: {method.delegated} of {len(method.nodes)} operators delegated ({delegates}, "
                f"{payload:,} B of payload), {len(method.host)} on the host"
            )
        states = self.report.states
        lines += [f"  state {state}" for state in states[:_SHOWN]]
        if len(states) > _SHOWN:
            lines.append(f"  and {len(states) - _SHOWN} more states")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"LoweredMethods({', '.join(self.programs)})"
