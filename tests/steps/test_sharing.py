"""One weight, once: what a delegate and the host need in the same bytes is in the file once, for every reader."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary
from executorch.extension.pybindings import portable_lib
from executorch.runtime import Runtime
from lowering_support import SUMS_IN_HALF, TagPartitioner, by_operator
from torch import nn
from torch.export import ExportedProgram, export

from exir_lowering import Backend, InputError, LoweredModule, PreprocessResult, load, lower
from exir_lowering._upstream.delegates import named_data
from exir_lowering.pte import container
from exir_lowering.pte.container import segment_ranges
from exir_lowering.pte.flatbuffer import root
from exir_lowering.pte.slots import NamedData, Program

VOCABULARY, WIDTH = 1024, 64
TIED = VOCABULARY * WIDTH * 4
TOKENS = torch.arange(6).reshape(1, 6)


class Tied(nn.Module):
    """An embedding on the host whose weight is the output layer's, between other constants, and state."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("first", torch.rand(3))
        self.embed = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
        self.out.weight = self.embed.weight
        self.register_buffer("last", torch.rand(5))
        self.register_buffer("seen", torch.arange(5.0))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.add_(1)
        return self.out(torch.tanh(self.embed(tokens))), torch.sin(self.first)[:, None] + self.last * self.seen


def exported(dtype: torch.dtype = torch.float32) -> ExportedProgram:
    return export(Tied(dtype).eval(), (TOKENS,))


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return exported()


@pytest.fixture(scope="module")
def artifact(program: ExportedProgram) -> Any:
    """Two methods with one embedding."""
    return lower({"one": program, "two": program}, "xnnpack").emit()


def unshared(content: bytes) -> bytes:
    """Return a file in which every segment is its own, as ExecuTorch writes it again."""
    return bytes(serialize_pte_binary(deserialize_pte_binary(content), extract_delegate_segments=True))


def assert_equal(results: Any, expected: Any) -> None:
    for one, other in zip(results, expected, strict=True):
        assert torch.equal(one, other)


def places(content: bytes) -> dict[str, tuple[int, int]]:
    """Return where each named datum is in a file, relative to the segments, and how long it is."""
    tables = root(memoryview(content))
    ranges = list(segment_ranges(tables.tables(Program.SEGMENTS)))
    named = tables.tables(Program.NAMED_DATA)
    return {one.text(NamedData.KEY): ranges[one.number(NamedData.SEGMENT_INDEX, "I")] for one in named}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_tied_embedding_is_stored_once(dtype: torch.dtype, tmp_path: Path) -> None:
    model, artifact = Tied(dtype).eval(), lower(exported(dtype), "xnnpack").emit()
    content, apart, whole = artifact.buffer, unshared(artifact.buffer), TIED * dtype.itemsize // 4
    assert whole < len(content) < 1.01 * whole + 4000
    assert len(apart) > 2 * whole
    path = artifact.save(tmp_path / "tied.pte")
    stock = Runtime.get().load_program(path)
    opened = (
        portable_lib._load_for_executorch_from_buffer(content),
        portable_lib._load_for_executorch(str(path)),
        portable_lib._load_for_executorch_from_buffer(apart),
        stock.load_method("forward"),
    )
    for _ in range(3):
        runs = (one.forward if hasattr(one, "forward") else one.execute for one in opened)
        first, *others = (run((TOKENS,)) for run in runs)
        for other in others:
            assert_equal(other, first)
        with torch.no_grad():
            torch.testing.assert_close(first, list(model(TOKENS)), atol=3e-2 if SUMS_IN_HALF else 1e-2, rtol=1e-2)


def test_two_methods_share_it(artifact: Any, tmp_path: Path) -> None:
    path = artifact.save(tmp_path / "two.pte")
    assert path.stat().st_size < 1.01 * TIED + 8000
    programs = [load(one, verify="full") for one in (path, artifact.buffer)]
    plain = load(unshared(artifact.buffer), verify=False)
    for method in ("one", "two", "one"):
        expected = plain.run(method, TOKENS)
        for one in programs:
            assert_equal(one.run(method, TOKENS), expected)


class Storing(Backend):
    """Has its weights as named data, at an alignment of its own."""

    def __init__(self, name: str, alignment: int) -> None:
        self.backend_id, self.alignment = name, alignment

    def preprocess(self, program: ExportedProgram, compile_specs: Any) -> PreprocessResult:
        data = {f"{self.backend_id}/{name}": bytes(value.numpy()) for name, value in program.state_dict.items()}
        return PreprocessResult(self.backend_id.encode(), data_store_output=named_data(data, self.alignment))


def test_two_backends_share_it_at_the_alignment_that_each_asks_for() -> None:
    class Both(Tied):
        def forward(self, tokens: torch.Tensor) -> Any:
            weight, hidden = self.embed.weight, self.embed(tokens)
            return torch.atan2(weight, hidden.sum()), torch.fmod(weight, hidden.sum()), self.first + hidden.sum()

    takes = {"loose": "aten.atan2.default", "strict": "aten.fmod.Tensor"}
    artifact = lower(
        export(Both().eval().requires_grad_(False), (TOKENS,)),
        [TagPartitioner(by_operator(operator), name) for name, operator in takes.items()],
        backends={"loose": Storing("loose", 16), "strict": Storing("strict", 1024)},
    ).emit()
    content = artifact.buffer
    found = {key: place for key, place in places(content).items() if key.startswith(tuple(takes))}
    assert len(found) == 2 and len(content) < 1.01 * TIED + 8000
    ((start, size),) = set(found.values())
    assert start % 1024 == 0
    start += container.read_pte(memoryview(content)).base
    assert content[start : start + size] == bytes(Tied().embed.weight.detach().numpy())


def test_damage_in_what_is_shared_is_noticed(artifact: Any) -> None:
    content = bytearray(artifact.buffer)
    base = container.read_pte(memoryview(content)).base
    (place, size) = max(places(bytes(content)).values(), key=lambda place: place[1])
    assert size == TIED
    for at in random.Random(0).sample(range(base + place, base + place + size), 20):
        content[at] ^= 1
        with pytest.raises(InputError, match=r"segment 0, bytes .*digest differs"):
            load(bytes(content), verify="full")
        content[at] ^= 1
    load(bytes(content), verify="full")


def test_a_module_is_saved_to_such_a_file(program: ExportedProgram, tmp_path: Path) -> None:
    lower(program, "xnnpack").module().save(tmp_path / "module.pte")
    assert (tmp_path / "module.pte").stat().st_size < 1.01 * TIED + 12000
    module = LoweredModule.load(tmp_path / "module.pte", verify="full")
    with torch.no_grad():
        torch.testing.assert_close(module(TOKENS), Tied().eval()(TOKENS), atol=1e-4, rtol=1e-4)


def test_a_data_file_has_it_once(program: ExportedProgram, tmp_path: Path) -> None:
    artifact = lower(program, "xnnpack").emit(external_weights="weights")
    assert len(artifact.buffer) < 8000 and len(artifact.data_files["weights.ptd"]) < 1.01 * TIED + 8000
    path = artifact.save(tmp_path / "tied.pte")
    loaded = load(path, data=tmp_path / "weights.ptd", verify="full")
    plain = load(lower(program, "xnnpack").emit().buffer)
    assert_equal(loaded.run("forward", TOKENS), plain.run("forward", TOKENS))


def test_one_in_a_data_file_and_one_in_the_program_are_two(program: ExportedProgram) -> None:
    artifact = lower(program, "xnnpack").emit(external_weights=lambda key, size: "weights" if "." in key else None)
    assert len(artifact.buffer) > TIED and len(artifact.data_files["weights.ptd"]) > TIED
