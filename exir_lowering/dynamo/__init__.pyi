from .compiler import backend as backend
from .logs import (
    Fallback as Fallback,
    FallbackWarning as FallbackWarning,
    GraphReport as GraphReport,
    reports as reports,
)
from .options import CompileOptions as CompileOptions
