"""ExecuTorch's partitioners of other vendors under names, and what to install where a vendor's compiler is missing.

They are as ExecuTorch has them, for the device that each says. For another one, or with options, name a function of
your own that makes ExecuTorch's class.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exir_lowering import Partitioner

_NEEDS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "coreml": (("coremltools",), "pip install coremltools"),
    "vulkan": ((), ""),
    "ethos_u": (("ethosu", "tosa_serializer"), 'pip install "executorch[ethos-u]"'),
    "vgf": (("tosa_serializer",), 'pip install "executorch[vgf]"'),
    "qnn": (("QNN_SDK_ROOT",), "unpack Qualcomm's AI Engine Direct SDK, and set QNN_SDK_ROOT to its folder"),
    "mediatek": (("mtk_converter", "mtk_neuron"), "pip install the wheels of MediaTek's NeuroPilot Express SDK"),
}
"""By name, the modules, or the variable of the environment, that its compiler needs, and where these come from."""


def __getattr__(name: str) -> Callable[[], Partitioner]:
    """Return what makes the partitioner of a name; ImportError, with what to install, if something is missing."""
    if name not in _NEEDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    needed, install = _NEEDS[name]
    for one in needed:
        if one not in os.environ and (one.isupper() or find_spec(one) is None):
            who = f"The partitioner {name.replace('_', '-')!r}"
            raise ImportError(f"{who} needs {one}, which is missing here: {install}.", name=one)
    found: Callable[[], Partitioner] = globals()[f"_make_{name}"]
    return found


def _make_coreml() -> Any:
    from executorch.backends.apple.coreml.partition import CoreMLPartitioner

    return CoreMLPartitioner()


def _make_vulkan() -> Any:
    level = logging.root.level  # which the module changes
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner

    logging.root.setLevel(level)
    return VulkanPartitioner()


def _make_ethos_u() -> Any:
    from executorch.backends.arm.ethosu import EthosUCompileSpec, EthosUPartitioner

    return EthosUPartitioner(EthosUCompileSpec("ethos-u55-128"))


def _make_vgf() -> Any:
    from executorch.backends.arm.vgf import VgfCompileSpec, VgfPartitioner

    return VgfPartitioner(VgfCompileSpec())


def _make_qnn() -> Any:
    from executorch.backends.qualcomm.partition.qnn_partitioner import QnnPartitioner
    from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset
    from executorch.backends.qualcomm.utils import utils

    options = utils.generate_htp_compiler_spec(use_fp16=True)
    return QnnPartitioner(utils.generate_qnn_executorch_compiler_spec(QcomChipset.SM8650, options))


def _make_mediatek() -> Any:
    from executorch.backends.mediatek import NeuropilotPartitioner
    from executorch.exir.backend.compile_spec_schema import CompileSpec

    return NeuropilotPartitioner([CompileSpec("platform-config", b"mt6989")])
