"""`exir-lower verify`: whether a `.pte` file computes what its programs do in eager PyTorch."""

from __future__ import annotations

import argparse

from exir_lowering.cli import method_inputs, program_files
from exir_lowering.cli.output import MISTAKE, OK, find_file, kept_from_stdout, show

EXAMPLES = """\
examples:
  exir-lower verify model.pte model.pt2
  exir-lower verify llm.pte prefill=prefill.pt2 decode=decode.pt2
  exir-lower verify model.pte model.pt2 --inputs inputs.pt --tolerance 1e-3
  exir-lower verify saved.pte model.pt2 --bundled
  exir-lower verify model.pte model.pt2 --json > verified.json

Without --inputs, inputs are generated, including those that random numbers do not cover: constants, ramps, ties, zeros,
and the limits of a vocabulary, of dtypes and of dynamic sizes. inputs.pt is a list of tuples that torch.save wrote,
each the arguments of a call, or a dict of such lists by method. The exit code is 2 when an output is wrong.

The programs are executed: verify programs that you would run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", metavar="MODEL.pte", help="the file")
    program_files.add_models(parser)
    calls = parser.add_mutually_exclusive_group()
    calls.add_argument("--inputs", metavar="INPUTS.pt", help="the calls to compare, instead of generated ones")
    calls.add_argument("--bundled", action="store_true", help="compare the calls that were saved in the file")
    method_inputs.add_data(parser)
    parser.add_argument("--library", action="append", default=[], help="a C++ backend that you trust; repeatable")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="SHARE",
        help="the largest error of floating-point numbers, as a share of the largest magnitude in an output (default: "
        "by dtype, looser for quantised programs)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")


def execute(arguments: argparse.Namespace) -> int:
    """Verify the file and print what was found; return `MISTAKE` when something is off."""
    source = find_file(arguments.file)
    files = program_files.find_programs(arguments.models)
    given = None if arguments.inputs is None else find_file(arguments.inputs)
    data = [*map(find_file, arguments.data)]
    with kept_from_stdout(arguments.json):
        from exir_lowering.verification import verify

        found = verify(
            source,
            program_files.read_programs(files, arguments),
            "bundled" if arguments.bundled else None if given is None else method_inputs.read_calls("--inputs", given),
            data=data or None,
            libraries=arguments.library,
            tolerance=arguments.tolerance,
        )
    show(found, arguments.json)
    return OK if found.ok else MISTAKE
