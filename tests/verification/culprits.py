"""Backends with an error in one operator, and programs to find it in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from executorch.exir.dialects._ops import ops as exir_ops

from exir_lowering import Backend
from exir_lowering.backends.reference import ReferenceBackend


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


class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(50, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.table(ids).sin() * 2).cos()


class WrongBackend(ReferenceBackend):
    backend_id = "wrong"


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
