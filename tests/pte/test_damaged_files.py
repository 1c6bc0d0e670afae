"""Each way in which a few bytes of a file used to end the process, and from the command line.

Fields are found as the file's own reader finds them, and set to what a stranger may put there. Files are loaded without
a look at their digests, which whoever changes a file can change too.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged_models import Attention, Loop, Net, Operators
from executorch.exir import ExecutorchBackendConfig
from forked import outcome
from torch.export import export

from exir_lowering import Limits, LoweringError, cli, load, lower
from exir_lowering._upstream.runtime import executorch_runtime
from exir_lowering.pte.container import open_program
from exir_lowering.pte.flatbuffer import Table, root
from exir_lowering.pte.format import read_program
from exir_lowering.pte.payloads import XNNPACK, read_payload
from exir_lowering.pte.value_kinds import TENSOR

pytestmark = pytest.mark.skipif(not hasattr(os, "fork") or sys.platform != "linux", reason="children are forked")

IMAGE, WORDS, ROWS = torch.ones(1, 3, 8, 8), torch.ones(2, 4, 8), torch.ones(2, 3)
INPUTS: dict[str, tuple[Any, ...]] = {
    "plain": (ROWS, torch.tensor([[0, 1, 5]])),
    "net": (IMAGE,),
    "attention": (WORDS,),
    "loop": (ROWS,),
}

# Fields of tables in program.fbs.
PLAN_INPUTS, PLAN_SIZES, PLAN_OPERATORS, PLAN_CHAINS = 3, 8, 6, 5
DTYPE, SIZES, BUFFER, PLACE = 0, 2, 5, 6
QINT8, BITS8 = 12, 18


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    executorch_runtime()
    torch.manual_seed(0)
    modules = {"plain": (Operators(), None), "net": (Net(), "xnnpack"), "attention": (Attention(), "xnnpack")}
    modules["loop"] = (Loop(), None)
    return {
        name: lower(export(module.eval(), INPUTS[name]), partitioner).emit().buffer
        for name, (module, partitioner) in modules.items()
    }


class Editor:
    """A file whose fields can be changed in place."""

    def __init__(self, content: bytes) -> None:
        self.content = bytearray(content)
        program, self.data = open_program(memoryview(self.content))
        (self.plan,) = program.tables(1)

    def put(self, table: Table, field: int, code: str, value: Any, base: int = 0) -> None:
        """Set a number of a table."""
        assert table.has(field)
        struct.pack_into(f"<{code}", self.content, base + table.position + table.fields[field], value)

    def drop(self, table: Table, field: int, base: int = 0) -> None:
        """Make a field absent: in all tables that share the description."""
        assert table.has(field)
        start = base + table.position - struct.unpack_from("<i", self.content, base + table.position)[0]
        struct.pack_into("<H", self.content, start + 4 + 2 * field, 0)

    def items(self, table: Table, field: int, base: int = 0) -> int:
        """Return where the items of a vector are."""
        at = base + table.position + table.fields[field]
        return at + struct.unpack_from("<I", self.content, at)[0] + 4

    def tensors(self) -> Iterator[Table]:
        for value in self.plan.tables(2):
            content = value.table(1)
            if value.number(0, "B") == TENSOR and content is not None:
                yield content

    def planned(self) -> Iterator[Table]:
        return (tensor for tensor in self.tensors() if tensor.table(PLACE) is not None)

    def instructions(self, kind: int) -> Iterator[Table]:
        for chain in self.plan.tables(PLAN_CHAINS):
            for instruction in chain.tables(2):
                content = instruction.table(1)
                if instruction.number(0, "B") == kind and content is not None:
                    yield content

    def payload(self) -> tuple[int, Table]:
        """Return where the tables of the first XNNPACK payload start, and its graph."""
        start = self.content.index(b"XH00") - 4
        first, size = struct.unpack_from("<II", self.content, start + 10)
        return start + first, root(memoryview(self.content)[start + first : start + first + size])

    def values(self) -> Iterator[tuple[int, Table]]:
        """Return the tensors of the payload."""
        base, graph = self.payload()
        for value in graph.tables(2):
            content = value.table(1)
            assert content is not None
            tensor = content if value.number(0, "B") == 1 else content.table(0)
            assert tensor is not None
            yield base, tensor

    def nodes(self, kind: int) -> Iterator[tuple[int, Table]]:
        base, graph = self.payload()
        for node in graph.tables(1):
            content = node.table(1)
            if node.number(0, "B") == kind and content is not None:
                yield base, content


def used(content: bytes, name: str) -> str:
    """Load and run a file in a child."""

    def work() -> str:
        program = load(content, verify=False)
        return str([program.run("forward", *INPUTS[name]) for _ in range(2)])

    return outcome(work)


# -- what the runtime reads without a look ----------------------------------------------------------------------------


def _absent(field: int) -> Callable[[Editor], None]:
    return lambda file: file.drop(file.plan, field)


def _each(table: Callable[[Editor], Iterator[Table]], change: Callable[[Editor, Table], None]) -> Callable[..., None]:
    def edit(file: Editor) -> None:
        for one in list(table(file)):
            change(file, one)

    return edit


def _first(table: Callable[[Editor], Iterator[Table]], change: Callable[[Editor, Table], None]) -> Callable[..., None]:
    return lambda file: change(file, next(iter(table(file))))


def _typed(dtype: int) -> Callable[[Editor], None]:
    """Give every tensor of floats another element type, as small."""

    def change(file: Editor, tensor: Table) -> None:
        if tensor.number(DTYPE, "b") == 6:
            file.put(tensor, DTYPE, "b", dtype)

    return _each(Editor.tensors, change)


def _huge(file: Editor) -> None:
    struct.pack_into("<q", file.content, file.items(file.plan, PLAN_SIZES) + 8, 1 << 50)


def _itself(file: Editor) -> None:
    """Let a jump that depends on a constant jump to itself."""
    values = list(file.plan.tables(2))
    for chain in file.plan.tables(PLAN_CHAINS):
        for number, instruction in enumerate(chain.tables(2)):
            content = instruction.table(1)
            if instruction.number(0, "B") == 4 and content is not None:
                never = next(index for index, value in enumerate(values) if value.number(0, "B") == 3)
                file.put(content, 0, "i", never)
                file.put(content, 1, "i", number)
                return


def _constant_written(file: Editor) -> None:
    """Let a kernel write its result into a weight."""
    tables = list(file.plan.tables(2))
    contents = [table.table(1) if table.number(0, "B") == TENSOR else None for table in tables]
    stored = next(n for n, one in enumerate(contents) if one is not None and one.number(BUFFER, "I"))
    *_, call = file.instructions(1)
    count = call.count(1)
    for position in (count - 2, count - 1):
        struct.pack_into("<i", file.content, file.items(call, 1) + 4 * position, stored)


DAMAGE: dict[str, tuple[str, Callable[[Editor], None], str]] = {
    "no inputs": ("plain", _absent(PLAN_INPUTS), "it has no list of inputs"),
    "no operators": ("plain", _absent(PLAN_OPERATORS), "it has no list of operators"),
    "no specs": ("net", _first(lambda f: f.plan.tables(7), lambda f, t: f.drop(t, 2)), "no list of compile specs"),
    "no shape": ("plain", _first(Editor.planned, lambda f, t: f.drop(t, SIZES)), "has no shape"),
    "qint8": ("plain", _typed(QINT8), "quantised element type 12"),
    "bits8": ("plain", _typed(BITS8), "element type of bits 18"),
    "a constant is written": ("plain", _constant_written, "which is a constant"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_tables(files: dict[str, bytes], case: str) -> None:
    name, edit, words = DAMAGE[case]
    file = Editor(files[name])
    edit(file)
    result = used(bytes(file.content), name)
    assert result.startswith("refused: ") and words in result, result


def test_a_file_that_is_whole_runs(files: dict[str, bytes]) -> None:
    for name, content in files.items():
        assert used(bytes(Editor(content).content), name).startswith("done:"), name


# -- XNNPACK's payloads -----------------------------------------------------------------------------------------------

CONVOLUTION, RESHAPE = 7, 20


def _value(change: Callable[[Editor, int, Table], None], wanted: Callable[[Table], bool]) -> Callable[[Editor], None]:
    def edit(file: Editor) -> None:
        base, tensor = next((base, one) for base, one in file.values() if wanted(one))
        change(file, base, tensor)

    return edit


def _node(kind: int, field: int, value: int) -> Callable[[Editor], None]:
    def edit(file: Editor) -> None:
        base, node = next(file.nodes(kind))
        file.put(node, field, "I", value, base)

    return edit


def _dimension(file: Editor, base: int, tensor: Table) -> None:
    struct.pack_into("<I", file.content, file.items(tensor, 2, base), 1 << 20)


def _short(file: Editor) -> None:
    """Let the data of the first weight end after four bytes."""
    start = file.content.index(b"XH00") - 4
    needed = read_payload(XNNPACK, memoryview(bytes(file.content[start:]))).weights
    program, _ = open_program(memoryview(file.content))
    index = next(one.number(1, "I") for one in program.tables(7) if one.text(0) in needed)
    file.put(list(program.tables(4))[index], 1, "Q", 4)


CONSTANT = lambda tensor: tensor.number(3, "I") != 0  # noqa: E731
INPUT = lambda tensor: tensor.number(5, "I") == 1  # noqa: E731
OUTPUT = lambda tensor: tensor.number(5, "I") == 2  # noqa: E731

PAYLOADS: dict[str, tuple[str, Callable[[Editor], None], str]] = {
    "a weight that is too short": ("net", _short, "which has 4"),
    "a constant that is not there": ("net", _value(lambda f, b, t: f.put(t, 3, "I", 999, b), CONSTANT), "999 of"),
    "a larger weight": ("net", _value(_dimension, CONSTANT), "a payload of 'XnnpackBackend' reads"),
    "an unknown datatype": ("net", _value(lambda f, b, t: f.put(t, 0, "h", 77, b), INPUT), "unknown datatype 77"),
    "a value that is not there": ("net", _node(CONVOLUTION, 15, 1234), "refers to value 1234"),
}

WITH_LIMITS: dict[str, tuple[str, Callable[[Editor], None]]] = {
    "huge memory": ("plain", _huge),
    "a jump to itself": ("loop", _itself),
    "a result beyond the call": ("net", _value(lambda f, b, t: f.put(t, 4, "I", 9, b), OUTPUT)),
    "no stride": ("net", _node(CONVOLUTION, 6, 0)),
}
"""What nobody looks at before: some of it ends the process that runs it, which is a child of this one."""


@pytest.mark.parametrize("case", WITH_LIMITS)
def test_what_ends_a_process_is_an_error_with_limits(files: dict[str, bytes], case: str) -> None:
    name, edit = WITH_LIMITS[case]
    file = Editor(files[name])
    edit(file)
    with contextlib.suppress(LoweringError, MemoryError):  # or a result
        program = load(bytes(file.content), verify=False, limits=Limits(seconds=10))
        program.run("forward", *INPUTS[name])
    program = load(files[name], limits=Limits(seconds=60))
    assert program.run("forward", *INPUTS[name])


@pytest.mark.parametrize("case", PAYLOADS)
def test_payloads(files: dict[str, bytes], case: str) -> None:
    name, edit, words = PAYLOADS[case]
    file = Editor(files[name])
    edit(file)
    result = used(bytes(file.content), name)
    assert result.startswith("refused: ") and words in result, result
    assert XNNPACK in result


def test_an_unknown_version_and_an_unknown_node(files: dict[str, bytes]) -> None:
    file = Editor(files["net"])
    base, graph = file.payload()
    file.content[base + 4 : base + 8] = b"XN07"
    assert "XN01" in used(bytes(file.content), "net")
    file = Editor(files["net"])
    base, graph = file.payload()
    file.put(next(graph.tables(1)), 0, "B", 200, base)
    assert "is of the unknown type 200" in used(bytes(file.content), "net")


# -- data files, the command line -------------------------------------------------------------------------------------


def test_data_files(tmp_path: Path) -> None:
    """A weight without a layout was read through a null pointer."""
    torch.manual_seed(0)
    emitted = lower(export(Operators().eval(), INPUTS["plain"])).emit(ExecutorchBackendConfig(external_constants=True))
    path = emitted.save(tmp_path / "model.pte")
    (name,) = emitted.data_files
    whole = (tmp_path / name).read_bytes()

    def attempt(content: bytes) -> str:
        (tmp_path / name).write_bytes(content)

        def work() -> str:
            program = load(path, data=tmp_path / name, verify=False)
            return str(program.run("forward", *INPUTS["plain"]))

        return outcome(work)

    assert attempt(whole).startswith("done: ")
    size = sum(struct.unpack_from("<QQ", whole, 16))
    table = root(memoryview(whole)[:size])
    needed = next(iter(read_program(memoryview(path.read_bytes())).values())).external
    entry = next(one for one in table.tables(2) if one.text(0) in needed and one.has(1))
    for field, code, value, words in ((2, "H", 0, "but method 'forward' needs"), (1, "I", 99, "99 of")):
        damaged = bytearray(whole)
        at = entry.position + entry.fields[field]
        if code == "H":  # the field is absent then
            at = entry.position - struct.unpack_from("<i", whole, entry.position)[0] + 4 + 2 * field
        struct.pack_into(f"<{code}", damaged, at, value)
        result = attempt(bytes(damaged))
        assert result.startswith("refused: ") and words in result, result


@pytest.mark.parametrize("case", ["no inputs", "qint8"])
def test_the_command_line(files: dict[str, bytes], case: str, tmp_path: Path) -> None:
    name, edit, _ = DAMAGE[case]
    file = Editor(files[name])
    edit(file)
    (tmp_path / "model.pte").write_bytes(file.content)
    arguments = ["run", str(tmp_path / "model.pte"), "--check-digests", "tie", "--random"]
    assert outcome(lambda: cli.main(arguments)) == "done: 2"
