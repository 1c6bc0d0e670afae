from .errors import (
    BackendContractError as BackendContractError,
    BackendFailure as BackendFailure,
    BackendUnavailableError as BackendUnavailableError,
    BackendUnavailableWarning as BackendUnavailableWarning,
    CoverageError as CoverageError,
    InputError as InputError,
    InvariantError as InvariantError,
    LimitError as LimitError,
    LoweringError as LoweringError,
    MemoryRequirementError as MemoryRequirementError,
    PartitionerContractError as PartitionerContractError,
    PluginLoadError as PluginLoadError,
    RewriteContractError as RewriteContractError,
    UnknownPluginError as UnknownPluginError,
)
from .graphs.weights import WeightRef as WeightRef, WeightStore as WeightStore
from .inspection import FileReport as FileReport, inspect as inspect
from .language_models import language_model as language_model
from .lowered import LoweredMethods as LoweredMethods
from .lowered_module import LoweredModule as LoweredModule
from .model import (
    Adjustment as Adjustment,
    NarrowedDimension as NarrowedDimension,
    RefusedPartition as RefusedPartition,
    RefusedRewrite as RefusedRewrite,
    Rejection as Rejection,
    Rewriting as Rewriting,
)
from .options import LoweringOptions as LoweringOptions
from .pipeline import lower as lower, lower_whole_program as lower_whole_program, plan as plan, to_backend as to_backend
from .plans.lowering_plan import LoweringPlan as LoweringPlan
from .plugins.backend import (
    Backend as Backend,
    BackendContext as BackendContext,
    CompileSpec as CompileSpec,
    DelegationSpec as DelegationSpec,
    ExplainedResult as ExplainedResult,
    Partitioner as Partitioner,
    PartitionResult as PartitionResult,
    PreprocessResult as PreprocessResult,
)
from .plugins.delegate import Delegate as Delegate, DelegateContext as DelegateContext
from .plugins.registry import (
    register_backend as register_backend,
    register_delegate as register_delegate,
    register_partitioner as register_partitioner,
)
from .plugins.rewrite import Doubt as Doubt, Rewrite as Rewrite, Scope as Scope, register_rewrite as register_rewrite
from .quantization import Quantized as Quantized, quantize as quantize
from .runtime import Choice as Choice, Limits as Limits, LoadedProgram as LoadedProgram, load as load
from .shape_buckets import Buckets as Buckets, buckets as buckets
from .steps.emit import Artifact as Artifact
from .verification import Culprit as Culprit, Verification as Verification, bisect as bisect, verify as verify
