"""The element types of tensors in files, and their numbers there."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from exir_lowering.pte.slots import ScalarType

DTYPES: Mapping[int, torch.dtype] = MappingProxyType(
    {
        ScalarType.BYTE: torch.uint8,
        ScalarType.CHAR: torch.int8,
        ScalarType.SHORT: torch.int16,
        ScalarType.INT: torch.int32,
        ScalarType.LONG: torch.int64,
        ScalarType.HALF: torch.float16,
        ScalarType.FLOAT: torch.float32,
        ScalarType.DOUBLE: torch.float64,
        ScalarType.COMPLEXHALF: torch.complex32,
        ScalarType.COMPLEXFLOAT: torch.complex64,
        ScalarType.COMPLEXDOUBLE: torch.complex128,
        ScalarType.BOOL: torch.bool,
        ScalarType.BFLOAT16: torch.bfloat16,
        ScalarType.FLOAT8E5M2: torch.float8_e5m2,
        ScalarType.FLOAT8E4M3FN: torch.float8_e4m3fn,
        ScalarType.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
        ScalarType.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
        ScalarType.UINT16: torch.uint16,
        ScalarType.UINT32: torch.uint32,
        ScalarType.UINT64: torch.uint64,
    }
)
"""The element types that a tensor of a file can have, by their numbers there."""

CODES: Mapping[torch.dtype, int] = MappingProxyType({dtype: code for code, dtype in DTYPES.items()})
"""The numbers of element types."""

_QUANTISED = (ScalarType.QINT8, ScalarType.QUINT8, ScalarType.QINT32, ScalarType.QUINT4X2, ScalarType.QUINT2X4)
_BITS = (ScalarType.BITS1X8, ScalarType.BITS2X4, ScalarType.BITS4X2, ScalarType.BITS8, ScalarType.BITS16)
REFUSED: Mapping[int, str] = MappingProxyType(
    {
        **dict.fromkeys(_QUANTISED, "quantised element type"),
        **dict.fromkeys(_BITS, "element type of bits"),
    }
)
"""Types that ExecuTorch numbers but never writes, as quantised values are plain integers there: kernels abort."""
