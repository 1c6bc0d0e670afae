"""Random programs with state do in each call what they do in eager PyTorch: a few of those that `hunt.py` makes."""

from __future__ import annotations

import os

import pytest
from random_state_runs import outcomes

EXAMPLES = int(os.environ.get("EXIR_LOWERING_EXAMPLES", 0))
COUNTS = {"state": 16, "methods": 8, "compiled": 8, "many": 12}
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", COUNTS)
def test_no_number_is_wrong(kind: str, part: int) -> None:
    refused, seeds = [], range(part, max(COUNTS[kind], EXAMPLES), PARTS)
    for seed in seeds:
        found = outcomes(seed, kind, count=1)
        bad = [one for one in found if one[0] in ("WRONG", "BROKEN")]
        assert not bad, f"--kind {kind} --count 1 --seed {seed}"
        refused += [f"seed {seed}: {about}" for verdict, about, _ in found if verdict == "refused"]
    assert len(refused) <= 1 + 0.02 * len(seeds), refused
