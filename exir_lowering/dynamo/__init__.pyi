from .compiler import backend as backend
from .debugging import (
    ExplainedGraph as ExplainedGraph,
    Explanation as Explanation,
    GraphBreak as GraphBreak,
    GraphPlan as GraphPlan,
    debug_backend as debug_backend,
    explain as explain,
)
from .logs import (
    Fallback as Fallback,
    FallbackWarning as FallbackWarning,
    GraphReport as GraphReport,
    reports as reports,
)
from .options import CompileOptions as CompileOptions
