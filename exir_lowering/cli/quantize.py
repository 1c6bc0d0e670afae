"""`exir-lower quantize`: a float program to 8 or 4 bits, with the error of each layer."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from exir_lowering.cli import method_inputs, program_files
from exir_lowering.cli.output import OK, check_target, find_file, kept_from_stdout, say, show, write_file
from exir_lowering.errors import InputError

EXAMPLES = """\
examples:
  exir-lower quantize model.pt2 --calibration inputs.pt -o q.pt2
  exir-lower quantize model.pt2 --calibration inputs.pt --check others.pt --keep head --keep 'blocks.*.proj' -o q.pt2
  exir-lower quantize bert.pt2 --dynamic --check inputs.pt -o q.pt2
  exir-lower quantize llm.pt2 --precision 8da4w --check inputs.pt -o q.pt2
  exir-lower lower q.pt2 -p xnnpack -o q.pte

inputs.pt is a list of calls that torch.save wrote, such as [(x,), (y,)]: tuples of positional arguments, or (args,
kwargs). Activation ranges come from the calls of --calibration. Errors against float are measured on the calls of
--check, or else on the same ones. The layers that are listed first lose most.

The program is executed: quantise programs that you would run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    program_files.add_models(parser)
    parser.add_argument("-o", "--output", required=True, metavar="OUT.pt2", help="the file to write")
    parser.add_argument("--precision", metavar="NAME", help="int8 (the default), 8da8w or 8da4w")
    parser.add_argument("--recipe", default="xnnpack-int8", metavar="NAME", help="the recipe (default: xnnpack-int8)")
    parser.add_argument("--dynamic", action="store_true", help="another name of --precision 8da8w")
    parser.add_argument("--per-tensor", action="store_true", help="one scale for a weight, not for each output channel")
    parser.add_argument("--calibration", metavar="INPUTS.pt", help="the calls that activation ranges are taken from")
    parser.add_argument("--check", metavar="INPUTS.pt", help="the calls that errors are measured on")
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module to keep in float, with its submodules, such as head or 'blocks.*.proj'; repeatable",
    )
    parser.add_argument("--top", type=int, default=10, metavar="N", help="how many layers are shown (default: 10)")
    parser.add_argument("--json", action="store_true", help="print the errors as JSON instead of tables")


def execute(arguments: argparse.Namespace) -> int:
    """Quantise the program, write it and print the errors."""
    files = program_files.find_programs(arguments.models)
    target = check_target(arguments.output, ".pt2")
    if target.exists() and any(target.samefile(text) for text in files.values() if Path(text).is_file()):
        raise InputError(f"-o {arguments.output!r}: this is the float program; give the int8 program another name.")
    if arguments.top < 0:
        raise InputError(f"--top: got {arguments.top}, expected a number of layers.")
    if arguments.calibration is None and arguments.precision in (None, "int8") and not arguments.dynamic:
        raise InputError(
            "--calibration: static quantisation takes the activation ranges from calls. Give --calibration "
            "inputs.pt, written by torch.save([(x,), ...], 'inputs.pt') with a few typical inputs, or --dynamic."
        )
    options = {"--calibration": arguments.calibration, "--check": arguments.check}
    given = {option: find_file(path) for option, path in options.items() if path is not None}
    with kept_from_stdout(arguments.json):
        import torch

        from exir_lowering.quantization import quantize

        calls = {option: method_inputs.read_calls(option, path) for option, path in given.items()}
        programs = [*program_files.read_programs(files, arguments).values()]
        if len(programs) > 1:
            raise InputError(f"quantize: got {len(programs)} programs, expected one: quantise each by itself.")
        found = quantize(
            programs[0],
            calls.get("--calibration"),
            precision=arguments.precision,
            recipe=arguments.recipe,
            dynamic=arguments.dynamic,
            per_channel=not arguments.per_tensor,
            keep=arguments.keep,
            check=calls.get("--check"),
        )
        content = io.BytesIO()
        torch.export.save(found.program, content)
        written = write_file(target, content.getbuffer())
    show(found, arguments.json, top=arguments.top)
    say(f"{written}.", error=arguments.json)
    return OK
