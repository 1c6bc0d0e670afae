"""Calls by name, arrays of NumPy, results by name, state that is put back: every way to run a file answers alike."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import numpy
import pytest
import torch
from pte_files import made, programs
from runtime_models import AddSin, program_of, sums
from scripted import ScriptDelegate, scripted
from torch import nn
from torch.export import Dim, export

from exir_lowering import InputError, Limits, LoadedProgram, LoweredModule, buckets, load, lower


class Model(nn.Module):
    """Takes a dict, keyword arguments and a plain value; returns a dict with a list and a tuple in it; has state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2, 2)
        self.register_buffer("total", torch.full((2,), 5.0))

    def forward(self, Batch: Any, scale: Any, *, offset: Any, mode: Any = None) -> Any:
        self.total.add_(Batch["second"])
        logits = self.linear(Batch["first"]) * scale + offset
        return {"logits": logits, "states": [self.total * 1, (logits * 2,)]}


FIRST, SECOND, SCALE, OFFSET = torch.rand(3, 2), torch.ones(2), torch.tensor(2.0), torch.tensor(1.0)
SWAPPED = {"second": SECOND, "first": FIRST}


@pytest.fixture(scope="module")
def lowered() -> Any:
    inputs = ({"first": FIRST, "second": SECOND}, SCALE)
    return lower(export(Model(), inputs, {"offset": OFFSET, "mode": None}), "xnnpack")


@pytest.fixture(scope="module", params=["here", "apart", "module"])
def program(request: pytest.FixtureRequest, lowered: Any) -> Any:
    if request.param == "module":
        return lowered.module()
    return load(lowered.emit().buffer, limits=Limits() if request.param == "apart" else None)


CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "in order": ((FIRST, SECOND, SCALE, OFFSET, None), {}),
    "a dict in any order": ((SWAPPED, SCALE, OFFSET), {}),
    "by name": ((), {"mode": None, "offset": OFFSET, "scale": SCALE, "batch_second": SECOND, "batch_first": FIRST}),
    "a dict by name": ((), {"offset": OFFSET, "Batch": SWAPPED, "scale": SCALE}),
    "arrays": (
        (FIRST.numpy()[::-1][::-1], SECOND.numpy()),
        {"scale": numpy.float32(2), "offset": numpy.array(1, "f4")},
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_and_results(program: Any, call: str) -> None:
    inputs, named = CALLS[call]
    expected = Model()(SWAPPED, SCALE, offset=OFFSET)
    program.reset()
    results = program.run("forward", *inputs, **named)
    logits, total, double = results
    torch.testing.assert_close(logits, expected["logits"])
    torch.testing.assert_close(total, expected["states"][0])
    assert results["logits"] is results.logits is results[0] is logits
    assert results.states[0] is total and results["states"]["0"] is results["states.0"] is total
    assert results["states.1.0"] is results.states["1"][0] is double and len(results.states) == 2
    assert results.keys() == ("logits", "states.0", "states.1.0") == tuple(dict(results))
    assert "states" in results and "logit" not in results and results.get("logit", 3) == 3
    assert dict(results.items())["logits"] is results.values()[0] is results.get("logits")
    (again,) = program.run("forward", *inputs, **named).states["1"]
    torch.testing.assert_close(again, double)


def test_calling_it_is_running_forward(program: Any) -> None:
    program.reset()
    if isinstance(program, LoweredModule):  # has the structure of the original
        results: Any = program(SWAPPED, SCALE.numpy(), offset=OFFSET.numpy())
        torch.testing.assert_close(results["states"][0], torch.full((2,), 6.0))
    else:
        torch.testing.assert_close(program(SWAPPED, SCALE, offset=OFFSET).states[0], torch.full((2,), 6.0))


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "missing": ((FIRST, SECOND), {"offset": OFFSET}, r"got 3 inputs, expected 5 \(batch_first: .* none for 'scale'\."),
    "surplus": ((FIRST, SECOND, SCALE, OFFSET, None, FIRST), {}, r"got 6 inputs, expected 5 \(batch_first: "),
    "misspelt": ((FIRST, SECOND, SCALE), {"ofset": OFFSET}, r"'ofset' is none of them\. Did you mean 'offset'\?"),
    "misspelt key": ((), {"Batch": {"first": FIRST, "secnd": 1}}, r"'Batch_secnd' is none .* mean 'batch_second'\?"),
    "other keys": (({"a": FIRST, "b": SECOND}, SCALE, OFFSET), {}, r"got 3 inputs, expected 5 .*one by one"),
    "twice": ((FIRST, SECOND, SCALE, OFFSET), {"batch_first": FIRST}, r"'batch_first' is given twice"),
    "type": ((FIRST, SECOND, SCALE, OFFSET.long()), {}, r"argument 'offset' is a tensor of int64 .*\.to\(torch\.float"),
    "number": ((FIRST, SECOND, SCALE, numpy.float64(1)), {}, r"argument 'offset' is a tensor of float64.*\.astype"),
    "list": ((FIRST, [1.0, 1.0], SCALE, OFFSET), {}, r"argument 'batch_second' is of type builtins\.list.*one by one"),
    "plain value": ((FIRST, SECOND, SCALE, OFFSET), {"mode": "x"}, r"argument 'mode' is the str 'x', expected None"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_name_the_argument(program: Any, wrong: str) -> None:
    inputs, named, words = WRONG[wrong]
    with pytest.raises(InputError, match=r"^Method 'forward' of .*" + words):
        program.run("forward", *inputs, **named)


def test_results_that_are_not_there(program: Any) -> None:
    results = program.run("forward", *CALLS["in order"][0])
    with pytest.raises(KeyError, match=r"no output 'logit', only 'logits', .*mean 'logits'"):
        results["logit"]
    with pytest.raises(AttributeError, match="no output 'logit'"):
        results.logit  # noqa: B018
    assert pickle.loads(pickle.dumps(results)).keys() == copy.deepcopy(results).keys() == results.keys()


def test_files_without_names_keep_positions() -> None:
    program = load(lower({"head": programs()["head"]}).emit(provenance=False).buffer)
    x = torch.randn(1, 6)
    results = program.run("head", x.numpy())
    assert results.keys() == ("output 0",) and torch.equal(results[0], program.run("head", x)["output 0"])
    with pytest.raises(InputError, match=r"expected 1 \(input 0: a tensor .*'hidden' is none of them"):
        program.run("head", hidden=x)
    with pytest.raises(InputError, match="input 0 is a tensor of float64"):
        program.run("head", x.double())
    with pytest.raises(InputError, match="has no method 'forward'; it has 'head'"):
        program(x)


def test_new_values_of_inputs_have_their_names() -> None:
    x = numpy.ones(3, "f4")
    results = load(made("written input").pte)(x=x, y=2 * x)
    assert torch.equal(results["x"], torch.full((3,), 3.0)) and torch.equal(results[1], torch.full((3,), 6.0))
    module = lower(programs()["update"]).module()
    module(x[::-1], 2 * x)  # which is written, as a tensor is
    assert x.tolist() == [3.0, 3.0, 3.0]
    x.flags.writeable = False
    with pytest.raises(InputError, match=r"argument 'x' is .*numpy.* read-only\. Pass a copy"):
        module(x, x)


def test_families_by_name() -> None:
    class Add(nn.Module):
        def forward(self, ids: Any, mask: Any) -> Any:
            return {"sum": ids + mask}

    shapes = {"ids": {1: Dim("seq", min=1, max=8)}, "mask": {1: Dim("seq", min=1, max=8)}}
    one = export(Add(), (torch.ones(1, 4), torch.ones(1, 4)), dynamic_shapes=shapes)
    program = load(lower(buckets(one, {"seq": [2, 8]}, pad={"ids": 0, "mask": 0})).emit().buffer)
    given = {"mask": 2 * numpy.ones((1, 3), "f4"), "ids": torch.ones(1, 3)}
    assert torch.equal(program(**given).sum, torch.full((1, 3), 3.0))
    choice = program.choose("forward", **given)
    assert choice.method == "forward@seq=8"
    assert choice.others == {"forward@seq=2": "dimension 1 of argument 'ids' is 3, not 1 to 2"}
    assert program.profile("forward", **given, runs=2).rows[0].calls == 2
    with pytest.raises(InputError, match="dimension 1 of argument 'mask' is 2, but dimension 1 of argument 'ids'"):
        program(ids=given["ids"], mask=torch.ones(1, 2))


# -- state -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [None, Limits(memory=1 << 29)], ids=["here", "apart"])
def test_reset_is_what_the_file_starts_with(limits: Limits | None) -> None:
    shared, own = load(made("shared state").pte, limits=limits), load(made("state").pte, limits=limits)
    x = torch.ones(4, 8)
    first = own.run("forward", torch.ones(3))
    for _ in range(3):
        assert shared.run("write", x, 3)[0] == 96 and shared.run("read", x)[0].sum() == 64
        shared.run("write", x=x)
        shared.reset()
        assert shared.run("read", x)[0].sum() == 32
        shared.reset()
        assert not torch.equal(own.run("forward", torch.ones(3))[0], first[0])
        own.reset()
        own.reset()
        for got, expected in zip(own.run("forward", torch.ones(3)), first, strict=True):
            assert torch.equal(got, expected)


def test_reset_while_other_threads_run() -> None:
    program, wrong = load(made("state").pte), []

    def work() -> None:
        for _ in range(20):
            total, y = program.run("forward", torch.ones(3))
            if not torch.equal(total, 2 * y):
                wrong.append(total)
            program.reset()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_delegate_cannot_reset_the_program_that_calls_it() -> None:
    programs: list[LoadedProgram] = []

    class Resets(ScriptDelegate):
        def execute(self, handle: Any, inputs: Any) -> Any:
            with pytest.raises(InputError, match=r"reset: .* is running"):
                programs[0].reset()
            return super().execute(handle, inputs)

    x, y = torch.randn(2, 3), torch.randn(2, 3)
    content = scripted(program_of(AddSin(), x, y), sums()).buffer
    programs.append(load(content, delegates=[Resets]))
    for _ in range(2):
        torch.testing.assert_close(programs[0](x=x, y=y)[0], torch.sin(x + y))
        programs[0].reset()
