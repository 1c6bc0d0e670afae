"""What a user promises about inputs that a program cannot know."""

from __future__ import annotations

from collections.abc import Mapping

from torch.export import ExportedProgram

from exir_lowering.errors import InputError
from exir_lowering.options import ASSUMPTIONS


def check(program: ExportedProgram, assume: Mapping[str, str]) -> dict[str, str]:
    """Return the assumptions by input (see `ASSUMPTIONS`); InputError if there is no such input or no such property."""
    inputs = [str(name) for name in program.graph_signature.user_inputs if isinstance(name, str)]
    for name, promised in assume.items():
        if name not in inputs:
            raise InputError(
                f"assume names {name!r}, which is not an input of the program. "
                f"Its inputs are: {', '.join(inputs) or 'none'}."
            )
        if promised not in ASSUMPTIONS:
            possible = "; ".join(f"{key!r}: {text}" for key, text in ASSUMPTIONS.items())
            raise InputError(f"assume says {promised!r} of the input {name!r}. What can be assumed is {possible}.")
    return dict(assume)
