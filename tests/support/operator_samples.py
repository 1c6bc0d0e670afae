"""The samples that torch tests its operators with: `OpInfo.sample_inputs` without its look for a test that is running.

For each operator it lists the modules of the process for each frame of the stack, several times: a tenth of a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_utils import set_rng_seed


def sample_inputs(info: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Yield the samples of an operator; each is drawn from the seed that torch sets."""
    made = iter(info.sample_inputs_func(info, "cpu", dtype, False))
    with contextlib.suppress(StopIteration):
        while True:
            set_rng_seed()
            sample = next(made)
            yield sample
