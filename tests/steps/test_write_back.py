"""State that is written in place, and where that would be seen."""

from __future__ import annotations

import pytest
import torch
from executorch.exir import to_edge
from torch import nn
from torch.export import export

import exir_lowering
from exir_lowering import LoweringOptions


class Cache(nn.Module):
    """Writes a row of its state, and returns something that depends on it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("state", torch.zeros(4, 3))

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        old = self.state.clone().view(2, 6) if self.kind == "old view" else self.state + 0
        self.state.index_copy_(0, row, x)
        if self.kind == "new":
            return self.state.sum(0)
        if self.kind == "before":
            return old.sum(0) + self.state.sum(0)
        if self.kind == "old view":
            return old.sum(0)
        if self.kind == "new view":
            return self.state.view(2, 6)[1:].view(3, 2) * 2.0, self.state.view(2, 6).sum(0)
        if self.kind == "returned view":
            return x + 1.0, self.state.view(12)
        return self.state.clone(), self.state.sum(0)


@pytest.mark.parametrize(
    ("kind", "in_place"),
    [
        ("new", True),
        ("before", True),
        ("returned", True),
        ("old view", False),
        ("new view", True),
        ("returned view", True),
    ],
)
def test_results_and_state_over_many_calls(kind: str, in_place: bool) -> None:
    inputs = (torch.ones(1, 3), torch.tensor([0]))
    model = Cache(kind).eval()
    program = export(Cache(kind).eval(), inputs)
    files = {}
    for chosen in ("none", "safe"):
        lowered = exir_lowering.lower(program, options=LoweringOptions(rewrites=chosen))
        artifact = lowered.emit()
        files[chosen] = exir_lowering.load(artifact.buffer)
        names = {op.name for plan in artifact.manager.executorch_program.execution_plan for op in plan.operators}
        assert ("aten::index_put_" in names) == (chosen == "safe" and in_place)
    for turn in range(6):
        x, row = torch.randn(1, 3), torch.tensor([turn % 4])
        expected = model(x, row)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for program_ in files.values():
            for got, wanted in zip(program_.run("forward", x, row), expected, strict=True):
                torch.testing.assert_close(got, wanted)


class Broadcast(nn.Module):
    """Writes one number, one row, or sums into the state: ExecuTorch's kernel does not do this in place."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("state", torch.zeros(4, 3))

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        if self.kind == "sum":
            self.state.index_put_((row,), x, accumulate=True)
        elif self.kind == "two":
            self.state.index_put_((row, row), x[:, 0])
        else:
            self.state[row] = x[0] if self.kind == "row" else x[0, 0]
        return self.state + 0


@pytest.mark.parametrize("kind", ["sum", "two", "row", "number"])
def test_what_the_kernel_does_not_do_in_place(kind: str) -> None:
    inputs = (torch.ones(1, 3), torch.tensor([0]))
    model = Broadcast(kind).eval()
    file = exir_lowering.load(exir_lowering.lower(export(Broadcast(kind).eval(), inputs)).emit().buffer)
    for turn in range(4):
        x, row = torch.randn(1, 3), torch.tensor([turn % 3])
        torch.testing.assert_close(file.run("forward", x, row)[0], model(x, row))


def test_rows_may_be_counted_from_the_end() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(4, 3))
            self.register_buffer("values", torch.zeros(4, 3))

        def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            self.keys[rows], self.values[rows] = x, x * 2
            return self.keys @ self.values.T

    inputs = (torch.ones(2, 3), torch.tensor([0, 1]))
    model, program = Rows(), export(Rows(), inputs)
    artifact = exir_lowering.lower(program, options=LoweringOptions(rewrites="safe")).emit()
    plan = artifact.manager.executorch_program.execution_plan[0]
    names = [
        plan.operators[one.instr_args.op_index].name
        for one in plan.chains[0].instructions
        if hasattr(one.instr_args, "op_index")
    ]
    assert names.count("aten::index_put_") == 2 and names.count("aten::lt") == 1
    file = exir_lowering.load(artifact.buffer)
    for rows in ([0, 1], [-1, 2], [3, 3], [0, -4]):
        x = torch.randn(2, 3)
        torch.testing.assert_close(file.run("forward", x, torch.tensor(rows))[0], model(x, torch.tensor(rows)))


class Custom(nn.Module):
    """Writes its state with a custom operator, and reads what was there before."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("state", torch.zeros(1, 4, 1, 2))

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        old = self.state.clone()
        start = row[0].item()
        torch._check(start >= 0)
        torch._check(start < 4)
        torch.ops.llama.update_cache(x, self.state, start)
        if self.kind == "twice":
            torch.ops.llama.update_cache(x + 1, self.state, start)
        if self.kind == "changed":
            self.state.mul_(2)
        return self.state * 1, old.view(4, 2).sum(0) if self.kind == "old" else x + 0


@pytest.mark.parametrize("kind", ["new", "old", "twice", "changed"])
def test_custom_operators_that_write_state(kind: str) -> None:
    from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  (it registers the operator)

    inputs = (torch.ones(1, 1, 1, 2), torch.tensor([0]))
    model = Custom(kind).eval()
    file = exir_lowering.load(exir_lowering.lower(export(Custom(kind).eval(), inputs)).emit().buffer)
    for turn in range(5):
        x, row = torch.randn(1, 1, 1, 2), torch.tensor([turn % 4])
        for got, wanted in zip(file.run("forward", x, row), model(x, row), strict=True):
            torch.testing.assert_close(got, wanted)


class Copied(nn.Module):
    """Keeps in one part of its state what another one was, or an input, which then changes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        for number, name in enumerate(("first", "second", "third")):
            self.register_buffer(name, torch.arange(8.0).view(1, 4, 1, 2) + number)

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.kind == "swap":
            kept = self.first.clone()
            self.first.copy_(self.second)
            self.second.copy_(kept)
            return self.first + x, self.second - self.third
        if self.kind == "input":
            self.first.copy_(x.expand(1, 4, 1, 2).clone())
            self.second.copy_(self.first)
            x.add_(1)
            return self.first + self.second, x * 2
        before = self.third + 0
        self.third.copy_(self.second)
        self.second.copy_(self.first)
        if self.kind == "chain":
            self.first.mul_(0.5).add_(x)
        elif self.kind == "row":
            self.first.index_copy_(1, row, x)
        else:
            start = row[0].item()
            torch._check(start >= 0)
            torch._check(start < 4)
            torch.ops.llama.update_cache(x, self.first, start)
        return before, self.first * 1


@pytest.mark.parametrize("partitioner", [None, "xnnpack"])
@pytest.mark.parametrize(("kind", "copies"), [("swap", 1), ("chain", 0), ("row", 0), ("custom", None), ("input", None)])
def test_state_takes_what_other_state_was(kind: str, copies: int | None, partitioner: str | None) -> None:
    from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  (it registers the operator)

    model, inputs = Copied(kind).eval(), (torch.ones(1, 1, 1, 2), torch.tensor([0]))
    artifact = exir_lowering.lower(export(Copied(kind).eval(), inputs), partitioner).emit()
    plan = artifact.manager.executorch_program.execution_plan[0]
    names = [
        plan.operators[one.instr_args.op_index].name
        for one in plan.chains[0].instructions
        if hasattr(one.instr_args, "op_index")
    ]
    made = [name for name in names if name.rpartition("::")[2] in ("copy", "clone", "_clone_dim_order")]
    assert copies is None or len(made) == copies, names
    file = exir_lowering.load(artifact.buffer)
    for turn in range(5):
        x, row = torch.randn(1, 1, 1, 2), torch.tensor([turn % 4])
        given = x.clone()
        returned = model(given, row)
        expected = [*([given] if kind == "input" else []), *returned]
        for got, wanted in zip(file.run("forward", x, row), expected, strict=True):
            torch.testing.assert_close(got, wanted)


class Converted(nn.Module):
    """Writes numbers of another type, or of fewer dimensions, and reads them back."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.copy_(x)
        return self.state / 2


@pytest.mark.parametrize("x", [torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0, 3.0])], ids=["integers", "a row"])
def test_what_was_decomposed_wrongly_is_refused(x: torch.Tensor) -> None:
    program = export(Converted(), (x,))
    file = exir_lowering.load(exir_lowering.lower(program).emit().buffer)
    (got,) = file.run("forward", x)
    assert torch.equal(got, Converted()(x))
    with pytest.raises(exir_lowering.InputError, match=r"writes torch\.\w+ \[3\] into b_state.*drops the conversion"):
        exir_lowering.lower(program.run_decompositions({}))
    with pytest.raises(exir_lowering.InputError, match="into b_state"):
        exir_lowering.to_backend(to_edge(program).exported_program(), None)


class Unread(nn.Module):
    """Writes a parameter without reading what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.copy_(x)
        return self.weight + self.weight


@pytest.mark.parametrize("fast", [True, False])
def test_a_parameter_that_is_only_written(fast: bool) -> None:
    program = export(Unread(), (torch.zeros(3),))
    lowered = exir_lowering.lower(program, options=LoweringOptions(fast=fast))
    file = exir_lowering.load(lowered.emit().buffer)
    for turn in range(3):
        assert torch.equal(file.run("forward", torch.full((3,), float(turn)))[0], torch.full((3,), 2.0 * turn))
