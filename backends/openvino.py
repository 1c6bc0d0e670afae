"""ExecuTorch's OpenVINO backend under one word: an extra, `pip install "exir-lowering[openvino]"`."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from threading import Lock
from types import ModuleType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import (
    CompileSpec,
    ExplainedResult,
    InputError,
    Partitioner,
    PluginLoadError,
    Rejection,
    graphs,
    measures,
)
from exir_lowering.partitioners import nested_run

__all__ = ["OpenvinoPartitioner", "openvino"]

INSTALL = 'pip install "exir-lowering[openvino]"'

if find_spec("openvino") is None:
    raise ImportError(f"The backend 'openvino' needs OpenVINO, which is not installed: {INSTALL}.", name="openvino")

_PACKAGE = "executorch.backends.openvino"
_IMPORTING = Lock()


def openvino(device: str = "CPU") -> Partitioner:
    """Return a partitioner that gives OpenVINO what ExecuTorch's `OpenvinoPartitioner` takes.

    Operators whose results have dynamic sizes stay on the host: ExecuTorch's OpenVINO delegate returns results with
    the upper bounds of their sizes. To leave others out, use `deny` of `exir_lowering.partitioners`.

    Programs of ExecuTorch's `OpenVINOQuantizer` (PT2E int8) need no option, if they were made with
    `convert_pt2e(..., fold_quantize=False)`. The quantizer itself needs the extra "openvino-int8".

    The device chooses the precision that it computes with when a file is loaded: CPUs with bfloat16 instructions
    use them for float32 models, which gives two to three digits.

    Args:
        device: Where OpenVINO runs the file, one of `openvino.Core().available_devices`. It has to be present when
            the model is lowered too.

    Raises:
        InputError: OpenVINO does not have the device here.
        PluginLoadError: The OpenVINO that is installed does not work with ExecuTorch.
    """
    return OpenvinoPartitioner(device)


class OpenvinoPartitioner(Partitioner):  # type: ignore[misc]
    """ExecuTorch's `OpenvinoPartitioner`, kept from what its delegate would get wrong. Arguments as of `openvino`."""

    def __init__(self, device: str = "CPU") -> None:
        super().__init__()
        _check_device(device)
        self.inner: Partitioner = _upstream_class()([CompileSpec("device", device.encode())])

    def partition(self, exported_program: ExportedProgram) -> ExplainedResult:
        """Tag what OpenVINO takes.

        Raises:
            PartitionerContractError: ExecuTorch's partitioner raised.
        """
        dynamic = {
            node: graphs.qualified_name(path, node)
            for path, module in graphs.walk(exported_program.graph_module)
            for node in module.graph.nodes
            if graphs.is_operator(node) and _dynamic(node)
        }
        run = nested_run.run(self.inner, exported_program, dynamic)
        for node, tag in run.tags.items():
            node.meta[graphs.DELEGATION_TAG] = tag
        own = (_rejection(name, node) for node, name in dynamic.items())
        return ExplainedResult(exported_program, run.destinations, (*run.rejections, *own), run.adjustments)

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], Callable[[Node], bool] | None]:
        """Ask ExecuTorch's partitioner, but for what stays on the host."""
        return nested_run.preserved([self.inner], ep, lambda number, node: not _dynamic(node))


def _dynamic(node: Node) -> bool:
    """Tell whether a node's result, or a part of it, has a size that is not known ahead of time."""
    value = node.meta.get("val")
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return True
    return any(not isinstance(size, int) for tensor in measures.tensors(value) for size in tensor.shape)


def _rejection(name: str, node: Node) -> Rejection:
    reason = "its result has a dynamic size, and ExecuTorch's OpenVINO delegate returns results of the largest size"
    return Rejection("", name, graphs.operator_name(node), reason, "openvino", "dynamic_shape")


def _check_device(device: object) -> None:
    if not isinstance(device, str) or not device:
        raise InputError(f'openvino(device={device!r}): expected the name of a device, such as "CPU".')
    import openvino as library

    available = library.Core().available_devices
    if device not in available:
        raise InputError(
            f"openvino(device={device!r}): OpenVINO has no such device here, only {', '.join(available) or 'none'}. "
            "It compiles for a device that is present; install its driver, or name another one."
        )


def _upstream_class() -> Any:
    """Return ExecuTorch's class.

    Its package imports the quantizer too, which needs nncf. So while the partitioner is imported, an empty module
    stands for the package; it is gone afterwards, and importing the package works, or fails, as ever.
    """
    with _IMPORTING:
        stand_in = None
        if _PACKAGE not in sys.modules:
            found = find_spec(_PACKAGE)
            stand_in = ModuleType(_PACKAGE)
            stand_in.__path__ = list((found.submodule_search_locations if found is not None else None) or ())
            sys.modules[_PACKAGE] = stand_in
        try:
            module: Any = importlib.import_module(f"{_PACKAGE}.partitioner")
        except Exception as error:
            raise PluginLoadError(
                f"The backend 'openvino': importing ExecuTorch's partitioner raised {type(error).__name__}: {error}. "
                f"openvino {version('openvino')} is installed; expected one that executorch {version('executorch')} "
                f"works with: {INSTALL}."
            ) from error
        finally:
            if stand_in is not None:
                del sys.modules[_PACKAGE]
    log = logging.getLogger(module.__name__)
    # It prints the operators that it leaves, and stdout may carry a command's JSON. The report has them.
    module.print = lambda *words: log.debug(" ".join(map(str, words)))
    return module.OpenvinoPartitioner
