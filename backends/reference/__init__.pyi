from .backend import ReferenceBackend as ReferenceBackend
from .delegate import ReferenceDelegate as ReferenceDelegate
from .support import executable as executable, reference_partitioner as reference_partitioner
