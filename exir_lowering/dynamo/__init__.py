"""torch.compile with this project's partitioners, backends and delegates."""

from exir_lowering.dynamo.backend import FallbackWarning, backend
from exir_lowering.dynamo.options import CompileOptions
from exir_lowering.dynamo.reports import Fallback, GraphReport, reports

__all__ = ["CompileOptions", "Fallback", "FallbackWarning", "GraphReport", "backend", "reports"]
