"""Lower a map of torch.export programs to one ExecuTorch `.pte` file."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exir_lowering.delegate import Delegate, DelegateContext
    from exir_lowering.emission import Artifact
    from exir_lowering.errors import (
        BackendContractError,
        BackendFailure,
        BackendUnavailableError,
        BackendUnavailableWarning,
        CoverageError,
        InputError,
        InvariantError,
        LoweringError,
        PartitionerContractError,
        PluginLoadError,
        UnknownPluginError,
    )
    from exir_lowering.interfaces import (
        Backend,
        BackendContext,
        CompileSpec,
        DelegationSpec,
        ExplainedResult,
        Partitioner,
        PartitionResult,
        PreprocessResult,
    )
    from exir_lowering.lowered import LoweredMethods
    from exir_lowering.lowered_module import LoweredModule
    from exir_lowering.lowering_plan import LoweringPlan
    from exir_lowering.model import Adjustment, Rejection
    from exir_lowering.options import LoweringOptions
    from exir_lowering.pipeline import lower, lower_whole_program, plan, to_backend
    from exir_lowering.registry import register_backend, register_delegate, register_partitioner
    from exir_lowering.runtime import LoadedProgram, load
    from exir_lowering.weights import WeightRef, WeightStore

__all__ = [
    "Adjustment",
    "Artifact",
    "Backend",
    "BackendContext",
    "BackendContractError",
    "BackendFailure",
    "BackendUnavailableError",
    "BackendUnavailableWarning",
    "CompileSpec",
    "CoverageError",
    "Delegate",
    "DelegateContext",
    "DelegationSpec",
    "ExplainedResult",
    "InputError",
    "InvariantError",
    "LoadedProgram",
    "LoweredMethods",
    "LoweredModule",
    "LoweringError",
    "LoweringOptions",
    "LoweringPlan",
    "PartitionResult",
    "Partitioner",
    "PartitionerContractError",
    "PluginLoadError",
    "PreprocessResult",
    "Rejection",
    "UnknownPluginError",
    "WeightRef",
    "WeightStore",
    "load",
    "lower",
    "lower_whole_program",
    "plan",
    "register_backend",
    "register_delegate",
    "register_partitioner",
    "to_backend",
]

_HOMES = {
    "delegate": ("Delegate", "DelegateContext"),
    "emission": ("Artifact",),
    "errors": (
        "BackendContractError",
        "BackendFailure",
        "BackendUnavailableError",
        "BackendUnavailableWarning",
        "CoverageError",
        "InputError",
        "InvariantError",
        "LoweringError",
        "PartitionerContractError",
        "PluginLoadError",
        "UnknownPluginError",
    ),
    "interfaces": (
        "Backend",
        "BackendContext",
        "CompileSpec",
        "DelegationSpec",
        "ExplainedResult",
        "Partitioner",
        "PartitionResult",
        "PreprocessResult",
    ),
    "lowered": ("LoweredMethods",),
    "lowered_module": ("LoweredModule",),
    "model": ("Adjustment", "Rejection"),
    "options": ("LoweringOptions",),
    "pipeline": (
        "lower",
        "lower_whole_program",
        "plan",
        "to_backend",
    ),
    "lowering_plan": ("LoweringPlan",),
    "registry": ("register_backend", "register_delegate", "register_partitioner"),
    "runtime": ("LoadedProgram", "load"),
    "weights": ("WeightRef", "WeightStore"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `exir-lower --help` must not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"exir_lowering.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    """List the public names too, those that are not imported yet included."""
    return sorted({*globals(), *__all__})
