"""Random programs through torch.compile, with random supports, forward and backward, equal eager for 20 shapes each."""

import pytest
from compiled_programs import compare

PROGRAMS = 200
PARTS = 4


@pytest.mark.parametrize(("part", "seed"), [(seed % PARTS, seed) for seed in range(PROGRAMS)])
def test_a_random_program_equals_eager(part: int, seed: int) -> None:
    outcome = compare(seed, most=6, nested=["cond"] if seed % 20 == 19 else ())
    assert set(outcome.backends) == {"exir_lowering"}
    assert not outcome.fallbacks
    assert outcome.partitions or not outcome.supported
