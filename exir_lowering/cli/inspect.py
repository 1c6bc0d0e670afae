"""`exir-lower inspect`: what is in a `.pte` or `.ptd` file."""

from __future__ import annotations

import argparse
import difflib

from exir_lowering.cli import method_inputs
from exir_lowering.cli.output import OK, check_target, find_file, say, show, write_file

EXAMPLES = """\
examples:
  exir-lower inspect model.pte
  exir-lower inspect model.pte --summary
  exir-lower inspect before.pte after.pte
  exir-lower inspect model.pte --json > model.json
  exir-lower inspect model.pte --kernels-yaml kernels.yaml

Nothing in a file is run, and only its tables are read. Any .pte and .ptd file can be given, not only those that were
made by exir-lower.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL.pte", help="the file, or a .ptd data file alone")
    parser.add_argument("other", nargs="?", metavar="OTHER.pte", help="another file: print how their texts differ")
    method_inputs.add_data(parser)
    parser.add_argument("--summary", action="store_true", help="print at most ten lines")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--kernels-yaml",
        metavar="FILE.yaml",
        help="write the kernels that the methods call, for OPS_SCHEMA_YAML of ExecuTorch's selective build",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Read the files, print what is in them, and write what was asked for."""
    source = find_file(arguments.model)
    data = [*map(find_file, arguments.data)]
    other = None if arguments.other is None else find_file(arguments.other)
    kernels = None if arguments.kernels_yaml is None else check_target(arguments.kernels_yaml, ".yaml")

    from exir_lowering.inspection import inspect

    report = inspect(source, data=data or None)
    written = None if kernels is None else write_file(kernels, report.kernels_yaml().encode())
    if other is None:
        show(report, arguments.json, report.summary if arguments.summary else None)
    else:
        form = "to_json" if arguments.json else "summary" if arguments.summary else "to_text"
        old, new = (getattr(one, form)().splitlines() for one in (report, inspect(other)))
        print("\n".join(difflib.unified_diff(old, new, str(source), str(other), lineterm="")))
    if written:
        say(f"{written}.", error=arguments.json)
    return OK
