"""Arm's reference model of TOSA as a delegate: what it computes is what TOSA means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from exir_lowering import Delegate


class TosaReferenceModel(Delegate):
    """Executes what ExecuTorch's `TOSABackend` makes."""

    delegate_id = "TOSABackend"

    def compile(self, processed: bytes, compile_specs: list[Any], context: Any) -> tuple[bytes, int]:
        """Return the payload, and how many inputs it has: the reference model dies of others."""
        from tosa.TosaGraph import TosaGraph

        return processed, TosaGraph.GetRootAs(processed).Regions(0).Blocks(0).InputsLength()

    def execute(self, handle: Any, inputs: list[Any]) -> Sequence[torch.Tensor]:
        import tosa_reference_model

        payload, count = handle
        if len(inputs) != count:
            raise ValueError(f"got {len(inputs)} inputs, expected {count}")
        results, status = tosa_reference_model.run(payload, [one.contiguous().numpy() for one in inputs])
        assert status == tosa_reference_model.GraphStatus.TOSA_VALID
        return [torch.from_numpy(result) for result in results]
