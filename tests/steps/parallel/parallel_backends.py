"""Backends that worker processes import: slow, failing, dying and writing ones."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lowering_support import TagPartitioner
from torch.export import ExportedProgram, export

from exir_lowering import Backend, CompileSpec, PreprocessResult
from exir_lowering.plugins import BackendContext


def signed(program: ExportedProgram) -> bytes:
    """Return what identifies a partition: its operators and its weights."""
    digest = hashlib.sha256(str([node.target for node in program.graph.nodes]).encode())
    for tensor in program.state_dict.values():
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.digest()


class Sleeping(Backend):
    """Takes the seconds that the compile spec says, without using the processor."""

    backend_id = "sleeping"
    parallel = "process"

    def preprocess(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        for spec in compile_specs:
            if spec.key == "seconds":
                time.sleep(float(spec.value))
        handles = {
            str(n): (node.meta["debug_handle"],)
            for n, node in enumerate(program.graph.nodes)
            if node.op == "call_function"
        }
        return PreprocessResult(signed(program), handles)


class Storing(Backend):
    """Keeps its weights as named data."""

    backend_id = "storing"
    parallel = "process"

    def preprocess(
        self, program: ExportedProgram, compile_specs: list[CompileSpec], *, context: BackendContext
    ) -> PreprocessResult:
        refs = [context.weights.ref(tensor) for tensor in program.state_dict.values()]
        text = repr([ref.to_json() for ref in refs]).encode()
        return PreprocessResult(text, data_store_output=context.weights.named_data(refs))


class StoringInThreads(Storing):
    parallel = "thread"


class Scripted(Backend):
    """Does what the compile spec "do" says, to one partition: the one with the weight of so many rows.

    "raise": raises; "die": ends its process, "die once": unless the file exists, which it makes; "write": writes into
    a weight; "tell": makes a file with its process id, which has the options of its Python; "wait": then sleeps.
    """

    backend_id = "scripted"
    parallel = "process"

    def preprocess(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        specs = {spec.key: spec.value.decode() for spec in compile_specs}
        weight = next(iter(program.state_dict.values()))
        if int(specs.get("rows", -1)) in (-1, weight.shape[0]):
            getattr(self, "_" + specs.get("do", "nothing").replace(" ", "_"))(weight, specs.get("file", ""))
        return PreprocessResult(signed(program))

    def _nothing(self, weight: Any, file: str) -> None:
        pass

    def _raise(self, weight: Any, file: str) -> None:
        raise ValueError(f"cannot lower {tuple(weight.shape)}")

    def _die(self, weight: Any, file: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _die_once(self, weight: Any, file: str) -> None:
        if not Path(file).exists():
            Path(file).touch()
            os._exit(3)

    def _write(self, weight: Any, file: str) -> None:
        weight.detach().add_(1)

    def _tell(self, weight: Any, file: str) -> None:
        Path(f"{file}.{os.getpid()}").write_text(repr((sys.flags, sys._xoptions)))

    def _wait(self, weight: Any, file: str) -> None:
        self._tell(weight, file)
        time.sleep(60)


class ScriptedInThreads(Scripted):
    parallel = "thread"


class Chain(torch.nn.Module):
    """Linear layers of growing sizes; each becomes a partition of its own."""

    def __init__(self, layers: int, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [width + n for n in range(layers + 1)]
        self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return x


def chain(layers: int, width: int = 8) -> ExportedProgram:
    return export(Chain(layers, width).eval(), (torch.randn(2, width),))


def each_layer(backend: str, **specs: object) -> TagPartitioner:
    """Give each linear layer a partition of its own."""

    def tag(node: Any) -> str | None:
        name = str(node.target)
        return f"t{node.meta['debug_handle']}" if "addmm" in name or "permute" in name else None

    compile_specs = [CompileSpec(key, str(value).encode()) for key, value in specs.items()]
    return TagPartitioner(tag, backend, compile_specs=compile_specs)
