"""The command line, `exir-lower`: a file for each command, and what commands share.

No command imports torch at its top, so that help and usage errors come at once.
"""

from exir_lowering.cli.main import main

__all__ = ["main"]
