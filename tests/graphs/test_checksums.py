"""Checksums of weights: what is written into a weight changes its checksum."""

import pytest
import torch

from exir_lowering.graphs.checksums import checksum


@pytest.mark.parametrize("size", [1, 7, 4096, 4099, 8192, 12300])
def test_each_bit_counts(size: int) -> None:
    memory = torch.zeros(size, dtype=torch.uint8)
    before = checksum(memory.untyped_storage())
    for position in {0, size // 2, size - 1}:
        for bit in (1, 128):
            memory[position] = bit
            assert checksum(memory.untyped_storage()) != before
            memory[position] = 0


@pytest.mark.parametrize("columns", [slice(0, 1), slice(1, 2), slice(1, None, 2), slice(None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_signs_count(dtype: torch.dtype, columns: slice) -> None:
    weight = torch.ones(64, 256, dtype=dtype)
    before = checksum(weight.untyped_storage())
    weight[:, columns].neg_()
    assert checksum(weight.untyped_storage()) != before


def test_exchanges_count() -> None:
    weight = torch.ones(64, 256, dtype=torch.float64)
    weight[3, 7] = -1.0
    before = checksum(weight.untyped_storage())
    weight[3, 7], weight[3, 9] = 1.0, -1.0
    assert checksum(weight.untyped_storage()) != before
