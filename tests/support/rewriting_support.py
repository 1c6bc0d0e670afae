"""Programs lowered with and without a rewrite, run in ExecuTorch's runtime, and compared with each other and eager."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import export

import exir_lowering
from exir_lowering import LoweringOptions
from exir_lowering.graphs import operator_name
from exir_lowering.plugins import Rewrite


def always(rewrite: type[Rewrite]) -> Rewrite:
    """Return a rewrite that does not ask the partitioners."""
    return type(rewrite.__name__, (rewrite,), {"when": "always"})()


@dataclass
class Versions:
    """A model as a file without rewrites, and as one with them.

    Attributes:
        before, after: The operators of the two, sorted.
    """

    model: torch.nn.Module
    plain: Any
    rewritten: Any
    before: list[str]
    after: list[str]

    def outputs(self, *inputs: Any) -> list[torch.Tensor]:
        """Return the first result of eager PyTorch, the plain file and the rewritten one."""
        found = [self.model(*inputs), *(program.run("forward", *inputs) for program in (self.plain, self.rewritten))]
        return [one if isinstance(one, torch.Tensor) else one[0] for one in found]

    def check(self, *inputs: Any, exact: bool = False, rtol: float = 1e-5, atol: float = 1e-6) -> None:
        """Compare the three, NaN being equal to NaN: the files bit for bit if `exact`."""
        eager, plain, rewritten = self.outputs(*inputs)
        assert eager.shape == rewritten.shape and eager.dtype is rewritten.dtype
        torch.testing.assert_close(rewritten, eager, rtol=rtol, atol=atol, equal_nan=True)
        if exact:
            assert bits(plain) == bits(rewritten)
        else:
            torch.testing.assert_close(rewritten, plain, rtol=rtol, atol=atol, equal_nan=True)


def bits(tensor: torch.Tensor) -> bytes:
    """Return the content of a tensor; all NaN are one."""
    tensor = tensor.detach().contiguous()
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return tensor.view(-1).numpy().tobytes() if tensor.numel() else b""


def versions(
    model: torch.nn.Module,
    inputs: tuple[Any, ...],
    rewrites: Sequence[Any],
    *,
    partitioners: Any = None,
    dynamic_shapes: Any = None,
) -> Versions:
    """Lower a model without and with rewrites; on the host alone unless partitioners are given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = export(model.eval(), inputs, dynamic_shapes=dynamic_shapes)
        lowered = [
            exir_lowering.lower(program, partitioners, options=LoweringOptions(rewrites=chosen))
            for chosen in ("none", list(rewrites))
        ]
        nodes = [[node for node in one["forward"].graph.nodes if node.op == "call_function"] for one in lowered]
        files = [exir_lowering.load(one.emit().buffer) for one in lowered]
    return Versions(model, *files, *(sorted(map(operator_name, each)) for each in nodes))
