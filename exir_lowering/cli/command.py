"""What a command is, and how it can end."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

OK, DEFECT, MISTAKE, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141
"""The exit codes: success, a defect, a mistake in what was given, Ctrl-C, nobody reads the output any more."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `exir-lower`.

    Attributes:
        name: The command's name.
        summary: What it does, in one line.
        add_arguments: Adds its arguments to a parser.
        execute: Does the work, given the parsed arguments; returns the exit code.
        examples: What its help ends with.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    execute: Callable[[argparse.Namespace], int]
    examples: str = ""
