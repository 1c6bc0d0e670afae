"""Lower a map of torch.export programs to one ExecuTorch `.pte` file."""

from exir_lowering.emission import Artifact
from exir_lowering.errors import (
    BackendContractError,
    BackendFailure,
    BackendUnavailableError,
    InputError,
    InvariantError,
    LoweringError,
    PartitionerContractError,
    PluginLoadError,
    UnknownPluginError,
)
from exir_lowering.interfaces import (
    Backend,
    CompileSpec,
    DelegationSpec,
    Partitioner,
    PartitionResult,
    PreprocessResult,
)
from exir_lowering.lowered import LoweredMethods
from exir_lowering.model import Rejection
from exir_lowering.options import LoweringOptions
from exir_lowering.pipeline import lower, lower_whole_program, to_backend
from exir_lowering.runtime import LoadedProgram, load

__all__ = [
    "Artifact",
    "Backend",
    "BackendContractError",
    "BackendFailure",
    "BackendUnavailableError",
    "CompileSpec",
    "DelegationSpec",
    "InputError",
    "InvariantError",
    "LoadedProgram",
    "LoweredMethods",
    "LoweringError",
    "LoweringOptions",
    "PartitionResult",
    "Partitioner",
    "PartitionerContractError",
    "PluginLoadError",
    "PreprocessResult",
    "Rejection",
    "UnknownPluginError",
    "load",
    "lower",
    "lower_whole_program",
    "to_backend",
]
