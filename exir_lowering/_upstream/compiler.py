"""ExecuTorch's compiler, imported without torch's inductor, of which it rarely calls one function.

What a user may import first takes ExecuTorch's names from here, which sorts before modules that import ExecuTorch.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.fx import Graph

from exir_lowering._upstream import pins
from exir_lowering._upstream.locks import collector_paused
from exir_lowering._upstream.programs import CALL_DELEGATE
from exir_lowering._upstream.stderr import without_logs

_PASS = "torch.export._remove_auto_functionalized_pass"
_PACKAGE = "torch._inductor.fx_passes"
_FROM = f"{_PACKAGE}.post_grad"
_FUNCTION = "decompose_auto_functionalized"


def _decompose(graph: Graph) -> None:
    """Call the function, which changes calls of higher-order operators only."""
    if any(isinstance(node.target, HigherOrderOperator) and node.target is not CALL_DELEGATE for node in graph.nodes):
        getattr(import_module(_FROM), _FUNCTION)(graph)


def _import_pass() -> None:
    """Import the pass that has the function while another module stands in for the function's; 0.6 s of CPU less."""
    if _PASS in sys.modules or _FROM in sys.modules or not pins.is_on("lazy inductor import"):
        return
    import_module(_PACKAGE)
    instead = ModuleType(_FROM)

    def look_up(name: str) -> Any:
        """Serve another thread that imports the module just now; Python itself asks for __path__."""
        if name.startswith("__"):
            raise AttributeError(name)
        _remove(instead)
        return getattr(import_module(_FROM), name)

    instead.__dict__.update({_FUNCTION: _decompose, "__getattr__": look_up})
    sys.modules[_FROM] = instead
    try:
        import_module(_PASS)
    finally:
        _remove(instead)


def _remove(instead: ModuleType) -> None:
    if sys.modules.get(_FROM) is instead:
        del sys.modules[_FROM]


# torch's own copies of programs say it, in `copyreg`; what a user's code does is not meant.
warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning, "copyreg")
with collector_paused, without_logs():  # walking over all that is loaded meanwhile takes a third of the time
    _import_pass()
    from executorch.exir import (
        EdgeCompileConfig as EdgeCompileConfig,
        EdgeProgramManager as _EdgeProgramManager,
        ExecutorchBackendConfig as ExecutorchBackendConfig,
        ExecutorchProgramManager as ExecutorchProgramManager,
        tracer as tracer,
    )
    from executorch.exir.backend.backend_details import (
        BackendDetails as BackendDetails,
        PreprocessResult as PreprocessResult,
    )
    from executorch.exir.backend.compile_spec_schema import CompileSpec as CompileSpec
    from executorch.exir.backend.partitioner import (
        DelegationSpec as DelegationSpec,
        Partitioner as Partitioner,
        PartitionResult as PartitionResult,
    )

if TYPE_CHECKING:

    class EdgeProgramManager(Protocol):
        """The form of ExecuTorch's class, for type checkers, which do not see its types."""

        @property
        def methods(self) -> set[str]: ...

        def exported_program(self, method_name: str = "forward") -> ExportedProgram: ...

else:
    EdgeProgramManager = _EdgeProgramManager
