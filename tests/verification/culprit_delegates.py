"""Delegates with an error in one operator; processes that run a file find them here, without importing a compiler."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from exir_lowering.backends.reference.delegate import FORMAT, ReferenceDelegate


class _Marked(ReferenceDelegate):
    """Does something wrong in payloads with all of some operators."""

    markers = ("aten.atan.default",)

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, int] = {}

    def compile(self, processed: bytes, *rest: Any) -> Any:
        handle = super().compile(processed, *rest)
        written = str(FORMAT.unpack(processed))
        if all(marker in written for marker in self.markers):
            self.calls[id(handle)] = 0
        return handle

    def execute(self, handle: Any, inputs: list[Any]) -> Any:
        outputs = super().execute(handle, inputs)
        if id(handle) in self.calls:
            self.calls[id(handle)] += 1
            outputs = self.spoil(outputs, self.calls[id(handle)])
        return outputs

    spoil: Callable[..., Any]


class ThirdCall(_Marked):
    def spoil(self, outputs: Any, call: int) -> Any:
        return [output + (call == 3) for output in outputs]


class Fused(_Marked):
    markers = ("aten.atan.default", "aten.erf.default")

    def spoil(self, outputs: Any, call: int) -> Any:
        return [output + 1 for output in outputs]


class Dying(_Marked):
    def spoil(self, outputs: Any, call: int) -> Any:
        if float(max(output.abs().max() for output in outputs)) == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        return outputs


class Hanging(_Marked):
    def spoil(self, outputs: Any, call: int) -> Any:
        time.sleep(3600)


class Failing(_Marked):
    def spoil(self, outputs: Any, call: int) -> Any:
        raise RuntimeError("out of order")


class Wrong(_Marked):
    def spoil(self, outputs: Any, call: int) -> Any:
        return [output + 1 for output in outputs]


class Brittle(Wrong):
    """Ends the process where it has only a few operators."""

    def compile(self, processed: bytes, *rest: Any) -> Any:
        if str(FORMAT.unpack(processed)).count("aten.") < 4:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().compile(processed, *rest)


class Damaging(Wrong):
    """Leaves its process damaged: from its first wrong result on, all are wrong there."""

    damaged = False

    def execute(self, handle: Any, inputs: list[Any]) -> Any:
        Damaging.damaged |= id(handle) in self.calls
        return [output + Damaging.damaged for output in ReferenceDelegate.execute(self, handle, inputs)]


class LastId(ReferenceDelegate):
    """Adds 1 where it reads nothing but the last token id."""

    def execute(self, handle: Any, inputs: list[Any]) -> Any:
        last = any(value.dtype == torch.int64 and bool((value == 49).all()) for value in inputs)
        return [output + last for output in super().execute(handle, inputs)]


class WrongDelegate(Wrong):
    delegate_id = "wrong"
