"""Passes of XNNPACK that are left out: they would have changed nothing, and only those that were checked are."""

from __future__ import annotations

import importlib
import pkgutil
import unittest
from typing import Any

import models
import pytest
import quantized_models
import torch
from executorch.backends.xnnpack import _passes
from executorch.backends.xnnpack.partition.graphs import bilinear_2d, sdpa
from executorch.backends.xnnpack.test import ops as operator_tests
from executorch.backends.xnnpack.test.tester import Tester
from executorch.exir.pass_base import ExportPass
from skipped_passes import proving
from torch.fx.passes.infra.pass_base import PassResult

from exir_lowering import lower
from exir_lowering._upstream import pins
from exir_lowering.fast import accelerated, xnnpack_passes


def test_every_pass_has_a_condition() -> None:
    manager = _passes.XNNPACKPassManager(None)
    assert {kind.__name__ for kind in manager.passes} == set(xnnpack_passes.CONDITIONS)
    classes = {owner for kind in manager.passes for owner in kind.__mro__[: kind.__mro__.index(ExportPass)]}
    assert {f"{one.__module__}:{one.__name__}" for one in classes} <= set(pins.FEATURES["passes of XNNPACK"].code)


def test_another_pass_of_the_same_name_is_run() -> None:
    class FuseActivationPass(ExportPass):
        def call(self, graph_module: torch.fx.GraphModule) -> PassResult:
            ran.append(self)
            return PassResult(graph_module, False)

    ran: list[Any] = []
    program = lower(models.exported("mobilenet_v2")[2])["forward"]
    with accelerated():
        for kind in (FuseActivationPass, _passes.FuseActivationPass):
            _passes.XNNPACKPassManager(program, [kind]).transform()
    assert len(ran) == 1


def test_another_version_runs_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xnnpack_passes, "_CHECKED", (("0.0", "2.13.0"),))
    assert xnnpack_passes.replacements() == []


@pytest.mark.parametrize("graphs, name", [(sdpa, "ConvertToSDPAPass"), (bilinear_2d, "ConvertToUpsampleBilinear2d")])
def test_a_pattern_is_never_idle(graphs: Any, name: str) -> None:
    """Each graph that the pass looks for has the operators without which it is left out."""
    for pattern in graphs.get_graphs():
        assert not xnnpack_passes.CONDITIONS[name](getattr(_passes, name), pattern.graph)


def test_patterns_are_not_built_for_a_model_without_them() -> None:
    sdpa.get_graphs.cache_clear()
    bilinear_2d._get_bilinear_2d_graphs.cache_clear()
    lower(models.exported("mobilenet_v2")[2], "xnnpack")
    assert sdpa.get_graphs.cache_info().currsize == 0
    assert bilinear_2d._get_bilinear_2d_graphs.cache_info().currsize == 0


@pytest.mark.parametrize("name", models.MODELS)
def test_passes_of_a_model(name: str) -> None:
    with proving() as left_out:
        lower(models.exported(name)[2], "xnnpack")
    assert len(left_out) > 8


@pytest.mark.parametrize("dynamic", [False, True])
def test_passes_of_a_quantised_model(dynamic: bool) -> None:
    with proving() as left_out:
        lower(quantized_models.quantized(dynamic), quantized_models.partitioners(dynamic))
    assert len(left_out) > 8


FILES = [module.name for module in pkgutil.iter_modules(operator_tests.__path__) if module.name.startswith("test_")]
ALWAYS = ("test_bilinear2d", "test_prelu", "test_sdpa", "test_static_constant_pad")
SLOW = [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.nightly]) for name in FILES]


@pytest.mark.parametrize("file", SLOW)
def test_passes_of_operators(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ExecuTorch's own test inputs, as far as they are lowered; what fails without acceleration fails here too."""
    for stage in ("to_executorch", "serialize", "run_method_and_compare_outputs"):
        monkeypatch.setattr(Tester, stage, lambda self, *args, **kwargs: self)
    torch.manual_seed(0)
    module = importlib.import_module(f"{operator_tests.__name__}.{file}")
    result, suite = unittest.TestResult(), unittest.defaultTestLoader.loadTestsFromModule(module)
    with accelerated(), proving() as left_out:
        suite.run(result)
    broken = [text for _, text in result.failures + result.errors if "is not idle" in text]
    assert not broken, broken[0]
    assert result.testsRun == 0 or left_out
