"""`exir-lower run`: a method of a `.pte` file, in the ExecuTorch runtime. No part of the compiler is imported."""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping
from typing import Any, Literal

from exir_lowering.cli import method_inputs
from exir_lowering.cli.output import OK, check_target, find_file, kept_from_stdout, print_table, say, show, write_file
from exir_lowering.errors import InputError

# The values of --check-digests, and of the argument of `load`.
_DIGESTS: Mapping[str, bool | Literal["full"]] = {"auto": True, "full": "full", "tie": False}

EXAMPLES = """\
examples:
  exir-lower run model.pte
  exir-lower run model.pte --inputs inputs.pt --save outputs.pt
  exir-lower run model.pte --profile --runs 20 --top 10
  exir-lower run model.pte --profile --runs 20 --by operator
  exir-lower run llm.pte --method decode --inputs token.pt
  exir-lower run unknown.pte --timeout 10

inputs.pt is what torch.save wrote: the inputs of one call in a list or tuple, tensors and numbers.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", metavar="MODEL.pte", help="the file")
    parser.add_argument("--method", help='the method or family (default: "forward", or the only one there is)')
    method_inputs.add_argument(parser)
    method_inputs.add_data(parser)
    parser.add_argument("--library", action="append", default=[], help="a C++ backend that you trust; repeatable")
    parser.add_argument(
        "--profile", action="store_true", help="run it again, and print where the time goes, slowest first"
    )
    parser.add_argument(
        "--by", choices=("operator",), help="with --profile: add up what has the same operator, in whatever delegates"
    )
    parser.add_argument("--top", type=int, metavar="N", help="with --profile: only the N rows that take longest")
    parser.add_argument("--runs", type=int, metavar="N", help="with --profile: the number of runs (default: 1)")
    parser.add_argument(
        "--json", action="store_true", help="with --profile: print the profile as JSON instead of tables"
    )
    parser.add_argument("--save", metavar="OUT.pt", help="save the list of outputs with torch.save")
    parser.add_argument(
        "--check-digests",
        choices=tuple(_DIGESTS),
        default="auto",
        help="what to check with the digests in the files: that the data files belong to the .pte (tie); also the "
        "tables, and weights and payloads of up to 32 MB (auto, the default); or everything (full)",
    )
    parser.add_argument(
        "--unavailable",
        choices=("error", "fallback"),
        default="error",
        help="what to do about a backend that this machine lacks: refuse the file (default), or let PyTorch run the "
        "original graphs that `lower --keep-originals` kept",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="run in a separate process, and end it if loading, the run or the profile takes longer than this; Ctrl-C "
        "then works at once",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Load the file, run the method, print and save the outputs."""
    source = find_file(arguments.model)
    data = [*map(find_file, arguments.data)]
    save = None if arguments.save is None else check_target(arguments.save)
    given = None if arguments.inputs is None else find_file(arguments.inputs)
    for name in ("json", "by", "top", "runs"):
        value = getattr(arguments, name)
        if value and not arguments.profile:
            raise InputError(f"--{name} applies to the profile: give --profile too.")
        if isinstance(value, int) and name != "json" and value < 1:
            raise InputError(f"--{name} {value}: expected a number of at least 1.")
    import torch

    from exir_lowering.runtime import Limits, load

    with kept_from_stdout(arguments.json):
        program = load(
            source,
            data=data or None,
            libraries=arguments.library,
            unavailable=arguments.unavailable,
            verify=_DIGESTS[arguments.check_digests],
            limits=None if arguments.timeout is None else Limits(seconds=arguments.timeout),
        )
        method = method_inputs.choose_method(arguments.method, program, source)
        values = method_inputs.make_inputs(given, arguments.seed, program, method)
        choice = program.choose(method, *values)
        named, method = method, choice.method
        outputs = program.run(method, *values)
        profile = program.profile(method, *values, runs=arguments.runs or 1) if arguments.profile else None
    profile = profile.by_operator() if profile is not None and arguments.by else profile
    shown = profile.by_time(arguments.top) if profile is not None and (arguments.top or not arguments.json) else profile
    if arguments.json:
        show(shown, True)
    else:
        rows = [(str(index), *_summarize(value)) for index, value in enumerate(outputs)]
        numbers = ("min", "mean", "max")
        title = f"{source.name}: outputs of {method}"
        print_table(title, ("#", "dtype", "shape", *numbers), rows, right=("#", *numbers))
        if named != method:
            say(f"{named} is {choice}.")
        if profile is not None and shown is not None:
            show(shown, False)
            if left := len(profile.rows) - len(shown.rows):
                say(f"{left} more rows; leave out --top to see all.")
    if save is not None:
        content = io.BytesIO()
        torch.save(list(outputs), content)
        say(f"{write_file(save, content.getbuffer())}: the list of outputs, for torch.load.", error=arguments.json)
    return OK


def _summarize(value: Any) -> tuple[str, str, str, str, str]:
    """Return dtype, shape, min, mean and max of an output."""
    import torch

    if not isinstance(value, torch.Tensor):
        return type(value).__name__, "", "", str(value), ""
    dtype, shape = str(value.dtype).removeprefix("torch."), "x".join(map(str, value.shape)) or "scalar"
    if not value.numel() or value.is_complex():
        return dtype, shape, "-", "-", "-"
    wide = value.detach().double()
    low, high = (f"{v.item():.6g}" for v in (wide.min(), wide.max()))
    return dtype, shape, low, f"{wide.mean().item():.6g}", high
