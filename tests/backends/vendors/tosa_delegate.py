"""Arm's reference model of TOSA as a delegate: what it computes is what TOSA means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from exir_lowering import Delegate


class TosaReferenceModel(Delegate):
    """Executes what ExecuTorch's `TOSABackend` makes."""

    delegate_id = "TOSABackend"

    def execute(self, handle: Any, inputs: list[Any]) -> Sequence[torch.Tensor]:
        import tosa_reference_model

        # From PyTorch's numbers, which are contiguous, to those of a graph; and the same way back.
        results, status = tosa_reference_model.run(handle, [one.contiguous().numpy() for one in inputs])
        assert status == tosa_reference_model.GraphStatus.TOSA_VALID
        return [torch.from_numpy(result) for result in results]
