"""A memory that a model knows by several names, or by views: what is written by one is read by all, in every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram, export

import exir_lowering
from exir_lowering import InputError, load, lower

X = torch.arange(1.0, 5.0)
Build = Callable[[torch.nn.Module], None]
Forward = Callable[[Any, torch.Tensor], Any]


class Of(torch.nn.Module):
    """Registers something, and calls a function of it."""

    def __init__(self, build: Build, forward: Forward) -> None:
        super().__init__()
        build(self)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward(self, x)


class Holder:
    """An object that is not a module."""

    kept: torch.Tensor


def registered(**views: Callable[[torch.Tensor], torch.Tensor]) -> Build:
    """Register views of 24 numbers as buffers; other names are parameters, plain attributes, or behind `holder`."""

    def build(module: Any) -> None:
        memory = torch.arange(24.0)
        module.holder = Holder()
        for name, view in views.items():
            made = view(memory)
            if name.startswith("p"):
                module.register_parameter(name, torch.nn.Parameter(made, requires_grad=name == "parameter"))
            elif name.startswith("held"):
                module.holder.kept = made
            elif name.startswith("plain"):
                setattr(module, name, made)
            else:
                module.register_buffer(name, made, persistent=not name.startswith("loose"))

    return build


def whole(memory: torch.Tensor) -> torch.Tensor:
    return memory


def table(memory: torch.Tensor) -> torch.Tensor:
    return memory.view(4, 6)


def write_a(m: Any, x: torch.Tensor) -> Any:
    m.a.add_(x.sum())
    return m.b * 2


def write_part(m: Any, x: torch.Tensor) -> Any:
    m.b.mul_(x.sum())
    return m.a + 1, m.b + 0


def write_both(m: Any, x: torch.Tensor) -> Any:
    m.b.add_(x[0])
    first = m.a * 1
    m.a.mul_(2)
    m.b.copy_(m.b - x[1])
    return first, m.a + m.a, m.b + 0


def all_three(m: Any, x: torch.Tensor) -> Any:
    m.b[:, 0] = x[0]
    m.loose.add_(m.a.sum())
    m.a.view(24)[3] = x[1]
    return m.a * 1, m.b * 1, m.loose * 1


PARTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "the same": (whole, whole),
    "a slice": (whole, lambda memory: memory[4:9]),
    "the last": (whole, lambda memory: memory[23:]),
    "every third": (whole, lambda memory: memory[1::3]),
    "one number": (table, lambda memory: memory[7]),
    "a row": (table, lambda memory: memory.view(4, 6)[2]),
    "a column": (table, lambda memory: memory.view(4, 6)[:, 5]),
    "a block": (table, lambda memory: memory.view(4, 6)[1:3, 2:5]),
    "transposed": (table, lambda memory: memory.view(4, 6).t()),
    "transposed, of which a block": (lambda memory: memory.view(4, 6).t(), lambda memory: memory.view(4, 6)[1:, :3]),
    "another shape": (table, lambda memory: memory.view(2, 3, 4)),
    "with a dimension more": (table, lambda memory: memory.view(4, 1, 6)[1:2]),
    "steps": (lambda memory: memory.view(2, 3, 4), lambda memory: memory.view(2, 3, 4)[:, 1:, ::2]),
}


def check(build: Build, forward: Forward, strict: bool, partitioner: str | None) -> None:
    model = Of(build, forward)
    program = export(Of(build, forward), (X,), strict=strict)
    before = {name: tensor.clone() for name, tensor in program.state_dict.items()}
    artifact = lower(program, partitioner).emit()
    file = load(artifact.buffer)
    for number in range(4):
        with torch.no_grad():
            expected = model(X + number)
        got = file.run("forward", X + number)
        for one, two in zip(got, expected if isinstance(expected, tuple) else [expected], strict=True):
            torch.testing.assert_close(one, two)
    assert program.state_dict.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in program.state_dict.items())


@pytest.mark.parametrize("forward", [write_a, write_part, write_both])
@pytest.mark.parametrize("part", PARTS)
def test_views(part: str, forward: Forward) -> None:
    one, other = PARTS[part]
    number = list(PARTS).index(part)
    check(registered(a=one, b=other), forward, strict=bool(number % 2), partitioner=("xnnpack", None)[number % 2])


@pytest.mark.parametrize("strict", [False, True], ids=["loose", "strict"])
@pytest.mark.parametrize("partitioner", [None, "xnnpack", "reference"], ids=str)
def test_several_of_them(strict: bool, partitioner: str | None) -> None:
    loose = {"a": whole, "b": table, "loose": lambda memory: memory[8:11]}
    check(registered(**loose), all_three, strict, partitioner)
    loose = {"loose": lambda memory: memory[8:20], "b": lambda memory: memory[20:].view(2, 2), "a": whole}
    check(registered(**loose), all_three, strict, partitioner)


def held(m: Any, x: torch.Tensor) -> Any:
    m.holder.kept.add_(x.sum())
    return m.a * 1, m.holder.kept + 1


def plain(m: Any, x: torch.Tensor) -> Any:
    m.plain.add_(x.sum())
    return m.a * 1, m.plain + 1


def weight(m: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        m.a.add_(x.sum())
    return m.parameter.sum() * x, m.a * 1


@pytest.mark.parametrize("strict", [False, True], ids=["loose", "strict"])
@pytest.mark.parametrize("part", ["the same", "a block", "transposed"])
def test_tensors_that_are_no_buffers(part: str, strict: bool) -> None:
    one, other = PARTS[part]
    for first, second in ((one, other), (other, one)):
        check(registered(a=first, held=second), held, strict, None)
        check(registered(a=first, plain=second), plain, strict, "xnnpack")
    check(registered(parameter=one, a=other), weight, strict, "xnnpack")


@pytest.mark.parametrize("strict", [False, True], ids=["loose", "strict"])
def test_what_cannot_be_one_buffer_is_refused(strict: bool) -> None:
    for one, other in (
        (lambda memory: memory[:10], lambda memory: memory[5:]),  # none is a part of the other
        (whole, lambda memory: memory.view(torch.int32)),
        (lambda memory: memory.view(4, 6)[:, :4], lambda memory: memory.view(4, 6)[0, :5]),
    ):
        with pytest.raises(InputError) as raised:
            lower(export(Of(registered(a=one, b=other), write_a), (X,), strict=strict))
        for words in ("'a'", "'b'", "overlap", "add_", "self.register_buffer("):
            assert words in str(raised.value)


def test_what_is_only_read_stays_as_it_is() -> None:
    """Tied weights, and parts of a memory that have no element in common."""
    program = export(Of(registered(a=whole, b=whole), lambda m, x: m.a.sum() + m.b * x[0]), (X,), strict=False)
    signature = lower(program)["forward"].graph_signature
    assert len({*signature.buffers}) == 2

    def apart(m: Any, x: torch.Tensor) -> Any:
        m.a.add_(x[0])
        m.b.add_(m.a)
        return m.a * 1, m.b * 1

    check(registered(a=lambda memory: memory[:12], b=lambda memory: memory[12:]), apart, False, None)


class Cache:
    def __init__(self) -> None:
        self.rows, self.next = torch.zeros(3, 4), torch.zeros(1, dtype=torch.int64)


class Attached(torch.nn.Module):
    """Has a cache that is no module, as in transformers; some of its methods have a name for it more."""

    def __init__(self, cache: Cache, what: str) -> None:
        super().__init__()
        self.cache, self.what = cache, what
        if what == "named":
            self.register_buffer("one", cache.rows)
            self.register_buffer("two", cache.rows)
            self.register_buffer("row", cache.rows[1])

    def forward(self, x: torch.Tensor) -> Any:
        cache = self.cache
        if self.what == "write":
            cache.rows.index_copy_(0, cache.next, x[None])
            cache.next.copy_((cache.next + 1) % 3)
            return cache.rows.sum(0)
        if self.what == "clear":
            cache.rows.mul_(0.0)
            return cache.next + 0
        return cache.rows * x if self.what == "read" else self.one + self.two * self.row + x


METHODS = ("write", "read", "clear", "named")
CALLS = ("read", "named", "write", "write", "read", "named", "write", "write", "named", "clear", "read", "named")


def programs() -> dict[str, ExportedProgram]:
    cache = Cache()
    return {what: export(Attached(cache, what), (X,), strict=True) for what in METHODS}


@pytest.mark.parametrize("partitioner", [None, "xnnpack", "reference"], ids=str)
def test_methods_share_it(partitioner: str | None) -> None:
    given = programs()
    lowered = lower(given, partitioner)
    artifact = lowered.emit()
    assert exir_lowering.verify(artifact, given).ok
    file, module, cache = load(artifact.buffer), lowered.module(), Cache()
    models = {what: Attached(cache, what) for what in METHODS}
    for number, what in enumerate(CALLS):
        expected = models[what](X + number)
        torch.testing.assert_close(file.run(what, X + number)[0], expected)
        torch.testing.assert_close(getattr(module, what)(X + number), expected)


def test_the_cache_of_conversions_knows_them(tmp_path: Any) -> None:
    for _ in range(2):
        options = exir_lowering.LoweringOptions(cache=str(tmp_path))
        file = load(lower(programs(), "xnnpack", options=options).emit().buffer)
        file.run("write", X)
        torch.testing.assert_close(file.run("named", X)[0], torch.stack([X * 2, X, X]))
