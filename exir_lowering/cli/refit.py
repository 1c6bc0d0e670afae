"""`exir-lower refit`: new weights for a `.pte` file, without lowering again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from exir_lowering.cli import method_inputs
from exir_lowering.cli.output import OK, check_target, describe_written, find_file, say
from exir_lowering.errors import InputError, let_through

if TYPE_CHECKING:
    import torch

EXAMPLES = """\
examples:
  exir-lower lower model.pt2 --partitioner xnnpack --refit -o model.pte
  exir-lower refit model.pte tuned.safetensors -o tuned.pte
  exir-lower refit model.pte head.pt --partial -o tuned.pte

The weights are a state_dict in a file of torch.save or safetensors, with the names, shapes and dtypes that the exported
program has. Nothing in the files is run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL.pte", help="the file, lowered with --refit")
    parser.add_argument("weights", metavar="WEIGHTS", help="the new weights: a .pt or .safetensors file")
    parser.add_argument("-o", "--output", required=True, metavar="OUT.pte", help="the file to write")
    parser.add_argument("--partial", action="store_true", help="keep the weights that WEIGHTS does not have")
    method_inputs.add_data(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Read the weights, put them into the file, and write it."""
    source, weights = find_file(arguments.model), find_file(arguments.weights)
    target, data = check_target(arguments.output, ".pte"), [find_file(path) for path in arguments.data]

    from exir_lowering.refitting import refit

    made = refit(source, _read_weights(weights), data=data or None, strict=not arguments.partial)
    made.save(target)
    say(f"{describe_written(target)}.")
    return OK


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix != ".safetensors":
            import torch

            return dict(torch.load(path, weights_only=True, map_location="cpu"))
        from safetensors.torch import load_file

        return dict(load_file(path))
    except Exception as error:  # of the library, which may be missing, for a damaged file
        let_through(error)
        raise InputError(f"{str(path)!r} cannot be read: {type(error).__name__}: {error}.") from error
