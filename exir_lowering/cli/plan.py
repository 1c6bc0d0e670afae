"""`exir-lower plan`: what `lower` would delegate, and why the rest stays on the host."""

from __future__ import annotations

import argparse
import warnings

from exir_lowering.cli import largest, partitioning, program_files
from exir_lowering.cli.output import MISTAKE, OK, check_targets, kept_from_stdout, say, show, write_file
from exir_lowering.errors import CoverageError, ExportWarning

EXAMPLES = """\
examples:
  exir-lower plan model.pt2 --partitioner xnnpack
  exir-lower plan model.pt2 --partitioner xnnpack --html plan.html
  exir-lower plan prefill=prefill.pt2 decode=decode.pt2 --partitioner xnnpack --json > plan.json
  exir-lower plan model.pt2 --partitioner xnnpack --require-coverage 0.95
  exir-lower plan model.pt2 --partitioner my_module:without_head

Nothing is lowered, so no backend has to be installed. With --require-coverage the exit code is 2 if less is delegated.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    program_files.add_arguments(parser)
    program_files.add_variants(parser)
    largest.add(parser, "--sizes")
    parser.add_argument("--all", action="store_true", help="print all operators, partitions, rewrites and memory")
    parser.add_argument("--html", metavar="PLAN.html", help="write an HTML page with the graph of partitions")
    parser.add_argument("--dot", metavar="PLAN.dot", help="write the graph of partitions for Graphviz")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Plan, print the plan and write its pictures; return `MISTAKE` when less is delegated than is required."""
    files = program_files.find_programs(arguments.models)
    partitioning.check_arguments(arguments)
    pictures = check_targets(html=arguments.html, dot=arguments.dot)
    failure: CoverageError | None = None
    with kept_from_stdout(arguments.json):
        options, sizes = program_files.make_options(arguments), largest.read_sizes(arguments.sizes)

        from exir_lowering.pipeline import plan

        warnings.simplefilter("ignore", ExportWarning)  # the plan has them
        chosen = {**partitioning.make(arguments), "sizes": sizes}
        try:
            planned = plan(program_files.read_programs(files, arguments), **chosen, options=options)
        except CoverageError as error:
            failure, planned = error, error.plan
    made = {"html": planned.to_html, "dot": planned.to_dot}
    written = [write_file(path, made[suffix]().encode()) for suffix, path in pictures.items()]
    show(planned, arguments.json, narrowest=40, everything=arguments.all)
    for text in written:
        say(f"{text}.", error=arguments.json)
    if failure is not None:
        say(f"exir-lower plan: {failure}", error=True)
        return MISTAKE
    return OK
