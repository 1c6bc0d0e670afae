"""Exported programs in files: a `.pt2` file of `torch.export.save`, read without executing anything in it."""

from exir_lowering.cli.pt2.reading import check_devices, read_program
from exir_lowering.graphs.serialized.grammar import ExcessiveFileError, UnsafeFileError

__all__ = ["ExcessiveFileError", "UnsafeFileError", "check_devices", "read_program"]
