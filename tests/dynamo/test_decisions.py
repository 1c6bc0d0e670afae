"""A partitioner that decides by a size of the inputs: what it decided is not used for inputs of other sizes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx import Node

from exir_lowering import Backend, Delegate, PreprocessResult
from exir_lowering.dynamo import FallbackWarning, backend, reports
from exir_lowering.partitioners import SupportPartitioner


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Rows(Backend):
    """Writes into its payload whether there are four rows, as it asks the program."""

    backend_id = "Rows"

    def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
        output = program.graph.output_node().args[0][0]
        return PreprocessResult(b"4" if output.meta["val"].shape[0] == 4 else b"-")


class RowsDelegate(Delegate):
    """Computes sines, of as many rows as the payload says."""

    delegate_id = "Rows"

    def compile(self, processed: bytes, compile_specs: Any, context: Any) -> bytes:
        return bytes(processed)

    def execute(self, handle: bytes, inputs: Any) -> Any:
        return [torch.sin(inputs[0]) if handle != b"4" else torch.sin(inputs[0].reshape(4, -1))]


def _sine(node: Node) -> bool:
    return "sin" in str(node.target)


def _of_four(node: Node) -> bool:
    return bool(_sine(node) and node.meta["val"].shape[0] == 4)


def _of_even(node: Node) -> bool:
    return bool(_sine(node) and node.meta["val"].shape[0] % 2 == 0)


def _compile(support: Callable[[Node], bool], backend_id: str = "reference", **how: Any) -> Any:
    options = {
        "partitioners": SupportPartitioner({backend_id: support}),
        "backends": {"Rows": Rows()},
        "delegates": {"Rows": RowsDelegate()},
    }
    return torch.compile(lambda x: torch.sin(x) + 1, backend=backend, options=options, **how)


def _run(compiled: Any, sizes: tuple[int, ...], *, training: bool = False, mark: bool = False) -> list[int]:
    """Call with inputs of these numbers of rows; return how many partitions each compilation made."""
    for rows in sizes:
        x = torch.linspace(-1, 1, rows * 3).view(rows, 3).requires_grad_(training)
        if mark:
            torch._dynamo.mark_dynamic(x, 0)
        y = compiled(x)
        torch.testing.assert_close(y, torch.sin(x) + 1)
        if training:
            (gradient,) = torch.autograd.grad(y.sum(), x)
            torch.testing.assert_close(gradient, torch.cos(x))
    return [sum(len(method.partitions) for _, one in each.reports for method in one.methods) for each in reports()]


@pytest.mark.parametrize("training", [False, True])
def test_a_partitioners_decision_holds_for_the_sizes_it_was_made_for(training: bool) -> None:
    assert _run(_compile(_of_four, dynamic=True), (4, 5, 4, 6, 7), training=training) == [1, 0]


def test_a_decision_may_hold_for_many_sizes() -> None:
    assert _run(_compile(_of_even, dynamic=True), (4, 5, 6, 7, 8)) == [1, 0]


def test_a_backends_decision_holds_for_the_sizes_it_was_made_for() -> None:
    assert _run(_compile(_sine, "Rows", dynamic=True), (4, 5, 6, 4)) == [1, 1]


def test_a_marked_size_does_not_become_one_value() -> None:
    with pytest.warns(FallbackWarning, match="lowering fixes a size that was marked as dynamic"):
        _run(_compile(_of_four), (4, 5, 6), mark=True)
    assert [report.backend for report in reports()] == ["eager"]


def test_a_marked_size_may_be_divided_into_many_values() -> None:
    assert _run(_compile(_of_even), (4, 5, 6), mark=True) == [1, 0]
