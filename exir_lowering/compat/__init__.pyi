from .executorch import (
    patch_executorch as patch_executorch,
    serve_delegates as serve_delegates,
    to_backend as to_backend,
)
