from .backend_details import as_backend_details as as_backend_details
from .executorch import (
    PatchedLowering as PatchedLowering,
    PatchedLowerings as PatchedLowerings,
    patch_executorch as patch_executorch,
    serve_delegates as serve_delegates,
    to_backend as to_backend,
)
from .exporters import register_exporter as register_exporter
