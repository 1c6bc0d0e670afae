"""Exported programs in files: a `.pt2` file of `torch.export.save`, read so that nothing in it acts."""

from exir_lowering.cli.pt2.reading import read_program
from exir_lowering.cli.pt2.unsafe import UnsafeFileError

__all__ = ["UnsafeFileError", "read_program"]
