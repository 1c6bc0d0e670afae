"""Cases that `check` was not made from: whole programs, and calls of operators after lowering."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import torch
from models import exported
from operator_database import samples
from release_probes import DTYPES, Case, operators

from exir_lowering import LoweringError, lower


def _case(program: Any, inputs: Any, expected: Any, partitioners: Any = None) -> Iterator[Case]:
    try:
        content = lower(program, partitioners).emit().buffer
    except LoweringError:
        return
    results = [one for one in torch.utils._pytree.tree_leaves(expected) if isinstance(one, torch.Tensor)]
    yield content, "forward", [one.clone() for one in inputs], [one.detach().clone() for one in results]


def operator_cases(share: float) -> Iterator[Case]:
    """Yield calls of a share of torch's operators, in every type, lowered as a program is."""
    chosen = random.Random(7)
    for op in operators():
        if chosen.random() > share or "sparse" in op.full_name:
            continue
        for dtype in (dtype for dtype in DTYPES if dtype in op.dtypes):
            with contextlib.suppress(Exception):  # torch has no samples, or does not export them
                for module in samples(op, dtype, 1):
                    with torch.no_grad():
                        expected = module(*(one.clone() for one in module.given))
                        program = torch.export.export(module, module.given, strict=False)
                    yield from _case(program, module.given, expected)


def model_cases(*names: str) -> Iterator[Case]:
    """Yield models on the host and in XNNPACK."""
    for name in names:
        model, inputs, program = exported(name)
        with torch.no_grad():
            expected = model(*inputs)
        for partitioners in (None, "xnnpack"):
            yield from _case(program, inputs, expected, partitioners)
