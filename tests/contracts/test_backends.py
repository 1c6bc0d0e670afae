"""Every backend of this package, one of ExecuTorch's, and the smallest one there is, in the suite for backends."""

from pathlib import Path

from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from toy import ToyBackend, ToyDelegate

from exir_lowering.backends.echo import EchoBackend
from exir_lowering.testing import check_backend, conformance_tests

test_reference = conformance_tests("reference")
test_toy = conformance_tests(ToyBackend, ToyDelegate)
# On models it is compared with eager and with ExecuTorch elsewhere.
test_xnnpack = conformance_tests(
    XnnpackBackend, partitioner="xnnpack", cases=["dynamic/*", "weights/*", "partitions/*", "methods/*", "state/*"]
)


def test_the_toy_is_short() -> None:
    assert len((Path(__file__).parent / "toy.py").read_text().splitlines()) < 60


def test_the_yardstick_takes_everything() -> None:
    """What the reference backend skips would never have been run."""
    report = check_backend("reference", cases=["dtype/*", "degenerate/*", "state/*", "nested/*", "errors/*"])
    assert report.conforms and not report.skipped
    assert all(result.delegated for result in report.results)


def test_a_backend_that_nothing_executes_is_lowered_only() -> None:
    report = check_backend(EchoBackend, cases=["ops/add", "methods/*", "state/counter"])
    assert report.note and len(report.lowered) == 6 and not report.passed and not report.skipped
    assert "0 passed, 0 failed, 6 lowered, 0 skipped" in str(report)
    assert "lowered only: the ExecuTorch runtime here does not have it" in str(report)
