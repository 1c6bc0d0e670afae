"""A partitioner without its tags for other backends than one."""

from __future__ import annotations

from executorch.exir.backend.partitioner import DelegationSpec, Partitioner
from torch.fx import Node

from exir_lowering.dynamo.wrapped import LessPartitioner, named_after


def for_backend(partitioner: Partitioner, backend_id: str) -> Partitioner:
    """Return a partitioner that takes what another one takes for one backend."""
    made: Partitioner = named_after(_Sole, partitioner)(partitioner)
    made.backend_id = backend_id
    return made


class _Sole(LessPartitioner):
    backend_id: str

    def refuse(self, node: Node, destination: DelegationSpec | None) -> tuple[str, str] | None:
        if destination is None or destination.backend_id == self.backend_id:
            return None
        return "backend", f"it would go to the backend {destination.backend_id!r}, and {self.backend_id!r} is tried"
