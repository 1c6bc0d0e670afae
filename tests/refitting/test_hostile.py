"""Files that someone made to do harm: `refit` raises an InputError soon, and writes and runs nothing."""

from __future__ import annotations

import json
import pickle
import time
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

from exir_lowering import Artifact, InputError, LoweringOptions, lower, refit
from exir_lowering.cli import main
from exir_lowering.pte import assembling, container, digests, recipes, slots

VALUES = {"weight": torch.rand(8, 16) + 1, "bias": torch.rand(8)}


@cache
def artifact() -> Artifact:
    options = LoweringOptions(refit=True)
    return lower(export(nn.Linear(16, 8), (torch.ones(1, 16),)), "xnnpack", options=options).emit(provenance=False)


def with_recipes(content: bytes, data: dict[str, str] | None = None) -> bytes:
    """Return the file with other recipes, and digests that fit."""
    filled = assembling.fill(_split(memoryview(artifact().buffer)), recipes.KEY, content)
    return b"".join(assembling.seal(bytearray(filled[0]), filled[1:-1], data or {}, lambda one, made: made.write(one)))


def _split(file: memoryview) -> list[bytes]:
    base = container.read_pte(file).base
    program, _ = container.open_program(file)
    ranges = list(container.segment_ranges(program.tables(slots.Program.SEGMENTS)))
    ends = [start for start, _ in ranges[1:]] + [len(file) - base]
    pieces = [bytes(file[:base])]
    for (start, size), end in zip(ranges, ends, strict=True):
        pieces += [bytes(file[base + start : base + start + size]), bytes(file[base + start + size : base + end])]
    return [piece for piece in pieces if piece]


@cache
def written() -> str:
    _, content = container.open_program(memoryview(artifact().buffer))
    return str(content.named[recipes.KEY], "utf-8")


def calls(*given: Any) -> Callable[[Any], Any]:
    def change(tree: Any) -> None:
        for place in tree["places"]:
            place["recipes"] = [{"sources": [["weight", [16, 1]]], "calls": list(given)}]

    return change


def every(**fields: Any) -> Callable[[Any], Any]:
    return lambda tree: [place.update(fields) for place in tree["places"]]


def weights(**fields: Any) -> Callable[[Any], Any]:
    return lambda tree: [weight.update(fields) for weight in tree["weights"].values()]


VIEW = {"view": [0, "float32", [8, 16], [16, 1], 0]}
WIDE = {"view": [0, "float32", [1 << 40, 1 << 20], [0, 0], 0]}
HOSTILE: dict[str, Callable[[Any], Any]] = {
    "a huge view": calls(["aten.clone.default", [WIDE], {"dict": []}, 0]),
    "a huge result": calls(["aten.full_like.default", [VIEW, 1.0], {"dict": []}, 0], ["aten.add.Tensor", [
        {"view": [0, "float32", [128, 1], [1, 1], 0]}, {"view": [0, "float32", [1, 128], [1, 1], 0]}
    ], {"dict": []}, 0]),
    "padding": calls(["aten.constant_pad_nd.default", [VIEW, [1 << 30, 1 << 30]], {"dict": []}, 0]),
    "a cycle": calls(["aten.clone.default", [{"view": [1, "float32", [8, 16], [16, 1], 0]}], {"dict": []}, 0]),
    "a file": calls(["aten.from_file.default", ["/etc/passwd"], {"dict": []}, 0]),
    "a write": calls(["aten.copy_.default", [VIEW, VIEW], {"dict": []}, 0]),
    "a slow operator": calls(["aten.matmul.default", [VIEW, VIEW], {"dict": []}, 0]),
    "no operator": calls([3, [], {}, 0]),
    "many calls": calls(*[["aten.clone.default", [VIEW], {"dict": []}, 0]] * 50_000),
    "many places": lambda tree: tree.update(places=tree["places"] * 50_000),
    "many recipes": lambda tree: tree["places"][0].update(recipes=tree["places"][0]["recipes"] * 1_000_000),
    "deep": calls(["aten.clone.default", json.loads("[" * 400 + "]" * 400), {"dict": []}, 0]),
    "a number": every(number=1 << 60),
    "a kind": every(kind=["named"]),
    "a data file": every(kind="../../other.ptd"),
    "a size": every(size=-1),
    "a large size": every(size=1 << 60),
    "a prefix": every(prefix=7),
    "weights that are tied to no name": weights(tied=[1]),
    "a shape": weights(shape=[1 << 60]),
    "no shape": weights(shape=None),
    "strides": lambda tree: tree["places"][0]["recipes"][0].update(sources=[["weight", [1 << 40, 1]]]),
    "a name": lambda tree: tree["places"][0]["recipes"][0].update(sources=[["other", [16, 1]]]),
    "no places": lambda tree: tree.pop("places"),
    "version": lambda tree: tree.update(version=1),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_damaged_recipes(kind: str) -> None:
    tree = json.loads(written())
    HOSTILE[kind](tree)
    file = with_recipes(json.dumps(tree).encode())
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(InputError, match=r"^refit: the .pte content"):
            refit(file, VALUES)
        assert time.process_time() - start < 20  # tracing takes most of it
        assert tracemalloc.get_traced_memory()[1] < 500_000_000
    finally:
        tracemalloc.stop()


def test_recipes_that_make_different_content() -> None:
    tree = json.loads(written())
    for place in tree["places"]:
        if place["size"] == 8 * 16 * 4:
            place["recipes"].append({"sources": [["weight", [1, 8]]], "calls": []})
    with pytest.raises(InputError, match=r"'weight': what the file has of them was equal when the model was lowered"):
        refit(with_recipes(json.dumps(tree).encode()), VALUES)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff" * 10, b" " * 20_000_000, b"1" * 10_000])
def test_recipes_that_are_not_json(content: bytes) -> None:
    with pytest.raises(InputError, match=r"^refit: the .pte content.* cannot be refitted"):
        refit(with_recipes(content), VALUES)


def test_nothing_is_written_elsewhere() -> None:
    for name in ("../elsewhere.ptd", "/elsewhere.ptd", "..\\elsewhere.ptd"):
        file = with_recipes(written().encode(), {name: digests.XXH3.zeros})
        with pytest.raises(InputError, match=r"its data files have names with folders"):
            refit(file, VALUES)


class _Runs:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_weight_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact().save(tmp_path / "model.pte")
    bad, target = tmp_path / name, tmp_path / "ran"
    torch.save({"weight": _Runs(target)}, tmp_path / "runs")
    large = (1 << 40).to_bytes(8, "little") + b"{}"
    shape = json.dumps({"weight": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    header_only = len(shape).to_bytes(8, "little") + shape
    pickled = pickle.dumps(_Runs(target))
    for content in ((tmp_path / "runs").read_bytes(), pickled, b"", b"\0" * 100, large, header_only):
        bad.write_bytes(content)
        assert main(["refit", str(tmp_path / "model.pte"), str(bad), "-o", str(tmp_path / "out.pte")]) == 2
        assert "exir-lower refit: " in capsys.readouterr().err
    assert not target.exists()
    assert not (tmp_path / "out.pte").exists()
