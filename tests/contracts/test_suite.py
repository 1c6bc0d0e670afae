"""The suite for backends finds what is wrong: backends that each make one mistake, and the cases that name it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from scripted import ScriptBackend, ScriptDelegate
from toy import ToyBackend, ToyDelegate

from exir_lowering import InputError, PreprocessResult, UnknownPluginError
from exir_lowering.backends.reference import ReferenceBackend, ReferenceDelegate
from exir_lowering.partitioners import constant_weights, ops
from exir_lowering.runtime import LoadedProgram
from exir_lowering.testing import (
    CASES,
    Case,
    ConformanceError,
    ConformanceReport,
    check_backend,
    conformance_tests,
)

CHOSEN = [
    "ops/add-broadcast", "ops/sub", "ops/abs", "dtype/float16", "layout/strided-input", "weights/buffer",
    "weights/transposed", "dynamic/batch", "degenerate/output-order", "partitions/alike", "methods/two",
    "methods/same-name-other-weight", "life/*", "errors/*",
]  # fmt: skip


def outcome(*given: Any, **options: Any) -> ConformanceReport:
    """Return the report, whatever it says."""
    try:
        return check_backend(*given, **options)
    except ConformanceError as error:
        return error.report


def changed(change: Any) -> type[ToyBackend]:
    """Return a backend whose payloads, read as JSON, are changed."""

    class Changed(ToyBackend):
        def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
            payload = json.loads(super().preprocess(program, compile_specs).processed_bytes)
            return PreprocessResult(json.dumps(change(payload)).encode())

    return Changed


def executing(execute: Any) -> type[ToyDelegate]:
    """Return a delegate that does something around execute."""

    class Executing(ToyDelegate):
        def execute(self, handle: Any, inputs: Any) -> Any:
            return execute(super().execute, handle, inputs)

    return Executing


def reading(read: Any) -> type[ToyBackend]:
    """Return a backend that reads weights in a way of its own."""

    class Reading(ToyBackend):
        def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
            for name, tensor in program.state_dict.items():
                program.state_dict[name] = read(tensor.detach())
            return super().preprocess(program, compile_specs)

    return Reading


def swapped(payload: Any) -> Any:
    head, inputs, weights, steps, results = payload
    return head, inputs, weights, [[name, operator, args[::-1]] for name, operator, args in steps], results


class Stamped(ToyBackend):
    """Writes into each payload how many there were before."""

    number = itertools.count()

    def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
        payload = super().preprocess(program, compile_specs).processed_bytes
        return PreprocessResult(payload + b" " * (next(self.number) % 7))


class Grouped(ToyBackend):
    """Gets all partitions in one call; `regroup` makes the mistake."""

    def preprocess_all(self, edge_programs: Any, compile_specs: Any) -> Any:
        return self.regroup(super().preprocess_all(edge_programs, compile_specs))


class MixedUp(Grouped):
    def regroup(self, results: Any) -> Any:
        return dict(zip(results, reversed(results.values()), strict=True))


class Dropping(Grouped):
    def regroup(self, results: Any) -> Any:
        return {method: found[:1] for method, found in results.items()}


class Lines(ToyBackend):
    """Writes a line for each thing, so that a part of a payload is a payload."""

    def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
        head, inputs, weights, steps, _ = json.loads(super().preprocess(program, compile_specs).processed_bytes)
        lines = [[head], inputs, weights, *steps]
        return PreprocessResult("\n".join(map(json.dumps, lines)).encode())


class LinesDelegate(ToyDelegate):
    """Reads as many lines as it can, and returns what was computed last."""

    def compile(self, processed: bytes, compile_specs: Any, context: Any) -> Any:
        read = [json.loads(line) for line in processed.split(b"\n") if line.endswith(b"]") or line.endswith(b"}")]
        (head,), inputs, weights, *steps = read
        text = json.dumps([head, inputs, weights, steps, [steps[-1][0]]])
        return super().compile(text.encode(), compile_specs, context)


class FixedShape(ToyDelegate):
    """Gives outputs the shapes of the first call."""

    def compile(self, processed: bytes, compile_specs: Any, context: Any) -> Any:
        return [super().compile(processed, compile_specs, context), None]

    def execute(self, handle: Any, inputs: Any) -> Any:
        outputs = super().execute(handle[0], inputs)
        handle[1] = handle[1] or [output.shape for output in outputs]
        fixed = [output.new_zeros(shape) for output, shape in zip(outputs, handle[1], strict=True)]
        for whole, output in zip(fixed, outputs, strict=True):
            least = min(len(whole), len(output)) if output.dim() else None
            whole[:least].copy_(output[:least]) if output.dim() else whole.copy_(output)
        return fixed


class Shared(ReferenceDelegate):
    """Keeps state by payload, for all programs of the process."""

    states: dict[bytes, Any] = {}  # noqa: RUF012

    def compile(self, processed: bytes, compile_specs: Any, context: Any) -> Any:
        made = super().compile(processed, compile_specs, context)
        return dataclasses.replace(made, states=self.states.setdefault(processed, made.states))


class Cached(ToyDelegate):
    """Makes one handle for equal payloads, and empties it when the first program is dropped."""

    def __init__(self) -> None:
        self.handles: dict[bytes, list[Any]] = {}

    def compile(self, processed: bytes, compile_specs: Any, context: Any) -> Any:
        made = super().compile(processed, compile_specs, context)
        return self.handles.setdefault(processed, [made])

    def execute(self, handle: Any, inputs: Any) -> Any:
        return super().execute(handle[0], inputs)

    def destroy(self, handle: Any) -> None:
        handle.clear()


class Handle(list):
    """A handle that weak references can be made of."""


class Keeping(ToyDelegate):
    """Never lets go of a handle."""

    def __init__(self) -> None:
        self.handles: list[Any] = []

    def compile(self, processed: bytes, compile_specs: Any, context: Any) -> Any:
        self.handles.append(Handle(super().compile(processed, compile_specs, context)))
        return self.handles[-1]


class KeepingPrograms(ToyDelegate):
    """Keeps every program that is loaded, so that none of its handles is destroyed."""

    programs: list[Any] = []  # noqa: RUF012

    def execute(self, handle: Any, inputs: Any) -> Any:
        frame = sys._getframe()
        while frame is not None:
            self.programs += [value for value in frame.f_locals.values() if isinstance(value, LoadedProgram)]
            frame = frame.f_back
        return super().execute(handle, inputs)


class Twice(ToyDelegate):
    """Lets go of a handle that it no longer has."""

    def destroy(self, handle: Any) -> None:
        held = [handle]
        held.remove(handle)
        held.remove(handle)


class Single(ToyDelegate):
    """Computes everything in float32."""

    def execute(self, handle: Any, inputs: Any) -> Any:
        outputs = super().execute(handle, [value.float() for value in inputs])
        return [output.to(inputs[0].dtype) for output in outputs]


def recording(identifier: Any) -> type[ToyDelegate]:
    """Return a delegate that records an event under an identifier."""

    class Recording(ToyDelegate):
        def compile(self, processed: bytes, compile_specs: Any, context: Any) -> Any:
            return super().compile(processed, compile_specs, context), context

        def execute(self, handle: Any, inputs: Any) -> Any:
            made, context = handle
            with context.event(identifier):
                return super().execute(made, inputs)

    return Recording


class Lenient(ToyDelegate):
    """Leaves inputs out that a payload does not name."""

    def execute(self, handle: Any, inputs: Any) -> Any:
        return super().execute(handle, inputs[: len(handle[0])])


class Table(ToyBackend):
    """Has no operator, and says so with a KeyError."""

    def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
        try:
            return super().preprocess(program, compile_specs)
        except NotImplementedError as error:
            raise KeyError("aten.abs.default") from error


def handles(change: Any) -> type[ToyBackend]:
    """Return a backend that has a debug handle map, changed."""

    class Handles(ToyBackend):
        def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
            payload = super().preprocess(program, compile_specs).processed_bytes
            nodes = [node for node in program.graph.nodes if node.op == "call_function"]
            return PreprocessResult(payload, {node.name: change(node.meta["debug_handle"]) for node in nodes})

    return Handles


class Views(ReferenceDelegate):
    """Keeps a view of an input as its state, where that is what is written to the state."""

    def execute(self, handle: Any, inputs: Any) -> Any:
        outputs = super().execute(handle, inputs)
        for number, state in enumerate(handle.states):
            for value in inputs:
                for view in (value, value.t() if value.dim() == 2 else value):
                    if torch.equal(view, state):
                        handle.states[number] = view
        return outputs


def no_broadcasting(execute: Any, handle: Any, inputs: Any) -> Any:
    if len({value.shape for value in inputs}) > 1:
        raise RuntimeError("shapes differ")
    return execute(handle, inputs)


def writing(execute: Any, handle: Any, inputs: Any) -> Any:
    outputs = [output.clone() for output in execute(handle, inputs)]
    inputs[0].zero_()
    return outputs


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """Read memory as if it had no strides."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape).stride())


WRONG = {
    "swaps inputs": (changed(swapped), ToyDelegate, "ops/sub", "numbers"),
    "ignores a weight": (reading(torch.zeros_like), ToyDelegate, "weights/buffer", "numbers"),
    "ignores strides of a weight": (reading(packed), ToyDelegate, "weights/transposed", "numbers"),
    "returns another type": (
        ToyBackend, executing(lambda run, *a: [value.float() for value in run(*a)]), "dtype/float16", "outputs",
    ),
    "computes float64 in float32": (ToyBackend, Single, "dtype/float64", "numbers"),
    "computes int32 in float32": (ToyBackend, Single, "dtype/int32", "numbers"),
    "forgets broadcasting": (ToyBackend, executing(no_broadcasting), "ops/add-broadcast", "execute"),
    "returns too few outputs": (
        ToyBackend, executing(lambda run, *a: run(*a)[:-1]), "degenerate/output-order", "outputs",
    ),
    "returns outputs in another order": (
        ToyBackend, executing(lambda run, *a: run(*a)[::-1]), "degenerate/output-order", "numbers",
    ),
    "has fixed shapes": (ToyBackend, FixedShape, "dynamic/batch", "numbers"),
    "writes into a weight": (reading(lambda tensor: tensor.mul_(2)), ToyDelegate, "weights/buffer", "contract"),
    "writes into an input": (ToyBackend, executing(writing), "ops/sub", "inputs"),
    "keeps a view of an input": (ReferenceBackend, Views, "state/view-of-an-input", "numbers"),
    "names handles that do not exist": (handles(lambda handle: (handle, 999)), ToyDelegate, "ops/sub", "contract"),
    "names handles one too high": (handles(lambda handle: handle + 1), ToyDelegate, "partitions/alike", "contract"),
    "names no handles": (handles(str), ToyDelegate, "ops/sub", "contract"),
    "makes other bytes each time": (Stamped, ToyDelegate, "ops/sub", "determinism"),
    "mixes up methods": (MixedUp, ToyDelegate, "methods/two", "numbers"),
    "drops the second partition": (Dropping, ToyDelegate, "partitions/alike", "contract"),
    "takes a part of a payload": (Lines, LinesDelegate, "errors/truncated-payload", "payload"),
    "takes too many inputs": (ToyBackend, Lenient, "errors/wrong-number-of-inputs", "inputs"),
    "shares a handle that it empties": (ToyBackend, Cached, "life/two-programs", "execute"),
    "never lets go": (ToyBackend, Keeping, "life/handles", "destroy"),
    "keeps programs": (ToyBackend, KeepingPrograms, "life/handles", "destroy"),
    "records an unknown identifier": (ToyBackend, recording("nobody's"), "life/profile", "profile"),
    "lets go twice": (ToyBackend, Twice, "life/two-programs", "destroy"),
    "raises a KeyError": (Table, ToyDelegate, "ops/abs", "preprocess"),
    "names data by weights": (ScriptBackend, ScriptDelegate, "methods/same-name-other-weight", "emit"),
}  # fmt: skip


def failures(report: ConformanceReport) -> dict[str, str]:
    return {result.name: result.check for result in report.results if result.status == "failed"}


def test_the_right_one_passes(capsys: pytest.CaptureFixture[str]) -> None:
    report = check_backend(ToyBackend, ToyDelegate, cases=CHOSEN)
    assert not capsys.readouterr().out  # what the runtime says of damaged payloads goes to stderr
    assert report.skipped == ("ops/abs",)


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_caught_and_its_case_named(mistake: str) -> None:
    backend, delegate, name, check = WRONG[mistake]
    with pytest.raises(ConformanceError) as caught:
        check_backend(backend, delegate, cases=[name, "degenerate/scalar"])
    report = caught.value.report
    assert failures(report).get(name) == check, str(report)
    assert f"{name} [{check}]: " in str(caught.value) and "It demands: " in str(caught.value)


def test_mistakes_that_few_programs_show_fail_in_few_cases() -> None:
    for mistake in ("ignores strides of a weight", "has fixed shapes", "mixes up methods"):
        backend, delegate, *_ = WRONG[mistake]
        found = failures(outcome(backend, delegate, cases=CHOSEN))
        assert 1 <= len(found) <= 2, (mistake, found)


def test_state_that_programs_share() -> None:
    assert check_backend(ReferenceBackend, ReferenceDelegate, cases=["state/*"]).conforms
    with pytest.raises(ConformanceError) as caught:
        check_backend(ReferenceBackend, Shared, cases=["state/*"])
    assert "state/counter" in failures(caught.value.report)
    assert "in the second program of two" in str(caught.value)


def test_a_backend_that_takes_nothing() -> None:
    with pytest.raises(ConformanceError, match="No case passed"):
        check_backend(ToyBackend, ToyDelegate, cases=["ops/abs", "ops/sum"])


def test_a_feature_that_no_case_could_show_is_not_covered() -> None:
    relu = {"supports": ops("aten.relu.default")}
    report = outcome("reference", **relu, cases=["weights/*", "errors/*", "partitions/alike"])
    assert report.uncovered == ("weights",) and not report.conforms and not report.failed
    assert "Not covered: of weights, no case could be tried" in str(report) and "of what the suite knows" in str(report)
    assert {result.made_of for result in report.results if result.status == "passed"} == {"relu"}
    chosen = outcome("reference", **relu, cases=["weights/buffer", "partitions/alike"])
    assert chosen.conforms and chosen.passed == ("partitions/alike",)


def test_operators_that_take_a_weight_and_no_size_but_theirs() -> None:
    report = outcome("reference", supports=ops("aten.bmm") & constant_weights("mat2"))
    assert not report.failed and "an operator of any number of rows" in str(report)


class Absent(ToyDelegate):
    """Nothing of it is right, and it is never asked."""

    def is_available(self) -> bool:
        return False

    def execute(self, handle: Any, inputs: Any) -> Any:
        raise RuntimeError("wrong")


def test_a_delegate_that_is_not_available_does_not_pass() -> None:
    for make in (check_backend, conformance_tests):
        with pytest.raises(InputError, match=r"nothing would be executed with .*Absent.*not available on this machine"):
            make(ToyBackend, Absent, cases=["ops/sub", "ops/abs"])


def test_messages_say_what_to_do() -> None:
    text = str(outcome(Table, ToyDelegate, cases=["ops/abs", "ops/sub"]))
    assert "raise a NotImplementedError or an exir_lowering.InputError that names the operator" in text
    assert "1 passed, 1 failed, 0 skipped (executed by ExecuTorch's runtime" in text
    text = str(outcome(ToyBackend, Lenient, cases=["errors/wrong-number-of-inputs"]))
    assert "write their number into the payload" in text


def test_what_a_partitioner_claims_is_not_to_be_refused() -> None:
    assert check_backend(ToyBackend, ToyDelegate, supports=ops("aten.sub"), cases=CHOSEN[:3]).passed == ("ops/sub",)
    report = outcome(ToyBackend, ToyDelegate, supports=ops("aten.abs"), cases=["ops/abs"])
    assert failures(report) == {"ops/abs": "preprocess"}
    assert "leave that on the host" in str(report)


def test_a_case_of_ones_own() -> None:
    (known,) = (case for case in CASES if case.name == "ops/sub")
    own = dataclasses.replace(known, name="mine/sub", demand="Mine.")
    assert check_backend(ToyBackend, ToyDelegate, cases=[own]).passed == ("mine/sub",)


@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        ((int,), {}, "expected an exir_lowering.Backend"),
        ((ToyBackend, ReferenceDelegate), {}, "expected that of the backend, 'toy'"),
        ((ToyBackend, ToyDelegate), {"cases": ["ops/ad"]}, "no case is called 'ops/ad'"),
        ((ToyBackend, ToyDelegate), {"partitioner": 3}, "expected an ExecuTorch Partitioner"),
        ((ToyBackend, ToyDelegate), {"partitioner": "xnnpack", "supports": ops("aten.add")}, "one of them"),
        ((ToyBackend, ToyDelegate), {"cases": 3}, "got cases=3, expected names such as 'ops/add'"),
        ((ToyBackend, ToyDelegate), {"atol": "x"}, "got atol='x', expected a number"),
        ((ToyBackend, ToyDelegate), {"rtol": -1.0}, "got rtol=-1.0, expected a number"),
        (
            (ToyBackend, ToyDelegate),
            {"cases": [Case("mine/sub", "Mine.", dict, check="nmbers")]},
            "the case 'mine/sub' has the check 'nmbers', expected one of numbers, ",
        ),
        (
            (ToyBackend, ToyDelegate),
            {"cases": [Case("mine/sub", "Mine.", dict), Case("mine/sub", "Yours.", dict)]},
            "two cases are called 'mine/sub'",
        ),
        (("XnnpackBackend", ToyDelegate), {}, "has 'XnnpackBackend' itself"),
    ],
)
def test_wrong_arguments(arguments: Any, options: Any, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        check_backend(*arguments, **options)
    with pytest.raises(UnknownPluginError, match="Did you mean 'reference'"):
        check_backend("referenc")


def test_as_pytest_tests(tmp_path: Path) -> None:
    contracts = Path(__file__).parent
    (tmp_path / "test_mine.py").write_text(
        "import sys\n"
        f"sys.path[:0] = [{str(contracts)!r}]\n"
        "from toy import ToyBackend, ToyDelegate\n"
        "from exir_lowering.testing import conformance_tests\n"
        "class Wrong(ToyDelegate):\n"
        "    def execute(self, handle, inputs):\n"
        "        return super().execute(handle, inputs[::-1])\n"
        "test_right = conformance_tests(ToyBackend, ToyDelegate)\n"
        "test_wrong = conformance_tests(ToyBackend, Wrong)\n"
    )
    options = ["-q", "-rs", "-p", "no:cacheprovider", "-k", "ops/sub or ops/abs"]
    done = forked.run(f"import pytest, sys\nsys.exit(pytest.main({options}))", cwd=tmp_path)
    assert "1 failed, 1 passed, 2 skipped" in done.stdout, done.stdout[-3000:]
    assert "failed ops/sub [numbers]" in done.stdout and "toy does not have aten.abs.default" in done.stdout


def test_the_suite_is_not_loaded_by_the_package() -> None:
    code = (
        "import sys, exir_lowering.cli, exir_lowering.compat, exir_lowering.runtime\n"
        "assert 'exir_lowering.testing' not in sys.modules\n"
        "import exir_lowering.testing\n"
        "assert 'pytest' not in sys.modules\n"
    )
    done = forked.run(code, fresh=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_something_has_to_pass() -> None:
    tests = conformance_tests(ToyBackend, ToyDelegate, cases=["ops/abs"])
    with pytest.raises(ConformanceError, match="No case passed"):
        tests("suite/something-passes")
