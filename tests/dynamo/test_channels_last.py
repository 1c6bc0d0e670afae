"""Images in channels last, whose pooling to one pixel restrides its result."""

import pytest
import torch
from compile_support import assert_near, clean, compiled, delegated
from torch import nn

__all__ = ["clean"]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("partitioner", ["reference", "xnnpack"])
def test_images_that_are_pooled_to_one_pixel(partitioner: str, dynamic: bool) -> None:
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    model = nn.Sequential(*layers).eval()
    function = compiled(model, partitioners=partitioner, dynamic=dynamic)
    with torch.no_grad():
        for size in (5, 7):
            x = torch.randn(size, 3, 6, size).to(memory_format=torch.channels_last)
            assert_near(function(x), model(x))
    assert delegated()


def test_what_is_pooled_is_returned() -> None:
    model = nn.AdaptiveAvgPool2d(1)
    function, x = (
        compiled(model, partitioners="reference"),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    )
    got, want = function(x), model(x)
    assert_near(got, want)
    assert got.stride() == want.stride()


def test_memory_that_is_read_otherwise_stays_with_pytorch() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).as_strided((4, 3), (1, 4)) + 1

    x = torch.randn(3, 4)
    with pytest.raises(Exception, match="depends on a tensor's memory layout"):
        compiled(function, partitioners="reference")(x)
    with pytest.warns(UserWarning, match="depends on a tensor's memory layout"):
        assert_near(compiled(function, partitioners="reference", fallback="eager")(x), function(x))
