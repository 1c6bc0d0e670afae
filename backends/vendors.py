"""ExecuTorch's partitioners of other vendors under names, and what to install where a vendor's compiler is missing."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exir_lowering import Partitioner


def __getattr__(name: str) -> Callable[[], Partitioner]:
    """Return what makes the partitioner of a name; ImportError, with what to install, if something is missing."""
    if name not in _NEEDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules, install, make = _NEEDS[name]
    who = f"The partitioner {name.replace('_', '-')!r}"
    for needed in modules:
        if needed not in os.environ and (needed.isupper() or find_spec(needed) is None):
            raise ImportError(f"{who} needs {needed}, which is missing here: {install}.", name=needed)

    def made() -> Partitioner:
        try:
            return make()
        except ImportError as error:
            raise ImportError(f"{who}: what it needs does not work here: {error}. Try {install}.") from error

    return made


def _make_coreml() -> Any:
    from executorch.backends.apple.coreml.partition import CoreMLPartitioner

    return CoreMLPartitioner()


def vulkan() -> Any:
    """Return ExecuTorch's partitioner for Vulkan, which needs nothing to be installed."""
    level = logging.root.level  # which the module changes
    try:
        from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    finally:
        logging.root.setLevel(level)
    return VulkanPartitioner()


def _make_tosa() -> Any:
    from executorch.backends.arm.tosa.compile_spec import TosaCompileSpec
    from executorch.backends.arm.tosa.partitioner import TOSAPartitioner

    return TOSAPartitioner(TosaCompileSpec("TOSA-1.0+FP+INT"))


def _make_ethos_u() -> Any:
    from executorch.backends.arm.ethosu import EthosUCompileSpec, EthosUPartitioner

    return EthosUPartitioner(EthosUCompileSpec("ethos-u55-128"))


def _make_qnn() -> Any:
    from executorch.backends.qualcomm.partition.qnn_partitioner import QnnPartitioner
    from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset
    from executorch.backends.qualcomm.utils import utils

    options = utils.generate_htp_compiler_spec(use_fp16=True)
    return QnnPartitioner(utils.generate_qnn_executorch_compiler_spec(QcomChipset.SM8650, options))


_ARM = 'pip install "exir-lowering[ethos-u]"'
_NEEDS: Mapping[str, tuple[tuple[str, ...], str, Callable[[], Partitioner]]] = {
    "coreml": (("coremltools",), 'pip install "exir-lowering[coreml]"', _make_coreml),
    "ethos_u": (("tosa_serializer", "ethosu"), _ARM, _make_ethos_u),
    "qnn": (("QNN_SDK_ROOT",), "unpack Qualcomm's AI Engine Direct SDK, and set QNN_SDK_ROOT to its folder", _make_qnn),
    "tosa": (("tosa_serializer",), _ARM, _make_tosa),
}
"""By name, the modules, or a variable of the environment, that are needed, where they are from, and what makes it."""
