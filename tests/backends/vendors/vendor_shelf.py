"""The vendors on the shelf, and the two ways to lower for them: ExecuTorch's own, and this package's.

A vendor's backend is what ExecuTorch's wheel has, with its real compiler. Tests and `tests/benchmarks/vendors.py` share
this.
"""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from executorch.exir import to_edge_transform_and_lower
from lowering_support import delegates
from torch import nn
from torch.export import ExportedProgram, export

import exir_lowering
from exir_lowering import LoweringOptions, Partitioner
from exir_lowering.graphs import is_operator, walk
from exir_lowering.plugins import registry

Inputs = tuple[Any, ...]
Methods = Mapping[str, tuple[nn.Module, Inputs]]
"""A model: for each method a module and its inputs."""


def _same(payload: bytes) -> bytes:
    return payload


@dataclass(frozen=True)
class Vendor:
    """A vendor's backend.

    Attributes:
        name: As in tables, and on the command line of the benchmark.
        needs: The modules of its compiler.
        partitioner: Makes its partitioner, for programs that are in "float" or in "int8".
        quantizer: Makes its quantizer; None if it has none.
        precisions: What it takes.
        normalise: Removes from a payload what differs whenever it is made; None if nothing can.
        settings: Makes more arguments of ExecuTorch's `to_edge_transform_and_lower` for it.
    """

    name: str
    needs: tuple[str, ...]
    partitioner: Callable[[str], Partitioner]
    quantizer: Callable[[], Any] | None = None
    precisions: tuple[str, ...] = ("float", "int8")
    normalise: Callable[[bytes], bytes] | None = _same
    settings: Callable[[], Mapping[str, Any]] = dict

    @property
    def missing(self) -> list[str]:
        """The modules that are not installed."""
        return [module for module in self.needs if find_spec(module.partition(".")[0]) is None]


@dataclass(frozen=True)
class Estimate:
    """What Vela's summary says of a network: cycles of an inference, and bytes of SRAM."""

    cycles: float
    sram: float


@dataclass(frozen=True)
class Lowered:
    """What a lowering made.

    Attributes:
        buffer: The file.
        delegates: For each delegate, in order: its payload and its named data with their keys, normalised.
        payload_bytes: The sizes of all of that together, before anything is normalised.
        host: The operators that stay on the host, by method.
        seconds: CPU seconds, from the programs to the file.
        estimates: What Vela estimates, in the order of the delegates.
    """

    buffer: bytes
    delegates: Sequence[tuple[bytes, Sequence[tuple[bytes, bytes]]]]
    payload_bytes: int
    host: Mapping[str, Sequence[str]]
    seconds: float
    estimates: Sequence[Estimate] = ()

    @property
    def cycles(self) -> float:
        """The cycles of all delegates, as Vela estimates them."""
        return sum(one.cycles for one in self.estimates)


def _coreml(precision: str) -> Partitioner:
    import coremltools
    from executorch.backends.apple.coreml.compiler import CoreMLBackend
    from executorch.backends.apple.coreml.partition import CoreMLPartitioner

    # State and int8 need iOS 18.
    specs = CoreMLBackend.generate_compile_specs(minimum_deployment_target=coremltools.target.iOS18)
    return CoreMLPartitioner(compile_specs=specs)


def _coreml_quantizer() -> Any:
    from coremltools.optimize.torch.quantization import LinearQuantizerConfig, QuantizationScheme
    from executorch.backends.apple.coreml.quantizer import CoreMLQuantizer

    symmetric = {"global_config": {"quantization_scheme": QuantizationScheme.symmetric, "milestones": [0, 0, 10, 10]}}
    return CoreMLQuantizer(LinearQuantizerConfig.from_dict(symmetric))


def _coreml_normalise(payload: bytes) -> bytes:
    """Replace the identifiers that Core ML draws for each model, and the day; what is listed is in any order."""
    named = re.sub(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|20\d\d-\d\d-\d\d", b"id", payload)
    return b"\n".join(sorted(named.replace(b"},\n", b"}\n").split(b"\n")))


def _vulkan(precision: str) -> Partitioner:
    return registry.find_partitioner("vulkan")


def _vulkan_quantizer() -> Any:
    from executorch.backends.vulkan.quantizer.vulkan_quantizer import VulkanQuantizer, get_symmetric_quantization_config

    return VulkanQuantizer().set_global(get_symmetric_quantization_config())


def _tosa(precision: str) -> Partitioner:
    from executorch.backends.arm.tosa.compile_spec import TosaCompileSpec
    from executorch.backends.arm.tosa.partitioner import TOSAPartitioner

    return TOSAPartitioner(TosaCompileSpec({"float": "TOSA-1.0+FP", "int8": "TOSA-1.0+INT"}[precision]))


def _tosa_quantizer() -> Any:
    from executorch.backends.arm.quantizer import TOSAQuantizer, get_symmetric_quantization_config
    from executorch.backends.arm.tosa.compile_spec import TosaCompileSpec

    return TOSAQuantizer(TosaCompileSpec("TOSA-1.0+INT")).set_global(get_symmetric_quantization_config())


def _ethos_u(precision: str) -> Partitioner:
    from executorch.backends.arm.ethosu import EthosUCompileSpec, EthosUPartitioner

    return EthosUPartitioner(EthosUCompileSpec("ethos-u55-128"))


def _ethos_u_quantizer() -> Any:
    from executorch.backends.arm.ethosu import EthosUCompileSpec
    from executorch.backends.arm.quantizer import EthosUQuantizer, get_symmetric_quantization_config

    return EthosUQuantizer(EthosUCompileSpec("ethos-u55-128")).set_global(get_symmetric_quantization_config())


def _openvino(precision: str) -> Partitioner:
    from exir_lowering.backends.openvino import openvino

    return openvino()


def _openvino_quantizer() -> Any:
    from executorch.backends.openvino import OpenVINOQuantizer

    return OpenVINOQuantizer()


def _native(precision: str) -> Partitioner:
    from executorch.backends.native.partitioner import NativePartitioner

    return NativePartitioner()


def _native_settings() -> Mapping[str, Any]:
    from executorch.backends.native import get_default_compile_config
    from executorch.backends.native.passes import get_default_passes

    return {"transform_passes": get_default_passes(), "compile_config": get_default_compile_config()}


VENDORS: Mapping[str, Vendor] = {
    vendor.name: vendor
    for vendor in (
        Vendor("coreml", ("coremltools",), _coreml, _coreml_quantizer, normalise=_coreml_normalise),
        Vendor("vulkan", (), _vulkan, _vulkan_quantizer),
        Vendor("tosa", ("tosa_serializer", "tosa_reference_model"), _tosa, _tosa_quantizer),
        Vendor("ethos-u", ("tosa_serializer", "ethosu.vela"), _ethos_u, _ethos_u_quantizer, ("int8",)),
        Vendor("openvino", ("openvino", "nncf"), _openvino, _openvino_quantizer, normalise=None),
        Vendor("native", (), _native, precisions=("float",), settings=_native_settings),
    )
}


def programs_of(vendor: Vendor, methods: Methods, precision: str = "float") -> dict[str, ExportedProgram]:
    """Export the methods of a model, and quantise them with the vendor's own quantizer."""
    with torch.no_grad(), _quiet():
        found = {}
        for name, (module, inputs) in methods.items():
            program = export(module, inputs)
            found[name] = _quantised(vendor, program, inputs) if precision == "int8" else program
        return found


def _quantised(vendor: Vendor, program: ExportedProgram, inputs: Inputs) -> ExportedProgram:
    """Quantise with the smallest and the largest value as ranges; some search for better ones, for minutes."""
    from torchao.quantization.pt2e.observer import HistogramObserver
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    assert vendor.quantizer is not None
    prepared = prepare_pt2e(program.module(check_guards=False), vendor.quantizer())
    prepared(*inputs)
    with patch.object(HistogramObserver, "_non_linear_param_search", lambda found: (found.min_val, found.max_val)):
        return export(convert_pt2e(prepared, fold_quantize=vendor.name != "openvino"), inputs)


def with_executorch(vendor: Vendor, programs: Mapping[str, ExportedProgram], precision: str = "float") -> Lowered:
    """Lower as ExecuTorch's documentation says. It changes the programs."""
    with _quiet(), vela_estimates() as estimates:
        start = time.process_time()
        partitioners = {name: [vendor.partitioner(precision)] for name in programs}
        manager = to_edge_transform_and_lower(dict(programs), partitioner=partitioners, **vendor.settings())
        lowered = {name: manager.exported_program(name) for name in programs}
        found = _read(vendor, lowered)  # emission changes them
        buffer = manager.to_executorch().buffer
    return Lowered(buffer, *found, time.process_time() - start, estimates)


def with_ours(
    vendor: Vendor,
    programs: Mapping[str, ExportedProgram],
    precision: str = "float",
    rewrites: str | Sequence[str] | None = None,
) -> Lowered:
    """Lower with this package; the rewrites are the default ones unless others are given."""
    settings = dict(vendor.settings())
    options = LoweringOptions(rewrites=rewrites, edge_compile_config=settings.pop("compile_config", None))
    with _quiet(), vela_estimates() as estimates:
        start = time.process_time()
        lowered = exir_lowering.lower(programs, vendor.partitioner(precision), options=options, **settings)
        buffer = lowered.emit().buffer
    return Lowered(buffer, *_read(vendor, lowered), time.process_time() - start, estimates)


def _read(vendor: Vendor, programs: Mapping[str, ExportedProgram]) -> tuple[Any, int, dict[str, list[str]]]:
    """Return the delegates of lowered programs, the size of their payloads, and the operators on the host."""
    normalise = vendor.normalise or _same
    found, size = [], 0
    for program in programs.values():
        for delegate in delegates(program):
            stored = delegate.named_data_store_output
            entries = {} if stored is None else {**stored.pte_data}
            named = {key: bytes(stored.buffers[entry.buffer_index]) for key, entry in entries.items()}
            data = sorted((normalise(key.encode()), normalise(value)) for key, value in named.items())
            found.append((normalise(delegate.processed_bytes), data))
            size += len(delegate.processed_bytes) + sum(map(len, named.values()))
    host = {
        name: [
            str(node.target)
            for _, module in walk(program.graph_module)
            for node in module.graph.nodes
            if is_operator(node) and "executorch_call_delegate" not in str(node.target)
        ]
        for name, program in programs.items()
    }
    return found, size, host


@contextlib.contextmanager
def vela_estimates() -> Iterator[list[Estimate]]:
    """Collect what Vela's own summaries say of the networks that are compiled meanwhile."""
    found: list[Estimate] = []
    try:
        from ethosu.vela import vela
    except ImportError:
        yield found
        return
    compile_network = vela.main

    def compile_and_read(arguments: list[str]) -> Any:
        result = compile_network(arguments)
        folder = next(one.removeprefix("--output-dir=") for one in arguments if one.startswith("--output-dir="))
        (summary,) = Path(folder).glob("*summary*.csv")
        (row,) = csv.DictReader(summary.read_text().splitlines())
        found.append(Estimate(float(row["cycles_total"]), float(row["sram_memory_used"])))
        return result

    vela.main = compile_and_read
    try:
        yield found
    finally:
        vela.main = compile_network


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what vendors print, log and warn of from the output."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        said = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
