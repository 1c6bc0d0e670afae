"""Backends for tests of the cache: classes of a module, as a cache knows nothing about what a function defines."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch
from torch.export import ExportedProgram, export

from exir_lowering import Backend, CompileSpec, LoweredMethods, LoweringOptions, PreprocessResult, lower
from exir_lowering.partitioners import SupportPartitioner, ops
from exir_lowering.plugins import PROVENANCE


def missed(lowered: LoweredMethods) -> list[str]:
    """Return the ids of the partitions that were not in the cache."""
    return [use.partition for use in lowered.report.cache if not use.hit]


class _Recorder(logging.Handler):
    """Keeps what is logged: what a class or a module counts would be in the keys of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.args)


_LOG = logging.getLogger("exir_lowering.tests.cached")
_LOG.propagate = False
_LOG.setLevel(logging.INFO)
_LOG.addHandler(_Recorder())
CALLS: list[Any] = _LOG.handlers[-1].records  # type: ignore[attr-defined]
"""The partitions that backends were called with, or how many at once."""


class Tracing(Backend):
    """Writes the operators, the specs and the sizes of the weights, and logs its calls."""

    backend_id = "tracing"
    version = "1"
    unread = PROVENANCE
    padding: ClassVar[int] = 10_000

    def preprocess(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        _LOG.info("%s", program.graph)
        nodes = [node for node in program.graph.nodes if node.op == "call_function"]
        lines = [f"{node.target} {node.meta['debug_handle']}" for node in nodes]
        lines += [f"{spec.key} {spec.value!r}" for spec in compile_specs]
        lines += [str(float(weight.sum())) for weight in program.state_dict.values()]
        handles = {number: (node.meta["debug_handle"],) for number, node in enumerate(nodes)}
        text = "\n".join(lines).encode()
        return PreprocessResult(text + text[-1:] * self.padding, debug_handle_map=handles)


class Names(Tracing):
    """Also reads names."""

    unread = frozenset()

    def preprocess(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        result = super().preprocess(program, compile_specs)
        names = " ".join(node.name for node in program.graph.nodes).encode()
        return PreprocessResult(result.processed_bytes + names, debug_handle_map=result.debug_handle_map)


class Settled(Tracing):
    """Has a setting."""

    def __init__(self, setting: Any) -> None:
        self.setting = setting


class Newer(Tracing):
    """Another version under the same name."""

    version = "2"


Newer.__qualname__ = Tracing.__qualname__


class Failing(Tracing):
    """Fails, after the first partition."""

    def preprocess(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        if any(handler.records for handler in _LOG.handlers):  # type: ignore[attr-defined]
            raise ValueError("no more")
        return super().preprocess(program, compile_specs)


class Independent(Tracing):
    """Lowers all partitions itself, each for itself."""

    independent = True

    def preprocess_all(self, edge_programs: Any, compile_specs: Any, *, context: Any = None) -> Any:
        _LOG.info("%d", sum(map(len, edge_programs.values())))
        return super().preprocess_all(edge_programs, compile_specs, context=context)


def partitioner(*specs: CompileSpec) -> SupportPartitioner:
    """Return what gives linear layers to `Tracing`."""
    return linear("tracing", *specs)


def linear(backend: str, *specs: CompileSpec) -> SupportPartitioner:
    """Return what gives each linear layer to a backend."""
    linear = torch.ops.aten.linear.default
    found = {backend: ops("aten.linear.default")}
    return SupportPartitioner(found, compile_specs={backend: specs}, keep_whole=[linear])


class Layers(torch.nn.Module):
    """Linear layers with what XNNPACK leaves on the host between them, so that each is a partition."""

    def __init__(self, *, inserted: bool = False, width: int = 8, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(5))
        self.inserted = inserted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if self.inserted and number == 2:
                x = x.tanh() * 2
            x = layer(x).relu().cumsum(0)
        return x


def layers(**options: Any) -> ExportedProgram:
    """Return a program of five partitions."""
    width = options.get("width", 8)
    return export(Layers(**options).eval(), (torch.ones(2, width),))


def trace(folder: Any, backend: Backend | None = None, *specs: CompileSpec, **options: Any) -> LoweredMethods:
    """Lower the layers with `Tracing`, or another backend."""
    backend = backend or Tracing()
    CALLS.clear()
    options = {"cache": folder, **options}
    return lower(layers(), partitioner(*specs), backends={"tracing": backend}, options=LoweringOptions(**options))
