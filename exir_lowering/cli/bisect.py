"""`exir-lower bisect`: which operator goes wrong in a backend."""

from __future__ import annotations

import argparse

from exir_lowering.cli import lower, method_inputs, partitioning, program_files
from exir_lowering.cli.output import MISTAKE, OK, find_file, kept_from_stdout, show

EXAMPLES = """\
examples:
  exir-lower bisect model.pt2 -p xnnpack
  exir-lower bisect prefill=prefill.pt2 decode=decode.pt2 -p xnnpack --inputs inputs.pt
  exir-lower bisect model.pt2 -p my_module:partitioner

The programs are lowered and verified, as `exir-lower verify` does. If the file gives wrong results, fails or ends the
process, they are lowered again with fewer and fewer operators in backends. The exit code is 2 when a culprit was found.
If lowering fails, bisect fails too; `exir-lower lower --on-backend-error split` finds the operators that cause it.

The programs are executed: bisect programs that you would run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    program_files.add_arguments(parser)
    lower.add_sharing(parser)
    parser.add_argument("--inputs", metavar="INPUTS.pt", help="the calls to compare, instead of generated ones")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of text")


def execute(arguments: argparse.Namespace) -> int:
    """Search, and print what was found; return `MISTAKE` when something is wrong."""
    files = program_files.find_programs(arguments.models)
    partitioning.check_arguments(arguments)
    given = None if arguments.inputs is None else find_file(arguments.inputs)
    options = program_files.make_options(arguments)
    with kept_from_stdout(arguments.json):
        from exir_lowering.verification import bisect

        found = bisect(
            program_files.read_programs(files, arguments),
            partitioning.make(arguments)["partitioners"],
            inputs=None if given is None else method_inputs.read_calls("--inputs", given),
            options=options,
            share_state=arguments.share_state,
        )
    show(found, arguments.json)
    return OK if found.ok else MISTAKE
