from .compiler import backend as backend
from .debugging import debug_backend as debug_backend, explain as explain
from .explained import (
    ExplainedGraph as ExplainedGraph,
    Explanation as Explanation,
    GraphBreak as GraphBreak,
    GraphPlan as GraphPlan,
)
from .logs import (
    Fallback as Fallback,
    FallbackWarning as FallbackWarning,
    GraphReport as GraphReport,
    reports as reports,
)
from .options import CompileOptions as CompileOptions
