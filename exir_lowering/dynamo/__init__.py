"""torch.compile with this project's partitioners, backends and delegates."""

from exir_lowering.dynamo.backend import backend
from exir_lowering.dynamo.options import CompileOptions
from exir_lowering.dynamo.reports import Fallback, FallbackWarning, GraphReport, reports

__all__ = ["CompileOptions", "Fallback", "FallbackWarning", "GraphReport", "backend", "reports"]
