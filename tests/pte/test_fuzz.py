"""Damaged files: with the digests that were saved, an error or the same numbers; with forged ones, limits hold."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest
from fuzz_samples import KINDS, kind
from fuzzing import Kind, Sample, fuzz, mutant, resealed

from exir_lowering import InputError, Limits, LoweringError, load
from exir_lowering.pte.container import read_ptd, read_pte

EXAMPLES = int(os.environ.get("EXIR_LOWERING_EXAMPLES", "175"))
"""How many mutants there are of all kinds together; each is loaded and run. See hunt.py for more."""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork") or sys.platform != "linux", reason="children are forked")


@pytest.fixture(scope="module", params=KINDS)
def files(request: pytest.FixtureRequest) -> Kind:
    return kind(request.param)


def test_a_changed_file_gets_digests_that_fit() -> None:
    """So that what is damaged below passes them: a program with weights in it, and one with a data file."""
    for name in ("kernels", "external"):
        sample = kind(name).samples[0]
        for suffix in sample.files:
            files = {**sample.files, suffix: _changed(sample.files[suffix])}
            data = files.get(".ptd")
            with pytest.raises(InputError, match="digest"):
                load(files[".pte"], data=data, verify="full")
            again = resealed(files)
            load(again[".pte"], data=again.get(".ptd"), verify="full")


def _changed(content: bytes) -> bytes:
    """Change a weight in the first segment."""
    held = memoryview(content)
    base = (read_pte if content[4:8] == b"ET12" else read_ptd)(held).base
    return content[:base] + bytes([content[base] ^ 1]) + content[base + 1 :]


def test_damage_that_digests_do_not_reveal(files: Kind, tmp_path: Path) -> None:
    """As one who forges a file: its digests were computed anew, and are checked."""
    seeds = range(1000, 1000 + max(EXAMPLES // len(KINDS) // 4, 1))
    report = fuzz(files, seeds, verify="full", reseal=True)
    print(f"{files.name}: {dict(report.counts)}")
    assert not report.failures, "\n".join(report.failures)
    assert sum(report.counts.values()) == len(seeds)
    for seed in report.ended[:2]:
        sample, damaged = mutant(files, seed)
        run_with_limits(sample, resealed(damaged), tmp_path)


def test_damage_never_ends_the_process(files: Kind) -> None:
    seeds = range(max(EXAMPLES // len(KINDS), 1))
    report = fuzz(files, seeds, verify="full")
    print(f"{files.name}: {dict(report.counts)}")
    assert not report.failures and not report.ended, "\n".join([*report.failures, *map(str, report.ended)])
    assert not report.wrong, "other numbers, though digests were checked"
    assert sum(report.counts.values()) == len(seeds)


def run_with_limits(sample: Sample, files: dict[str, bytes], folder: Path) -> None:
    """What ends a process is an error, or gives a result, in a process of its own."""
    for suffix, content in files.items():
        (folder / "model.x").with_suffix(suffix).write_bytes(content)
    data = folder / "model.ptd" if ".ptd" in files else None
    with contextlib.suppress(LoweringError, MemoryError):
        program = load(folder / "model.pte", data=data, unavailable=sample.unavailable, limits=Limits(seconds=20))
        for name in program.method_names:
            program.run(name, *sample.inputs.get(name, ()))
