"""`inspect` on files of this package and of ExecuTorch alone: what it says is what the files have."""

from __future__ import annotations

import itertools
import json
import struct
import time
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from pte_files import FILES, OURS, made
from torch.export import export
from wide_models import Experts, build

from exir_lowering import FileReport, InputError, inspect, load, lower, plan
from exir_lowering.cli import main
from exir_lowering.inspection import memory
from exir_lowering.inspection.report import PlannedTensor
from exir_lowering.pte import container, digests


@cache
def reported(name: str) -> FileReport:
    return inspect(made(name).pte, data=made(name).given)


def everything() -> list[tuple[FileReport, bytes]]:
    found = [(reported(name), made(name).pte) for name in FILES]
    for name in FILES:
        found += [
            (report, content) for report, content in zip(reported(name).data, made(name).data.values(), strict=True)
        ]
    return found


def test_every_byte_is_accounted_for_once() -> None:
    for report, content in everything():
        assert [part.start for part in report.ranges] == [
            0,
            *itertools.accumulate(part.size for part in report.ranges),
        ][:-1]
        assert sum(part.size for part in report.ranges) == report.size == len(content)
        assert all(part.size for part in report.ranges)
        zeros = (content[part.start : part.start + part.size] for part in report.ranges if part.kind == "padding")
        assert not any(map(any, zeros)) and not any(part.kind == "rest" for part in report.ranges)


def test_what_is_stored_is_where_it_says() -> None:
    for name in FILES:
        file, report = made(name).pte, reported(name)
        _, data = container.open_program(memoryview(file))
        for one in report.stored:
            if one.kind == "named data" and one.start is not None:
                assert file[one.start : one.start + one.bytes] == data.named[one.key]
        assert report.sealed == (digests.KEY in data.named) == (name in OURS)
        payloads = [one for one in report.stored if one.kind == "payload"]
        delegates = [each.payload_bytes for method in report.methods for each in method.delegates]
        assert sorted(one.bytes for one in payloads for _ in one.users) == sorted(delegates)


@pytest.mark.parametrize("name", ["delegates", "theirs delegates", "data file"])
def test_payloads_are_decoded_and_shared_weights_have_their_users(name: str) -> None:
    report = reported(name)
    net = next(method for method in report.methods if method.name == "net")
    operators = [operator for delegate in net.delegates for operator in delegate.operators]
    (convolution,) = (operator for operator in operators if operator.name == "Conv2d")
    assert convolution.inputs == ("fp32[6, 8, 8, 3]", "constant fp32[4, 3, 3, 3]", "constant fp32[4]")
    assert convolution.outputs == ("fp32[6, 6, 6, 4]",)
    shared = {one.bytes: one.users for one in report.stored if len(one.users) > 1}
    assert shared == dict.fromkeys((144, 24), ("head/0", f"net/{len(net.delegates) - 1}"))
    assert all((one.start is None) == (name == "data file") for one in report.stored if one.kind == "named data")


def test_tensors_that_live_at_the_same_time_have_memory_of_their_own() -> None:
    for name in FILES:
        for method in reported(name).methods:
            tensors = method.memory.tensors
            for one, two in itertools.combinations(tensors, 2):
                at_once = one.first <= two.last and two.first <= one.last
                overlap = max(one.offset, two.offset) < min(one.offset + one.bytes, two.offset + two.bytes)
                if at_once and one.arena == two.arena and overlap:
                    assert one.offset == two.offset  # a view
            for arena in method.memory.arenas:
                assert 0 < arena.peak <= arena.bytes and arena.tensors
            assert method.memory.bytes == sum(arena.bytes for arena in method.memory.arenas)


class ViewOfAnInput(torch.nn.Module):
    def forward(self, x):
        made = x.sum((1, 2)).exp().sqrt()
        return made, x.view(8, 64).abs()


@pytest.mark.parametrize("case", [build(Experts), (ViewOfAnInput(), (torch.ones(4, 2, 64),))])
def test_the_peak_is_that_of_the_plan_as_a_view_keeps_the_memory_of_what_it_is_of(case) -> None:
    program = export(*case)
    (arena,) = inspect(lower(program).emit().buffer).methods[0].memory.arenas
    assert arena.peak == plan(program).methods[0].memory.peak


def test_kernels_are_what_executorchs_selective_build_takes(tmp_path: Path) -> None:
    from executorch.codegen.tools import gen_oplist

    path = tmp_path / "kernels.yaml"
    assert main(["inspect", str(write(tmp_path, "theirs delegates")), "--kernels-yaml", str(path)]) == 0
    read = gen_oplist._get_et_kernel_metadata_from_ops_yaml(str(path))
    assert set(read) == set(gen_oplist._get_operators(str(tmp_path / "theirs delegates.pte")))
    counts = sum((Counter(method.kernels) for method in reported("theirs delegates").methods), Counter[str]())
    assert set(read) == set(counts) and counts["aten::cumsum.out"] == 1


def write(folder: Path, name: str) -> Path:
    path = folder / f"{name}.pte"
    path.write_bytes(made(name).pte)
    return path


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*arguments: object, code: int = 0) -> str:
        assert main(["inspect", *map(str, arguments)]) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    path = write(tmp_path, "shared state")
    other = write(tmp_path, "theirs delegates")
    difference = printed(path, other).splitlines()
    assert difference[:2] == [f"--- {path}", f"+++ {other}"] and "+delegates" in "".join(difference).replace(" ", "")
    assert printed(path, path, "--json") == "\n"
    summary = printed(path, "--summary")
    assert len(summary.splitlines()) <= 10 and "2 x aten::add.out" in summary
    assert printed(path).startswith(summary)
    tree = json.loads(printed(path, "--json"))
    assert tree["version"] == 2 and tree["size"] == len(made("shared state").pte)
    assert [method["signature"]["state"][0]["shared_with"] for method in tree["methods"]] == [["write"], ["read"]]
    assert "no file" in printed(tmp_path / "missing.pte", code=2)


def test_reports_are_the_same_each_time() -> None:
    for name in FILES:
        again = inspect(made(name).pte, data=made(name).given)
        assert again == reported(name) and again.to_json() == reported(name).to_json()


def test_a_large_file_is_read_by_its_tables_only(tmp_path: Path) -> None:
    path = write(tmp_path, "theirs state")
    with path.open("r+b") as file:
        file.truncate(1 << 30)
    started = time.perf_counter()
    report = inspect(path)
    lines = report.summary().splitlines()
    assert time.perf_counter() - started < 2
    assert report.bytes_by_kind()["rest"] == (1 << 30) - len(made("theirs state").pte) and len(lines) <= 10


def test_damaged_files_are_refused() -> None:
    for name in ("delegates", "state", "theirs inline"):
        content = made(name).pte
        for size in range(0, len(content), 97):
            try:
                report = inspect(content[:size])
            except InputError:
                continue
            assert sum(part.size for part in report.ranges) == size
    for content in (b"", b"PK\x03\x04", b"\0" * 64, made("theirs delegates").pte.replace(b"XH00", b"XH99")):
        with pytest.raises(InputError):
            inspect(content)
    with pytest.raises(InputError, match="inspect: data"):
        inspect(made("state").pte, data=3)  # type: ignore[arg-type]


def test_names_in_a_file_are_only_shown() -> None:
    content = made("theirs state").pte.replace(b"forward", b"\x1b[2J<b>")
    report = inspect(content)
    for text in (str(report), report.summary(), repr(report.methods), report.to_json()):
        assert "\x1b" not in text
    assert report.methods[0].name == "\x1b[2J<b>"


def test_the_peak_is_that_of_a_slow_count() -> None:
    for seed in range(300):
        random = Random(seed)
        tensors = []
        for value in range(random.randint(0, 14)):
            first = random.randint(0, 8)
            place = random.randint(0, 12), random.choice([0, 1, 2, 5, 9]), first, first + random.randint(0, 5)
            tensors.append(PlannedTensor(value, "", "float32", (), 1, *place))
        bytes_at = {
            one.first: {
                byte
                for tensor in tensors
                if tensor.first <= one.first <= tensor.last
                for byte in range(tensor.offset, tensor.offset + tensor.bytes)
            }
            for one in tensors
        }
        found = memory._arena(1, 100, tensors)
        assert found.peak == max(map(len, bytes_at.values()), default=0)
        assert not found.peak or found.peak == len(bytes_at[found.at])
        live = {tensor.value for tensor in tensors if tensor.first <= found.at <= tensor.last}
        assert set(found.tensors) == (live if found.peak else set())


def test_a_file_that_plans_more_memory_than_there_is_can_be_inspected() -> None:
    content = made("state").pte
    # The vector of the sizes of memories: the first is of none.
    old = struct.pack("<Iqq", 2, 0, reported("state").methods[-1].memory.arenas[0].bytes)
    assert content.count(old) == 1
    content = content.replace(old, struct.pack("<Iqq", 2, 0, 1 << 60))
    assert inspect(content).methods[0].memory.bytes == 1 << 60
    with pytest.raises(InputError, match="plans more memory than"):
        load(content, verify=False)


class Branch(torch.nn.Module):
    def forward(self, x):
        y = torch.cond(x.sum() > 0, lambda z: z.exp(), lambda z: z.sin(), (x,))
        return torch.cat([y, y.reshape(4).view(1, 4)]).cumsum(0)


def test_tensors_are_named_by_what_makes_them() -> None:
    (found,) = inspect(lower(export(Branch(), (torch.ones(1, 4),))).emit().buffer).methods
    assert {"exp", "sin", "cat"} <= {one.name.rpartition(" ")[2] for one in found.memory.tensors}
