"""Damaged files: with the digests that were saved, an error or the same numbers; without, an error of this package.

Whatever hypothesis changes, cuts and mixes, the file is loaded and run in a forked child.
"""

from __future__ import annotations

import functools
import os
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged_models import Attention, Net, Operators, Steps
from executorch.exir import ExecutorchBackendConfig
from forked import outcome
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.export import export

from exir_lowering import LoweredModule, load, lower
from exir_lowering._upstream.runtime import executorch_runtime

EXAMPLES = int(os.environ.get("EXIR_LOWERING_EXAMPLES", "0"))
"""How many mutants there are of all kinds together, drawn at random; else 12 of each, always the same."""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork") or sys.platform != "linux", reason="children are forked")

X, INDEX, IMAGE = torch.linspace(-1, 1, 6).reshape(2, 3), torch.tensor([[0, 1, 5]]), torch.linspace(-1, 1, 192)
IMAGE, WORDS, ROWS = IMAGE.reshape(1, 3, 8, 8), torch.linspace(-1, 1, 64).reshape(2, 4, 8), torch.ones(2, 3)


@dataclass(frozen=True)
class Sample:
    """A program as it is saved: files by their suffixes, which of them are damaged, and what runs them."""

    files: Mapping[str, bytes]
    damaged: Sequence[str]
    run: Callable[[Path, Any], Any]


def _program(inputs: Sequence[Any], path: Path, verify: Any) -> Any:
    data = path.with_suffix(".ptd")
    program = load(path, data=data if data.exists() else None, verify=verify)
    return [program.run(name, *inputs) for name in program.method_names for _ in range(2)]


def _module(inputs: Sequence[Any], path: Path, verify: Any) -> Any:
    module = LoweredModule.load(path, verify=verify)
    return [module.method(name)(*inputs) for name in module.method_names]


def _debugged(inputs: Sequence[Any], path: Path, verify: Any) -> Any:
    program = load(path, verify=verify)
    assert str(program.profile("forward", *inputs))
    return program.run("forward", *inputs)


KINDS = {
    "kernels": (Operators, (X, INDEX), None, (".pte",), _program),
    "data": (Operators, (X, INDEX), None, (".pte", ".ptd"), _program),
    "net": (Net, (IMAGE,), "xnnpack", (".pte",), _program),
    "attention": (Attention, (WORDS,), "xnnpack", (".pte",), _program),
    "reference": (Steps, (ROWS,), "reference", (".pte",), _program),
    "module": (Steps, (ROWS,), None, (".pte",), _module),
    "debugged": (Operators, (X, INDEX), "reference", (".debug.json",), _debugged),
}


@functools.cache
def sample(kind: str) -> Sample:
    executorch_runtime()  # here, and not once more in each child
    make, inputs, partitioner, damaged, run = KINDS[kind]
    torch.manual_seed(0)
    lowered = lower(export(make().eval(), inputs), partitioner)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pte"
        if kind == "module":
            lowered.module().save(path)
        else:
            lowered.emit(ExecutorchBackendConfig(external_constants=kind == "data")).save(path)
        files = {"".join(file.suffixes): file.read_bytes() for file in path.parent.iterdir()}
    if kind != "debugged":
        files.pop(".debug.json", None)
    if ".ptd" in damaged:
        files = {".ptd" if suffix.endswith(".ptd") else suffix: content for suffix, content in files.items()}
    return Sample(files, damaged, functools.partial(run, inputs))


INTERESTING = [0, 1, 2, 4, 8, 127, 128, 255, 4096, 0x7FFF, 0xFFFF, 1 << 24, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
PLACES = st.floats(0, 1, exclude_max=True)
"""Where in the file, as a share: the tables are at its start, and so are most places, by `_damage`."""
EDITS = st.one_of(
    st.tuples(st.just("number"), PLACES, st.sampled_from(INTERESTING)),
    st.tuples(st.just("add"), PLACES, st.sampled_from([-8, -4, -2, -1, 1, 2, 4, 8, 16])),
    st.tuples(st.just("flip"), PLACES, st.integers(0, 7)),
    st.tuples(st.just("copy"), PLACES, PLACES),
    st.tuples(st.just("delete"), PLACES, st.sampled_from([2, 4, 16, 256])),
    st.tuples(st.just("insert"), PLACES, st.binary(min_size=1, max_size=32)),
    st.tuples(st.just("cut"), PLACES, st.none()),
)


def _damage(content: bytes, edits: Sequence[tuple[str, float, Any]], tables: bool) -> bytes:
    """Change a file; with `tables`, only where these are: its first bytes, and those of a payload of XNNPACK."""
    starts = [0, *(at - 4 for at in range(4, len(content), 4) if content[at : at + 4] == b"XH00")]
    damaged = bytearray(content)
    for how, place, what in edits:
        start = starts[int(place * 997) % len(starts)] if tables else 0
        size = min(6000, len(damaged) - start) if tables else len(damaged)
        at = (start + int(place * max(size, 1))) // 4 * 4
        if at + 4 > len(damaged):
            continue
        (old,) = struct.unpack_from("<I", damaged, at)
        if how in ("number", "add"):
            struct.pack_into("<I", damaged, at, what if how == "number" else (old + what) % 2**32)
        elif how == "flip":
            damaged[at + what % 4] ^= 1 << what
        elif how == "copy":
            source = (start + int(what * max(size, 1))) // 4 * 4
            part = damaged[source : source + 4]
            damaged[at : at + len(part)] = part
        elif how == "delete":
            del damaged[at : at + what]
        elif how == "insert":
            damaged[at:at] = what
        else:
            del damaged[at:]
    return bytes(damaged)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.allclose(first, second, rtol=1e-4, atol=1e-5, equal_nan=True)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)


def _run(of: Sample, files: Mapping[str, bytes], verify: Any) -> Any:
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        for suffix, content in files.items():
            (Path(folder) / f"model{suffix}").write_bytes(content)
        return of.run(Path(folder) / "model.pte", verify)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_an_error_or_harmless(kind: str) -> None:
    of = sample(kind)
    expected = _run(of, of.files, "full")

    @settings(
        max_examples=max(EXAMPLES // len(KINDS), 12), derandomize=not EXAMPLES, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.sampled_from(of.damaged), st.lists(EDITS, min_size=1, max_size=4), st.booleans())
    def damaged(suffix: str, edits: list[Any], tables: bool) -> None:
        files = {**of.files, suffix: _damage(of.files[suffix], edits, tables)}
        # With digests: nothing else is run than what was saved, and nothing ends the process.
        checked = outcome(lambda: _same(_run(of, files, "full"), expected))
        assert checked.startswith("refused: ") or checked == "done: True", checked
        assert len(checked) > 40 or checked == "done: True", checked
        # Without: kernels may end the process, but nothing raises what is not of this package.
        assert not outcome(lambda: _run(of, files, False)).startswith("foreign: ") or _memory(of, files)

    damaged()


def _memory(of: Sample, files: Mapping[str, bytes]) -> bool:
    return outcome(lambda: _run(of, files, False)).startswith("foreign: MemoryError")
