"""Programs that once went wrong, each as small as it gets."""

import torch
from lowering_support import TagPartitioner, by_operator, delegates, edge_program, placeholders
from torch import nn

from exir_lowering import lower


class CopyNames(nn.Module):
    """The relu stays on the host, so `w` is copied for the adds, and ExecuTorch calls that copy `p_w_copy_0`."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))
        self.w_copy_0 = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * self.w) + self.w + self.w_copy_0


def test_a_parameter_may_have_the_name_of_another_ones_copy() -> None:
    module, x = CopyNames(), torch.randn(3)
    lowered = lower(edge_program(module, (x,)), TagPartitioner(by_operator("aten.add.Tensor")))["forward"]
    (delegate,) = delegates(lowered)
    signature = delegate.original_module.graph_signature
    assert signature.inputs_to_parameters == {"p_w_copy_0": "w", "p_w_copy_1": "w_copy_0"}
    assert placeholders(delegate.original_module.graph_module)[:2] == ["p_w_copy_0", "p_w_copy_1"]
    torch.testing.assert_close(lowered.module()(x), module(x))
