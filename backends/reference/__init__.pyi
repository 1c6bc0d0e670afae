from .backend import (
    ReferenceBackend as ReferenceBackend,
    executable as executable,
    reference_partitioner as reference_partitioner,
)
from .delegate import ReferenceDelegate as ReferenceDelegate
