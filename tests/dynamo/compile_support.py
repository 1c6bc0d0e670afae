"""What the tests of torch.compile share: a clean start, what was delegated, comparisons, training."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from exir_lowering.backends.reference import ReferenceBackend
from exir_lowering.dynamo import backend, reports
from exir_lowering.lowered_module.bundled import tolerance


def compiled(model: Any, *, fullgraph: bool = False, dynamic: bool | None = False, **options: Any) -> Any:
    """Compile every partition, without a fallback unless the options have one: what cannot be lowered is an error."""
    settings = {"fallback": None, "partitions": "all", **options}
    return torch.compile(model, backend=backend, fullgraph=fullgraph, dynamic=dynamic, options=settings)


def delegated(kind: str | None = None) -> list[str]:
    """Return the backend of each partition, in all graphs or in those of one kind."""
    return [
        partition.backend_id
        for report in reports()
        for name, lowered in report.reports
        if kind is None or name == kind
        for method in lowered.methods
        for partition in method.partitions
    ]


def delegated_operators(backend_id: str) -> str:
    """Return the operators in the partitions of a backend, as one text to search in."""
    return " ".join(
        node
        for report in reports()
        for _, lowered in report.reports
        for method in lowered.methods
        for partition in method.partitions
        if partition.backend_id == backend_id
        for node in partition.nodes
    )


def reasons() -> list[str]:
    """Return why graphs were not compiled as asked."""
    return [fallback.reason for report in reports() for fallback in report.fallbacks]


def assert_near(got: Any, want: Any) -> None:
    """Compare tensors, or collections of them, by the table of tolerances."""
    if isinstance(want, torch.Tensor):
        allowed = tolerance(want.dtype)
        torch.testing.assert_close(got, want, rtol=allowed, atol=allowed)
    elif isinstance(want, Mapping):
        assert list(got) == list(want)
        for name in want:
            assert_near(got[name], want[name])
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_near(one, other)
    elif isinstance(want, float):
        assert_near(torch.tensor(got), torch.tensor(want))
    else:
        assert got == want


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the gradients of all parameters, and forget them in the model."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the parameters and buffers."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(
    model: torch.nn.Module, loss: Callable[[], torch.Tensor], optimizer: type[torch.optim.Optimizer], **settings: Any
) -> list[float]:
    """Take ten steps; return the losses."""
    stepping = optimizer(model.parameters(), **settings)
    losses = []
    for _ in range(10):
        stepping.zero_grad()
        value = loss()
        value.backward()
        stepping.step()
        losses.append(value.item())
    return losses


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Start and end without compiled functions and reports."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Recording(ReferenceBackend):
    """The reference backend, which notes how many partitions of each graph it is asked for in each call.

    Args:
        seen: Called with each partition.
    """

    def __init__(self, seen: Callable[[Any], None] = lambda program: None) -> None:
        self.calls: list[dict[str, int]] = []
        self.seen = seen

    def preprocess_all(self, edge_programs: Any, compile_specs: Any, *, context: Any = None) -> Any:
        self.calls.append({method: len(programs) for method, programs in edge_programs.items()})
        for program in itertools.chain(*edge_programs.values()):
            self.seen(program)
        return super().preprocess_all(edge_programs, compile_specs, context=context)
