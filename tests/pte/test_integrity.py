"""Digests in files: damage and mixed generations are refused, and files of ExecuTorch load as they are."""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import ExecutorchBackendConfig, to_edge
from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary
from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer
from executorch.runtime import Runtime
from forked import outcome
from lowering_support import TagPartitioner, by_operator
from torch import nn
from torch.export import ExportedProgram, export

from exir_lowering import InputError, LoweredModule, cli, load, lower
from exir_lowering.pte import digests

LEVELS = (True, False, "full")


class Net(nn.Module):
    """Weights of delegates and of the host, a literal, and state that does not start at 0."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("scale", torch.rand(16) + 1)
        self.register_buffer("seen", torch.rand(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return torch.sin(self.second(torch.softmax(self.first(x), -1))) * self.scale + self.seen * 3


X = torch.linspace(-1, 1, 32).reshape(2, 16)


def exported(seed: int) -> ExportedProgram:
    with torch.no_grad():
        return export(Net(seed).eval(), (X,))


def emitted(seed: int, external: Any = None, partitioners: Any = None) -> Any:
    return lower(exported(seed), partitioners).emit(external_weights=external)


def by_size(key: str, size: int) -> str | None:
    """Put large weights into one file, small ones into another, and the smallest into the program."""
    return "large" if size > 512 else "small" if "scale" in key or "." in key else None


PARTITIONERS = (TagPartitioner(by_operator("aten.sin.default"), "reference", state=False), "xnnpack")


@pytest.fixture(scope="module")
def inside() -> Any:
    """A program with all data inside."""
    return emitted(0, partitioners=PARTITIONERS)


@pytest.fixture(scope="module")
def outside() -> Any:
    """A program with two data files."""
    return emitted(0, by_size, "xnnpack")


@pytest.fixture(scope="module")
def host() -> Any:
    """Two trainings of one model, whose weights are the host's, in a data file."""
    return emitted(0, "weights"), emitted(1, "weights")


def value(*args: Any, **options: Any) -> torch.Tensor:
    (result,) = load(*args, **options).run("forward", X)[-1:]
    return result


def expected(seed: int) -> torch.Tensor:
    with torch.no_grad():
        return Net(seed).eval()(X)


def check(*args: Any, seed: int = 0, **options: Any) -> None:
    torch.testing.assert_close(value(*args, **options), expected(seed), atol=1e-5, rtol=1e-5)


def ending_child() -> int:
    """Fork a child that ends as programs do, but for threads of the parent's."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            atexit._run_exitfuncs()
            code = 0
        finally:
            os._exit(code)
    return child


def outcomes(content: bytes, count: int, opened: Callable[[bytes], torch.Tensor]) -> dict[str, list[int]]:
    """Return what came of changing single bytes, with their places."""
    generator, right = random.Random(len(content)), opened(content)

    def work() -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for _ in range(count):
            place = generator.randrange(len(content))
            mutant = bytearray(content)
            mutant[place] ^= generator.randrange(1, 256)
            try:
                came = "same" if torch.equal(opened(bytes(mutant)), right) else "other numbers"
            except InputError:
                came = "refused"
            found.setdefault(came, []).append(place)
        return found

    done = outcome(lambda: json.dumps(work()))
    assert done.startswith("done: "), done
    found: dict[str, list[int]] = json.loads(done.removeprefix("done: "))
    return found


class TestDamage:
    def test_any_byte_of_a_program(self, inside: Any) -> None:
        found = outcomes(inside.buffer, 400, lambda mutant: value(mutant, verify="full"))
        assert list(found) == ["refused"], found

    @pytest.mark.parametrize("name", ["large.ptd", "small.ptd"])
    def test_any_byte_of_a_data_file(self, outside: Any, name: str) -> None:
        files = outside.data_files

        def opened(mutant: bytes) -> torch.Tensor:
            return value(outside.buffer, data=[*{**files, name: mutant}.values()], verify="full")

        found = outcomes(files[name], 300, opened)
        assert list(found) == ["refused"], found

    def test_it_is_found_by_default_in_files_that_are_not_large(self, inside: Any) -> None:
        found = outcomes(inside.buffer, 100, lambda mutant: value(mutant))
        assert list(found) == ["refused"], found

    def test_weights_of_large_files_are_read_on_request(
        self, outside: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """What is not read by default is told apart by the documented size."""
        monkeypatch.setattr(digests, "LIMIT", 1000)
        files = outside.data_files
        damaged = bytearray(files["large.ptd"])
        damaged[903] ^= 64  # the exponent of a weight
        data = [bytes(damaged), files["small.ptd"]]
        assert not torch.allclose(value(outside.buffer, data=data), expected(0))
        with pytest.raises(InputError, match=r"segment \d, bytes .*digest differs"):
            load(outside.buffer, data=data, verify="full")
        damaged[60] ^= 1  # in the tables
        with pytest.raises(InputError, match=r"cannot be loaded"):
            load(outside.buffer, data=[bytes(damaged), files["small.ptd"]])

    def test_a_file_that_is_cut_or_longer(self, inside: Any) -> None:
        content = inside.buffer
        for size in range(0, len(content), 97):
            with pytest.raises(InputError):
                load(content[:size], verify="full")
        check(content + b"\0" * 100, verify="full")

    def test_what_was_changed_on_purpose(self, inside: Any) -> None:
        """A file that ExecuTorch's own tools have read and written again."""
        again = deserialize_pte_binary(inside.buffer)
        (plan,) = again.program.execution_plan
        plan.name = "renamed"
        changed = bytes(serialize_pte_binary(again, extract_delegate_segments=True))
        with pytest.raises(InputError, match=r"changed after it was emitted.*verify=False"):
            load(changed)
        result = load(changed, verify=False).run("renamed", X)[-1]
        torch.testing.assert_close(result, expected(0), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("level", ["tie", 1, None, "", []])
    def test_what_is_no_level(self, inside: Any, level: Any) -> None:
        with pytest.raises(InputError, match=r"verify: got .*expected True, False or \"full\""):
            load(inside.buffer, verify=level)


class TestTie:
    @pytest.mark.parametrize("verify", LEVELS)
    def test_a_data_file_of_another_training(self, host: Any, verify: Any, tmp_path: Path) -> None:
        one, other = host
        pte = one.save(tmp_path / "one.pte")
        other.save(tmp_path / "other.pte")  # to the same data file
        with pytest.raises(InputError, match=r"belongs to another program, or to this one before it was emitted again"):
            load(pte, data=tmp_path / "weights.ptd", verify=verify)
        check(tmp_path / "other.pte", data=tmp_path / "weights.ptd", verify=verify, seed=1)

    def test_a_data_file_of_executorch_beside_a_program_of_ours(self, host: Any) -> None:
        content = host[0].data_files["weights.ptd"]
        payload = FlatTensorSerializer().deserialize(content)
        for key in [key for key in payload.named_data if key.startswith(digests.DATA_KEY)]:
            del payload.named_data[key]
        with pytest.raises(InputError, match="It has no digest"):
            load(host[0].buffer, data=bytes(FlatTensorSerializer().serialize(payload)), verify=False)

    def test_the_command_line(self, host: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        host[0].save(tmp_path / "one.pte")
        host[1].save(tmp_path / "other.pte")
        command = ["run", "--data", str(tmp_path / "weights.ptd"), "--check-digests", "tie"]
        assert cli.main([*command, str(tmp_path / "one.pte")]) == 2
        assert "belongs to another program" in capfd.readouterr().err
        assert cli.main([*command, str(tmp_path / "other.pte")]) == 0

    def test_a_data_file_is_known_by_its_content(self, host: Any) -> None:
        """The same weights, emitted again by themselves, are the same file."""
        again = emitted(0, "weights")
        assert again.data_files == host[0].data_files and again.buffer == host[0].buffer
        check(host[0].buffer, data=again.data_files["weights.ptd"], verify="full")

    def test_a_data_file_that_is_replaced_while_it_is_in_use(self, host: Any, tmp_path: Path) -> None:
        pte = host[0].save(tmp_path / "one.pte")
        program = load(pte, data=tmp_path / "weights.ptd")
        program.profile("forward", X)
        host[1].save(tmp_path / "other.pte")
        with pytest.raises(InputError, match=r"weights.ptd' was replaced or changed while it was in use"):
            program.profile("forward", X)


class TestLoweredModule:
    def test_saved_again_with_attributes(self, tmp_path: Path) -> None:
        module = lower(exported(0), "xnnpack").module(external_weights="weights")
        module.version = 1
        path = module.save(tmp_path / "one.pte")
        loaded = LoweredModule.load(path, data=tmp_path / "weights.ptd", verify="full")
        loaded.version, loaded.table = 2, torch.arange(5)
        again = loaded.save(tmp_path / "two.pte")
        last = LoweredModule.load(again, data=tmp_path / "weights.ptd", verify="full")
        assert last.version == 2 and torch.equal(last.table, torch.arange(5))
        found = outcomes(
            again.read_bytes(), 100, lambda mutant: value(mutant, data=tmp_path / "weights.ptd", verify="full")
        )
        assert list(found) == ["refused"], found

    def test_several_data_files(self, tmp_path: Path) -> None:
        path = lower(exported(0), "xnnpack").module(external_weights=by_size).save(tmp_path / "one.pte")
        data = [tmp_path / "large.ptd", tmp_path / "small.ptd"]
        other = tmp_path / "other"
        other.mkdir()
        saved = LoweredModule.load(path, data=data).save(other / "two.pte")
        assert {file.name for file in other.iterdir()} == {"two.pte", "two.debug.json", "large.ptd", "small.ptd"}
        module = LoweredModule.load(saved, data=[other / one.name for one in data], verify="full")
        torch.testing.assert_close(module(X), expected(0), atol=1e-5, rtol=1e-5)
        with pytest.raises(InputError, match="the same name in different directories"):
            LoweredModule.load(path, data=[data[0], other / "large.ptd"])
        with pytest.raises(InputError, match=r"expected the path of a \.ptd file"):
            LoweredModule.load(path, data=data[0].read_bytes())


class TestExecuTorch:
    """What ExecuTorch does with our files, and we with its."""

    def test_its_runtime_runs_our_files(self, inside: Any, host: Any, tmp_path: Path) -> None:
        runtime = Runtime.get()
        assert runtime.load_program(inside.save(tmp_path / "inside.pte")).method_names == {"forward"}
        program = runtime.load_program(host[0].save(tmp_path / "host.pte"), data_path=tmp_path / "weights.ptd")
        (result,) = program.load_method("forward").execute([X])
        torch.testing.assert_close(result, expected(0))
        (result,) = runtime.load_program(emitted(1, partitioners="xnnpack").buffer).load_method("forward").execute([X])
        torch.testing.assert_close(result, expected(1), atol=1e-5, rtol=1e-5)

    def test_its_deserializers_read_our_files(self, outside: Any) -> None:
        program = deserialize_pte_binary(outside.buffer)
        assert list(program.named_data.pte_data)[-1] == digests.KEY
        for content in outside.data_files.values():
            keys = list(FlatTensorSerializer().deserialize(content).named_data)
            assert [key for key in keys if key.startswith(digests.DATA_KEY)] == keys[-1:]

    @pytest.mark.parametrize("verify", LEVELS)
    def test_its_files_load_as_before(self, verify: Any) -> None:
        manager = to_edge(exported(0)).to_executorch(ExecutorchBackendConfig(external_constants=True))
        (content,) = manager._tensor_data.values()
        value(manager.buffer, data=bytes(content), verify=verify)
        assert digests.KEY.encode() not in manager.buffer

    @pytest.mark.parametrize(
        "config",
        [
            ExecutorchBackendConfig(extract_delegate_segments=False),
            ExecutorchBackendConfig(segment_alignment=4096, constant_tensor_alignment=64, delegate_alignment=64),
        ],
        ids=["inline", "aligned"],
    )
    def test_its_ways_to_lay_out_a_file(self, config: Any) -> None:
        content = lower(exported(0), "xnnpack").emit(config).buffer
        check(content, verify="full")
        found = outcomes(content, 60, lambda mutant: value(mutant, verify="full"))
        assert list(found) == ["refused"], found


class TestSeveralDataFiles:
    """`data` as paths, content, and lists of these."""

    @pytest.mark.parametrize("partitioners", [None, "xnnpack"])
    def test_in_any_form(self, partitioners: Any, tmp_path: Path) -> None:
        artifact = emitted(0, by_size, partitioners)
        pte, files = artifact.save(tmp_path / "net.pte"), artifact.data_files
        assert sorted(files) == ["large.ptd", "small.ptd"]
        large, small = (tmp_path / name for name in sorted(files))
        for data in ([large, small], (str(small), large), [*files.values()], [large, bytearray(small.read_bytes())]):
            check(pte, data=data, verify="full")
        check(pte.read_bytes(), data=[small, large, small])
        (one,) = emitted(1, "all", partitioners).data_files.values()
        check(emitted(1, "all", partitioners).buffer, data=one, seed=1)

    def test_temporary_files_go_with_the_program(self, outside: Any, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        program = load(outside.buffer, data=[*outside.data_files.values()])
        torch.testing.assert_close(program.run("forward", X)[-1], expected(0), atol=1e-5, rtol=1e-5)
        assert len(list(tmp_path.iterdir())) == 1
        assert os.waitstatus_to_exitcode(os.waitpid(ending_child(), 0)[1]) == 0
        assert program.profile("forward", X).runs == 1
        del program
        gc.collect()
        assert not list(tmp_path.iterdir())

    def test_what_is_missing_names_what_was_given(self, outside: Any, tmp_path: Path) -> None:
        pte = outside.save(tmp_path / "net.pte")
        large, small = (repr(str(tmp_path / name)) for name in ("large.ptd", "small.ptd"))
        with pytest.raises(InputError, match=rf"\d of its \d weights are not in {large}"):
            load(pte, data=[tmp_path / "large.ptd"])
        (other,) = lower(export(nn.Linear(2, 2), (torch.rand(2),))).emit(external_weights="other").data_files.values()
        with pytest.raises(InputError, match=rf"not in {small} and the .ptd content of {len(other)} bytes"):
            load(pte, data=[tmp_path / "small.ptd", other])
        with pytest.raises(InputError, match=r"Beside it are: large\.ptd, small\.ptd"):
            load(pte, data=[])

    def test_data_of_one_name_with_other_content(self, host: Any) -> None:
        files = [artifact.data_files["weights.ptd"] for artifact in host]
        with pytest.raises(InputError, match=r"both have 'first\.weight', with different content"):
            load(host[0].buffer, data=files)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (3, "got a int, expected the path or content of a .ptd file, or a list of these"),
            ([b"", 3], "content of 0 bytes cannot be loaded: it is empty"),
            ([3], r"data\[0\]: got a int, expected the path or content of a .ptd file"),
            ("none.ptd", "no such file"),
        ],
    )
    def test_what_is_no_data_file(self, host: Any, data: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            load(host[0].buffer, data=data)
