from . import asking as asking, registry as registry
from .backend import (
    NAMES as NAMES,
    PROVENANCE as PROVENANCE,
    Backend as Backend,
    BackendContext as BackendContext,
    CompileSpec as CompileSpec,
    DelegationSpec as DelegationSpec,
    ExecutorchBackend as ExecutorchBackend,
    ExplainedResult as ExplainedResult,
    Partitioner as Partitioner,
    PartitionerLike as PartitionerLike,
    PartitionResult as PartitionResult,
    PreprocessResult as PreprocessResult,
    conversion_lock as conversion_lock,
)
from .delegate import Delegate as Delegate, DelegateContext as DelegateContext
from .instructions import Instruction as Instruction, Instructions as Instructions
from .registry import (
    register_backend as register_backend,
    register_delegate as register_delegate,
    register_partitioner as register_partitioner,
)
from .rewrite import Doubt as Doubt, Rewrite as Rewrite, Scope as Scope, register_rewrite as register_rewrite
