"""What a command is, and how it can end."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

OK, DEFECT, MISTAKE, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141
"""The exit codes: success, a defect, a mistake in what was given, Ctrl-C, nobody reads the output any more."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `exir-lower`."""

    name: str
    summary: str  # one line, for the list of commands
    add_arguments: Callable[[argparse.ArgumentParser], None]
    # Given the parsed arguments; returns the exit code, or raises a LoweringError.
    execute: Callable[[argparse.Namespace], int]
    examples: str = ""  # what its help ends with
