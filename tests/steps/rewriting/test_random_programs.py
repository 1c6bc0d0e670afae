"""Random programs give the same results when they are rewritten: a few of those that `py` can make."""

from __future__ import annotations

import both_forms
import pytest
from both_ways import quiet
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from random_kinds import KINDS

from exir_lowering.errors import InputError

COUNTS = {"attention": 3, "state": 2, "ops": 2, "random": 2, "methods": 2}


@pytest.mark.parametrize("kind", COUNTS)
def test_rewritten_programs_give_the_same_results(kind: str) -> None:
    rewritten = 0
    for seed in range(COUNTS[kind]):
        try:
            with quiet():
                name, program, calls = KINDS[kind](seed)
        except Exception:  # torch cannot export it
            continue
        try:
            found = both_forms.compare(program, calls, thorough=seed == 0)
        except InputError:
            continue
        assert found.differences == [], f"--kind {kind} --seed {seed}: {name}"
        rewritten += bool(found.rewritten)
    assert rewritten


@pytest.mark.parametrize(("kind", "seeds"), [("attention", (1, 2, 5)), ("quantized", (70000,))])
def test_with_a_partitioner(kind: str, seeds: tuple[int, ...]) -> None:
    rewritten = 0
    for seed in seeds:
        _, program, calls = KINDS[kind](seed)
        try:
            found = both_forms.compare(program, calls, (XnnpackPartitioner(),))
        except InputError:  # ExecuTorch cannot convert it
            continue
        assert found.differences == []
        rewritten += bool(found.rewritten)
    assert rewritten


@pytest.mark.parametrize("seed", [1, 2])
def test_files(seed: int) -> None:
    _, program, calls = KINDS["state"](seed)
    assert both_forms.run_files(program, calls, [None, "xnnpack"][seed - 1]) == []
