"""What a loaded program says that its methods take is what `run` accepts, for files of ours and of ExecuTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pte_files import FILES, made

from exir_lowering import InputError, LoadedProgram, load
from exir_lowering.pte.signatures import MethodSignature, TensorInfo


def loaded(name: str) -> LoadedProgram:
    return load(made(name).pte, data=made(name).given)


def given(value: TensorInfo, sizes: tuple[int, ...] | None = None) -> Any:
    if value.shape is None:
        return value.value
    return torch.ones(sizes or value.shape, dtype=value.dtype)


@pytest.mark.parametrize("name", FILES)
def test_what_it_takes_and_returns_is_what_run_takes_and_returns(name: str) -> None:
    program = loaded(name)
    assert tuple(program.methods) == program.method_names
    for method, signature in program.methods.items():
        outputs = program.run(method, *map(given, signature.inputs))
        for expected, found in zip(signature.outputs, outputs, strict=True):
            assert (expected.kind, expected.dtype, expected.shape) == ("tensor", found.dtype, tuple(found.shape))
        for number, value in enumerate(signature.inputs):
            inputs = [given(one) for one in signature.inputs]
            larger = None if value.shape is None else tuple(size + 1 for size in value.shape)
            inputs[number] = given(value, larger) if larger else value.value + 1  # type: ignore[operator]
            with pytest.raises(InputError):
                program.run(method, *inputs)


def test_state_and_who_shares_it() -> None:
    signatures = loaded("shared state").methods
    assert {name: [one.shared_with for one in found.state] for name, found in signatures.items()} == {
        "read": [("write",)],
        "write": [("read",)],
    }
    (number,) = (value for value in signatures["write"].inputs if value.kind == "int")
    assert number.value == 3 and repr(number).endswith(": int 3")
    found = loaded("state").methods["forward"].state
    assert [(one.shape, one.dtype, one.bytes) for one in found] == [((3,), torch.float32, 12)] * 2
    assert [one.initial for one in found] == ["zeros", "file"]
    for name, kept in (("theirs state", 2), ("no input", 1), ("delegates", 0)):
        assert all(len(one.state) in (kept, 0) for one in loaded(name).methods.values())
        assert sum(len(one.state) for one in loaded(name).methods.values()) == kept
    named = loaded("theirs named state").methods["forward"].state
    assert [one.name for one in named] == ["total", "last"]


def test_outputs_that_are_new_values_of_inputs() -> None:
    signature = loaded("written input").methods["forward"]
    first, *others = signature.outputs
    assert first.of == signature.inputs[0].name and not any(one.of for one in others)
    assert f", the new value of {first.of}" in repr(first)


def test_bounds_of_a_file_that_does_not_say_more() -> None:
    (value,) = loaded("theirs inline").methods["forward"].inputs
    assert repr(value) == "input 0: float32[<=6, <=3, <=8, <=8]" and value.dynamic and value.least is None
    signature = loaded("theirs delegates").methods["head"]
    assert repr(signature) == "head(input 0: float32[1, 6]) -> (output 0: float32[1, 6]), on XnnpackBackend"


def test_names_from_a_file_are_printed_so_that_a_terminal_shows_them() -> None:
    value = TensorInfo("a\x1b[2J\nb", "int", value=3)
    assert repr(value) == "a\\x1b[2J\\nb: int 3"
    assert "\x1b" not in repr(MethodSignature("m\x1b", (value,), (), (), ("b\x1b",)))
