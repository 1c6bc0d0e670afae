"""Backends of this package in ExecuTorch's own lowering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from torch.export import export

import exir_lowering
from exir_lowering import Backend, InputError, LoweringOptions, PreprocessResult
from exir_lowering.backends.reference import ReferenceBackend, ReferenceDelegate
from exir_lowering.compat import as_backend_details
from exir_lowering.partitioners import SupportPartitioner, everything


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(64, 64)
        self.register_buffer("total", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.sum(0))
        return torch.sigmoid(self.inner(x)) + self.total


class Own(ReferenceBackend):
    backend_id = "OwnReference"


class OwnDelegate(ReferenceDelegate):
    delegate_id = "OwnReference"


def lower_there(backend_id: str) -> bytes:
    model = Model().eval()
    programs = {name: export(model, (torch.ones(2, 64),)) for name in ("prefill", "decode")}
    partitioner = {name: [SupportPartitioner({backend_id: everything()})] for name in programs}
    return bytes(to_edge_transform_and_lower(programs, partitioner=partitioner).to_executorch().buffer)


def test_executorch_lowers_with_a_backend_of_this_package() -> None:
    torch.manual_seed(0)
    made = as_backend_details(Own)
    assert made is as_backend_details(Own())
    torch.manual_seed(0)
    file = lower_there("OwnReference")
    assert len(file) < 1.6 * 64 * 64 * 4, "a weight is in the file once, for both methods"
    torch.manual_seed(0)
    model, program = Model().eval(), exir_lowering.load(file, delegates=[OwnDelegate])
    for number in range(3):
        x = torch.full((2, 64), float(number))
        torch.testing.assert_close(program.run("decode", x)[0], model(x))


def test_another_one_of_the_same_id_takes_its_place(tmp_path: Path) -> None:
    class First(Backend):
        backend_id = "Replaced"

        def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
            return PreprocessResult(b"the first")

    class Second(First):
        def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
            return PreprocessResult(b"the second")

    options, program = LoweringOptions(cache=tmp_path), export(Model().eval(), (torch.ones(2, 64),))
    for backend, payload in ((First, b"the first"), (Second(), b"the second")):
        as_backend_details(backend)
        assert payload in lower_there("Replaced")
        as_backend_details("Replaced")  # which is found by what was made of it
        assert payload in lower_there("Replaced")
        lowered = exir_lowering.lower(program, SupportPartitioner({"Replaced": everything()}), options=options)
        assert payload in lowered.emit().buffer


@pytest.mark.parametrize("wrong", [3, None, torch.nn.ReLU, object(), ""])
def test_what_is_no_backend(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"as_backend_details: got .*expected an exir_lowering.Backend"):
        as_backend_details(wrong)


def test_an_id_that_executorch_has() -> None:
    from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend

    class Mine(Own):
        backend_id = XnnpackBackend.__name__

    with pytest.raises(InputError, match=r"has a backend 'XnnpackBackend' already, executorch.*Give yours another id"):
        as_backend_details(Mine)
