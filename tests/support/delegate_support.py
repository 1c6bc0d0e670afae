"""Runs lowered programs with their delegates in pure Python: what a runtime does, without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lowering_support import delegates
from random_programs import Interpreter
from torch.fx import Node

from exir_lowering import Delegate, DelegateContext, LoweredMethods
from exir_lowering.graphs import is_delegate_call


def named_data(lowered: LoweredMethods) -> dict[str, bytes]:
    """Return the named data of all delegates; one key means one content."""
    found: dict[str, bytes] = {}
    for program in lowered.values():
        for delegate in delegates(program):
            store = delegate.named_data_store_output
            if store is not None:
                for key, entry in store.pte_data.items():
                    data = bytes(store.buffers[entry.buffer_index])
                    assert found.setdefault(key, data) == data
    return found


@dataclass
class DelegateInterpreter(Interpreter):
    """Runs one method; each delegate call goes to the `Delegate` of its backend id, compiled once per call site."""

    implementations: Mapping[str, Delegate] = field(default_factory=dict)
    data: Mapping[str, bytes] = field(default_factory=dict)
    method: str = "forward"
    handles: dict[int, Any] = field(default_factory=dict)

    def _node(self, node: Node, args: Any, kwargs: Any) -> Any:
        if not is_delegate_call(node):
            return super()._node(node, args, kwargs)
        lowered, *inputs = args
        delegate = self.implementations[lowered.backend_id]
        if id(lowered) not in self.handles:
            context = DelegateContext(self.method, self.data.get)
            self.handles[id(lowered)] = delegate.compile(lowered.processed_bytes, lowered.compile_specs, context)
        # The runtime's memory: what is handed in is gone after the call.
        lent = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
        outputs = [
            value.clone() if isinstance(value, torch.Tensor) else value
            for value in delegate.execute(self.handles[id(lowered)], lent)
        ]
        for value in lent:
            if isinstance(value, torch.Tensor):
                value.zero_()
        return outputs


def runner(lowered: LoweredMethods, method: str = "forward", **implementations: Delegate) -> DelegateInterpreter:
    """Return a function that runs a method with some delegates, by backend id."""
    return DelegateInterpreter(
        lowered[method], implementations=implementations, data=named_data(lowered), method=method
    )


class Tied(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.whole, self.copied = torch.nn.Parameter(weight), torch.nn.Parameter(weight.clone())
        self.register_buffer("turned", self.whole.detach().t())
        self.register_buffer("part", self.whole.detach()[10:20])
        self.register_buffer("column", torch.randn(64, 64)[:, 3])
        self.register_buffer("wide", torch.randn(64, 1).expand(64, 64))
        self.register_buffer("zeros", torch.zeros(100, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x @ self.whole) @ self.turned + self.column + x @ self.copied + self.wide[:2]
        return y @ self.part.t(), x @ self.zeros.t()
