"""Backends and delegates with an error in one operator; other processes find the delegates here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from executorch.exir.dialects._ops import ops as exir_ops

from exir_lowering import Backend
from exir_lowering.backends.reference import ReferenceBackend, ReferenceDelegate
from exir_lowering.backends.reference.delegate import FORMAT


class Planted(ReferenceBackend):
    """Writes an operator after some others, by which their results are wrong."""

    def __init__(self, *names: str, operator: str = "clamp.default", args: tuple[Any, ...] = (None, 8.0)) -> None:
        self.names, self.args = names, args
        packet, overload = operator.split(".")
        self.operator = getattr(getattr(exir_ops.edge.aten, packet), overload)

    def preprocess(self, program: Any, compile_specs: Any, context: Any = None) -> Any:
        for node in list(program.graph.nodes):
            if node.op == "call_function" and node.name in self.names:
                with program.graph.inserting_after(node):
                    wrong = program.graph.call_function(self.operator, (node, *self.args))
                wrong.meta = dict(node.meta)
                node.replace_all_uses_with(wrong, delete_user_cb=lambda user, wrong=wrong: user is not wrong)
                for spec in program.graph_signature.output_specs:
                    if spec.arg.name == node.name:
                        spec.arg.name = wrong.name
        return super().preprocess(program, compile_specs, context)


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


class Chain(torch.nn.Module):
    """Operators one after the other, each on a line of its own block; `odd` ones are others."""

    def __init__(self, count: int, odd: dict[int, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        odd = odd or {}
        self.blocks = torch.nn.ModuleList(Step(odd.get(number, torch.sin), number) for number in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Step(torch.nn.Module):
    def __init__(self, function: Callable[..., Any], number: int) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


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


class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(50, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.table(ids).sin() * 2).cos()


class WrongBackend(ReferenceBackend):
    backend_id = "wrong"


class WrongDelegate(Wrong):
    delegate_id = "wrong"


class Negating(Backend):
    """XNNPACK's backend, which takes the weight of one operator with the other sign."""

    backend_id = "XnnpackBackend"

    def __init__(self, name: str) -> None:
        self.name = name

    def preprocess(self, program: Any, compile_specs: Any) -> Any:
        targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
        for node in program.graph.nodes:
            if node.op == "call_function" and node.name == self.name:
                weight = node.args[1]
                while weight.op != "placeholder":
                    weight = weight.args[0]
                target = targets[weight.name]
                tensors = program.state_dict if target in program.state_dict else program.constants
                tensors[target] = -tensors[target]
        return XnnpackBackend.preprocess(program, compile_specs)
