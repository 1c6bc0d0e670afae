"""The numbers in `flat_tensor.fbs`, ExecuTorch's schema of `.ptd` files; see `slots`."""

from __future__ import annotations

from typing import Final


class FlatTensor:
    """The root of a file's tables."""

    VERSION: Final = 0
    SEGMENTS: Final = 1
    NAMED_DATA: Final = 2


class DataSegment:
    """A segment of the file, after the tables."""

    OFFSET: Final = 0
    SIZE: Final = 1


class NamedData:
    """A segment that has a name; the first two fields are those of `.pte` files."""

    KEY: Final = 0
    SEGMENT_INDEX: Final = 1
    TENSOR_LAYOUT: Final = 2


class TensorLayout:
    """The tensor that a segment holds."""

    SCALAR_TYPE: Final = 0
    SIZES: Final = 1
    DIM_ORDER: Final = 2
