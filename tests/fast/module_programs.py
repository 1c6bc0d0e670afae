"""Programs of modules: those of ExecuTorch's XNNPACK tests, quantised ones too, and the layers of torch.nn."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import random
import unittest
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.export import ExportedProgram, export


class _Captured(BaseException):
    """Ends a test as soon as it has a program."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        self.program = program


@functools.cache
def tests() -> Sequence[unittest.TestCase]:
    """Return ExecuTorch's tests of XNNPACK's operators and models."""
    from executorch.backends.xnnpack.test import ops, passes

    found: list[unittest.TestCase] = []
    for package in (ops, passes):
        for entry in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            try:
                module = importlib.import_module(entry.name)
            except ImportError:
                continue
            found += _flat(unittest.defaultTestLoader.loadTestsFromModule(module))
    return sorted(found, key=lambda test: test.id())


def _flat(suite: Any) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _flat(test)
        else:
            yield test


def _program_of(test: unittest.TestCase) -> ExportedProgram:
    from executorch.backends.test.harness import stages

    def capture(stage: Any, artifact: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(artifact, ExportedProgram):
            raise _Captured(artifact)
        raise unittest.SkipTest("no program")

    with patch.object(stages.ToEdgeTransformAndLower, "run", capture), patch.object(stages.ToEdge, "run", capture):
        try:
            test.setUp()
            getattr(test, test._testMethodName)()
        except _Captured as captured:
            return captured.program
    raise unittest.SkipTest("no program")


@functools.cache
def layers() -> Sequence[Any]:
    from torch.testing._internal.common_modules import module_db

    return sorted(module_db, key=lambda info: info.name)


class _Call(nn.Module):
    """Calls a layer with arguments some of which are no tensors."""

    def __init__(self, layer: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.layer, self.kwargs = layer, kwargs
        self.others = [None if isinstance(value, torch.Tensor) else value for value in args]
        self.places = [index for index, value in enumerate(args) if isinstance(value, torch.Tensor)]

    def forward(self, *tensors: torch.Tensor) -> Any:
        args = list(self.others)
        for index, tensor in zip(self.places, tensors, strict=True):
            args[index] = tensor
        return self.layer(*args, **self.kwargs)


def _layer(seed: int) -> tuple[str, ExportedProgram]:
    random_ = random.Random(seed)
    torch.manual_seed(seed)
    info = layers()[seed % len(layers())]
    training = random_.random() < 0.3
    dtype = random_.choice([d for d in (torch.float32, torch.float32, torch.float16) if d in info.dtypes])
    samples = info.module_inputs_func(info, "cpu", dtype, False, training)
    sample = random_.choice(list(samples))
    layer = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
    layer = layer.to(dtype).train(training)
    args, kwargs = sample.forward_input.args, sample.forward_input.kwargs
    module = _Call(layer, args, kwargs)
    inputs = tuple(value for value in args if isinstance(value, torch.Tensor))
    return f"{info.name} {dtype}{' training' * training}", export(module, inputs, strict=False)


def make(seed: int) -> tuple[str, ExportedProgram]:
    """Make the program of a seed: a layer if it is odd, that of a test if it is even."""
    if seed % 2:
        return _layer(seed // 2)
    test = tests()[seed // 2 % len(tests())]
    return test.id().removeprefix("executorch.backends.xnnpack.test."), _program_of(test)
