"""`exir-lower check`: whether runtimes that are shipped already run a `.pte` file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from exir_lowering.cli import method_inputs
from exir_lowering.cli.output import MISTAKE, OK, find_file, kept_from_stdout, make_console, show
from exir_lowering.errors import InputError, LoweringError

EXAMPLES = """\
examples:
  exir-lower check model.pte
  exir-lower check model.pte --runtime 1.4.1
  exir-lower check model.pte --runtime 1.4.1,1.3.1 --json > compatible.json
  exir-lower check model.pte --target targets.json
  exir-lower check model.pte --on aarch64 --inputs inputs.pt

The exit code is 2 unless every runtime runs the file. "unknown" is said of what was not seen to run in a release;
--allow-unknown takes it for success. The release that is installed runs what is not known of it, with random inputs.

--on aarch64 calls a method on ARM's kernels, which qemu runs, and compares the outputs with those of this machine; the
exit code is 2 if one is wrong. It is set up once: docs/guides/check.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", metavar="MODEL.pte", help="the file")
    parser.add_argument(
        "--runtime", metavar="VERSIONS", help="releases of ExecuTorch, separated by commas (default: the installed one)"
    )
    parser.add_argument("--target", metavar="TARGETS.json", help="builds of your own, with what they have")
    parser.add_argument("--on", choices=["aarch64"], help="run it on another processor's kernels, which qemu emulates")
    parser.add_argument("--device", metavar="FOLDER", help="with --on: where tests/device/set_up.sh has set it up")
    parser.add_argument("--method", help='with --on: the method (default: "forward", or the only one there is)')
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="SHARE",
        help="with --on: the largest error, of an output's largest magnitude",
    )
    method_inputs.add_argument(parser)
    method_inputs.add_data(parser)
    parser.add_argument("--allow-unknown", action="store_true", help="exit with 0 if nothing is known to fail")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Check the file and print what was found; return `MISTAKE` unless every runtime runs it."""
    source, data = find_file(arguments.file), [*map(find_file, arguments.data)]
    for option in ("runtime", "target") if arguments.on else ("inputs", "method", "device", "tolerance"):
        if getattr(arguments, option) is not None:
            how = "does not apply to --on: leave one out" if arguments.on else "applies to --on: give --on aarch64 too"
            raise InputError(f"--{option} {how}.")
    if arguments.on is not None:
        return _emulate(source, data, arguments)
    path = None if arguments.target is None else find_file(arguments.target)

    from exir_lowering.inspection.compatibility import check, worst
    from exir_lowering.inspection.report import as_data
    from exir_lowering.pte.releases import Target, find_release, find_target, read_targets
    from exir_lowering.runtime import Limits, load

    def run(method: str) -> bool:
        try:
            program = load(source, data=data or None, limits=Limits(seconds=60))
            program.run(method, *method_inputs.draw(program.methods[method], seed=0))
        except LoweringError:
            return False
        return True

    names = [] if arguments.runtime is None else [*map(str.strip, arguments.runtime.split(","))]
    targets = [Target(f"ExecuTorch {name}", find_release(name)) for name in names]
    targets += [] if path is None else read_targets(path)
    found = check(source, targets or [find_target(None)], run)
    if arguments.json:
        print(json.dumps(as_data({"name": str(source), "runtimes": found}), indent=2))
    else:
        make_console().print("".join(each.to_text() for each in found), end="", soft_wrap=True)
    accepted = ("runs", "unknown") if arguments.allow_unknown else ("runs",)
    return OK if worst(each.verdict for each in found) in accepted else MISTAKE


def _emulate(source: Path, data: Sequence[Path], arguments: argparse.Namespace) -> int:
    """Compare a method on aarch64 with what it computes here."""
    given = None if arguments.inputs is None else find_file(arguments.inputs)

    from exir_lowering.runtime import load
    from exir_lowering.verification import aarch64

    emulator = aarch64.Emulator(aarch64.default_folder() if arguments.device is None else Path(arguments.device))
    with kept_from_stdout(arguments.json):
        program = load(source, data=data or None)
        method = method_inputs.choose_method(arguments.method, program, source)
        inputs = method_inputs.make_inputs(given, arguments.seed, program, method)
        method = program.choose(method, *inputs).method
        found = aarch64.compare(emulator, source, program, method, inputs, data=data, tolerance=arguments.tolerance)
    show(found, arguments.json)
    return OK if found.ok else MISTAKE
