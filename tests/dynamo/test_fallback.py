"""What happens when a graph cannot be compiled as asked: the next backend, in order, or an error."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from exir_lowering import (
    Backend,
    BackendFailure,
    BackendUnavailableError,
    CoverageError,
    Delegate,
    InputError,
    LoweringOptions,
    PreprocessResult,
)
from exir_lowering.dynamo import FallbackWarning, backend, graph, reports

INPUT = torch.linspace(-1, 1, 8)


class Failing(Backend):
    """A backend that cannot lower anything."""

    backend_id = "Failing"

    def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
        raise RuntimeError("out of registers")


class Elsewhere(Backend):
    """A backend whose payloads nothing here executes."""

    backend_id = "Elsewhere"

    def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
        return PreprocessResult(b"payload")


class NotHere(Delegate):
    """A delegate that is not available."""

    delegate_id = "Elsewhere"

    def is_available(self) -> bool:
        return False

    def execute(self, handle: Any, inputs: Any) -> Any:
        raise AssertionError("it is never executed")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + x.cos()


def run(*, fullgraph: bool = False, **options: Any) -> None:
    """Compile and call the model, and compare with eager."""
    compiled = torch.compile(model, backend=backend, options=options, fullgraph=fullgraph)
    torch.testing.assert_close(compiled(INPUT), model(INPUT))


def backends_used() -> list[str]:
    return [p.backend_id for r in reports() for _, found in r.reports for m in found.methods for p in m.partitions]


def test_the_next_backend_is_taken_when_one_fails() -> None:
    with pytest.warns(FallbackWarning, match="out of registers"):
        run(backends=[Failing, "reference"])
    (report,) = reports()
    assert report.backend == "exir_lowering"
    assert backends_used() == ["reference"]
    (fallback,) = report.fallbacks
    assert (fallback.attempt, fallback.instead) == ("Failing", "reference")
    assert "return x.sin() + x.cos()" in fallback.reason, "the reason has the line of the model"


def test_the_next_backend_is_taken_when_one_is_not_available() -> None:
    with pytest.warns(FallbackWarning, match="not available on this machine"):
        run(backends=[Elsewhere(), "reference"], delegates=[NotHere])
    assert reports()[0].fallbacks[0].reason.startswith("BackendUnavailableError")
    with pytest.warns(FallbackWarning, match="no-such-backend"):
        torch._dynamo.reset()
        run(backends=["no-such-backend", "reference"])


@pytest.mark.parametrize("last", ["eager", "aot_eager"])
def test_another_torch_compile_backend_comes_last(last: str) -> None:
    with pytest.warns(FallbackWarning, match=f"{last} runs it"):
        run(backends=[Failing(), last])
    assert reports()[0].backend == last
    torch._dynamo.reset()
    with pytest.warns(FallbackWarning, match=f"{last} runs it"):
        run(backends=[Failing()], fallback=last)


def test_another_torch_compile_backend_takes_whole_graphs() -> None:
    with pytest.raises(BackendCompilerFailed, match="must be the last one"):
        run(backends=["eager", "reference"])


@pytest.mark.parametrize(
    "how",
    [{"fallback": None}, {"fullgraph": True}, {"lowering": LoweringOptions(require_coverage=0.1)}],
    ids=["fallback=None", "fullgraph", "coverage"],
)
def test_without_a_fallback_it_is_an_error(how: dict[str, Any]) -> None:
    with pytest.raises(BackendCompilerFailed) as caught:
        run(backends=[Failing()], **how)
    error = caught.value.inner_exception
    assert isinstance(error, BackendFailure)
    assert "out of registers" in str(error) and "return x.sin() + x.cos()" in str(error)
    assert isinstance(error.__cause__, RuntimeError)


def test_what_is_not_available_is_an_error_without_a_fallback() -> None:
    with pytest.raises(BackendCompilerFailed) as caught:
        run(backends=[Elsewhere()], delegates=[NotHere()], fallback=None)
    assert isinstance(caught.value.inner_exception, BackendUnavailableError)


def test_a_required_coverage_is_an_error_with_the_plan() -> None:
    from exir_lowering.partitioners import SupportPartitioner, ops

    with pytest.raises(BackendCompilerFailed) as caught:
        run(
            partitioners=SupportPartitioner({"reference": ops("aten.sin")}),
            lowering=LoweringOptions(require_coverage=1.0),
        )
    error = caught.value.inner_exception
    assert isinstance(error, CoverageError)
    assert [node.operator for node in error.plan.methods[0].host] == ["aten.cos.default", "aten.add.Tensor"]


def test_a_graph_that_cannot_be_lowered_falls_back_with_the_line() -> None:
    def spectrum(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x).abs()

    with pytest.warns(FallbackWarning, match="complex64"):
        compiled = torch.compile(spectrum, backend=backend, options={"partitioners": "reference"})
        torch.testing.assert_close(compiled(INPUT), spectrum(INPUT))
    (fallback,) = reports()[0].fallbacks
    assert "return torch.fft.fft(x).abs()" in fallback.source
    torch._dynamo.reset()
    compiled = torch.compile(spectrum, backend=backend, options={"partitioners": "reference"}, fullgraph=True)
    with pytest.raises(BackendCompilerFailed, match="complex64"):
        compiled(INPUT)


def test_a_backward_graph_that_cannot_be_lowered_falls_back_alone() -> None:
    class ForwardOnly(Failing):
        """A backend that fails on the operators of this model's backward graph."""

        backend_id = "reference"

        def preprocess(self, program: Any, compile_specs: Any, context: Any = None) -> PreprocessResult:
            from exir_lowering.backends.reference import ReferenceBackend

            if any("neg" in str(node.target) for node in program.graph.nodes):
                raise RuntimeError("no negation")
            return ReferenceBackend().preprocess(program, compile_specs, context)

    x, y = INPUT.clone().requires_grad_(), INPUT.clone().requires_grad_()
    options = {"partitioners": "reference", "backends": {"reference": ForwardOnly()}}
    with pytest.warns(FallbackWarning, match="no negation"):
        torch.compile(model, backend=backend, options=options)(x).sum().backward()
    model(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    (report,) = reports()
    assert report.backend == "exir_lowering"
    assert [(fallback.graph, fallback.instead) for fallback in report.fallbacks] == [("backward", "eager")]
    assert [kind for kind, _ in report.reports] == ["forward"]


def test_there_are_no_modes() -> None:
    with pytest.warns(UserWarning, match=r"mode='max-autotune'\): the backend 'exir_lowering' has no modes"):
        torch.compile(model, backend=backend, mode="max-autotune")(INPUT)
    assert [report.backend for report in reports()] == ["exir_lowering"]


def test_what_nobody_has_foreseen_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of ours: with fullgraph it is an error that says where it comes from."""

    def fail(*given: Any) -> Any:
        raise NameError("name 's97' is not defined")

    monkeypatch.setattr(graph, "compile_graphs", fail)
    with pytest.warns(FallbackWarning, match="NameError: name 's97' is not defined. Please report"):
        run()
    assert [report.backend for report in reports()] == ["eager"]
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="s97") as caught:
        run(fullgraph=True)
    assert isinstance(caught.value.inner_exception, InputError)
