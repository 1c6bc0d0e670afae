"""Where programs come from: their arguments, files of torch.export.save, functions, and folders of transformers."""

from __future__ import annotations

import argparse
import logging
import re
import zipfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from exir_lowering.cli import importing, largest, partitioning
from exir_lowering.cli.output import find_file, first_line
from exir_lowering.errors import InputError, explained
from exir_lowering.pte.kinds import PT2, kind_of

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from exir_lowering.options import LoweringOptions


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments that `lower` and `plan` share."""
    add_models(command)
    command.add_argument(
        "-p",
        "--partitioner",
        action="append",
        default=[],
        metavar="NAME|MODULE:FUNCTION",
        help="the partitioner, which chooses the operators that a backend takes: an installed one (`exir-lower "
        "plugins` lists them), or what a function or class of a module makes; repeatable: each gets what the ones "
        "before it left; without any, everything stays on the host",
    )
    command.add_argument(
        "--require-coverage",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="fail unless this share of each method's operators is delegated, such as 0.95, or 1 for all",
    )
    command.add_argument(
        "--require-memory",
        metavar="SIZE",
        help="fail if the tensors of a method take more memory in ExecuTorch's runtime, such as 8MB or 512KiB",
    )
    command.add_argument(
        "--memory-planner",
        choices=("greedy", "naive"),
        default="greedy",
        help="which of ExecuTorch's algorithms plans that memory (default: greedy); naive uses no memory twice",
    )
    largest.add(command, "--bounds")
    command.add_argument(
        "--unsupported",
        choices=("raise", "allow"),
        default="raise",
        help="what to do with operators on the host that do not run there: fail (default), or allow all of them, for a "
        "runtime with more kernels",
    )
    command.add_argument(
        "--target",
        metavar="RELEASE|TARGETS.json",
        help="the runtime that the file is for: a release of ExecuTorch, or a build of your own, as for exir-lower "
        "check (default: the release that is installed)",
    )
    command.add_argument(
        "--fast",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="convert with this package's code and reuse results; without, ExecuTorch does all, to the same bytes",
    )
    command.add_argument(
        "--rewrites",
        metavar="NAME[,NAME]",
        default="safe",
        help="the rewrites that make the programs faster before they are partitioned: safe (default), none, or names",
    )
    command.add_argument(
        "--assume",
        metavar="INPUT=PROPERTY",
        action="append",
        default=[],
        help="a property of every value of an input: finite, or finite_rows (no row of a mask is entirely masked)",
    )


def add_variants(command: argparse.ArgumentParser) -> None:
    """Add the argument for variants."""
    command.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME=PARTITIONER,...",
        help="in place of -p: lower each program for these partitioners, in this order, as METHOD@NAME; repeatable, "
        "the preferred variant first: whoever runs the file takes the first that can run; NAME= stays on the host",
    )


def add_models(command: argparse.ArgumentParser) -> None:
    """Add the arguments for programs, and for how their files are read."""
    command.add_argument(
        "models",
        nargs="+",
        metavar="[METHOD=]MODEL",
        help="a program: a .pt2 file; MODEL.py:FUNCTION, which makes a model and its inputs; or the folder of a "
        'transformers model; a single program is the method "forward", several need METHOD=MODEL each',
    )
    command.add_argument(
        "--task",
        metavar="TASK|CLASS",
        help="what the model of a folder is for, such as text-classification, or its class",
    )
    command.add_argument(
        "--trust",
        action="store_true",
        help="load a file of somebody you trust as torch does, which runs the code in it; else such a file is refused",
    )
    command.add_argument(
        "--import",
        action="append",
        default=[],
        metavar="MODULE",
        dest="imports",
        help="import this first, since it registers what a .pt2 file has, such as a class or an operator; repeatable",
    )


_OPTIONS = ("require_coverage", "require_memory", "memory_planner", "fast", "unsupported", "target")


def make_options(arguments: argparse.Namespace, **more: Any) -> LoweringOptions:
    """Return how programs are lowered; InputError if an argument names what is not there, or has another form."""
    from exir_lowering.options import LoweringOptions

    assumed: dict[str, str] = {}
    for given in arguments.assume:
        name, equals, promise = given.partition("=")
        if not name or not equals or name in assumed:
            raise InputError(
                f"--assume {given!r}: expected INPUT=PROPERTY, once for each input, such as mask=finite_rows."
            )
        assumed[name] = promise
    rewrites = [name.strip() for name in arguments.rewrites.split(",") if name.strip()]
    partitioning.check_names("exir_lowering.rewrites", [name for name in rewrites if name != "none"])
    return LoweringOptions(
        progress=True,
        rewrites=rewrites,
        assume=assumed,
        bounds=largest.read_bounds(arguments.bounds),
        **{name: getattr(arguments, name) for name in _OPTIONS},
        **more,
    )


def find_programs(given: Sequence[str]) -> dict[str, str]:
    """Return where each method of `[METHOD=]MODEL` arguments comes from; InputError if that is missing or unclear."""
    sources: dict[str, str] = {}
    for text in given:
        method, equals, rest = text.partition("=")
        # A file may have an equals sign in its name or in that of a directory.
        if not equals or not method or Path(text).exists() or not (method.isidentifier() or Path(rest).exists()):
            method, rest = "", text
        if not method and len(given) > 1:
            name = re.sub(r"\W+", "_", Path(text).stem).strip("_")
            raise InputError(
                f"{text!r}: expected METHOD=FILE, since {len(given)} files are given and each becomes a method of the "
                f".pte. Write, for example, {name if name.isidentifier() else 'forward'}={text}."
            )
        if method and not rest:
            raise InputError(f"{text!r}: there is no file after the equals sign, expected {method}=MODEL.pt2.")
        method = method or "forward"
        if method in sources:
            raise InputError(f"{text!r}: the method {method!r} is given twice. Name each file differently.")
        sources[method] = rest
        _check_source(rest)
    return sources


def _check_source(text: str) -> None:
    """Raise an InputError if there is no such file, folder or module; before anything slow is imported."""
    path = Path(text)
    if function := _split_function(text):
        importing.check(repr(text), function[0])
    elif path.is_dir() and not (path / "config.json").is_file():
        raise InputError(f"{text!r} is a directory, expected a file, or one with a transformers model's config.json.")
    elif not path.exists() and path.suffix not in (".pt2", ".pt", ".pth", ".pte", ".py"):
        download = f"A model of the Hugging Face Hub has to be in a folder: `hf download {text} --local-dir FOLDER`."
        hub = f" {download}" if re.fullmatch(r"[\w-]+(/[\w.-]+)?", text) else ""
        raise InputError(f"There is no file {text!r}, and no folder.{hub}")
    elif path.suffix == ".py" and path.is_file():
        raise InputError(f"{text!r}: name the function in it that makes the model and its inputs, such as {text}:make.")
    elif not path.is_dir() and not zipfile.is_zipfile(find_file(text)):
        raise _refusal(path, zipfile.BadZipFile("File is not a zip file"))


def _split_function(text: str) -> tuple[str, str] | None:
    """Return the file or module of a function, and its name; None if the text is not of this form."""
    place, _, function = text.rpartition(":")
    names = [function, *([] if place.endswith(".py") else place.split("."))]
    return None if Path(text).exists() or not all(map(str.isidentifier, names)) else (place, function)


def read_programs(sources: Mapping[str, str], arguments: argparse.Namespace) -> dict[str, ExportedProgram]:
    """Read or make the programs; InputError if a file would run code when it is read, unless it is trusted."""
    for module in arguments.imports:
        importing.import_module(f"--import {module!r}", module)
    if arguments.task and not any(Path(text).is_dir() for text in sources.values()):
        raise InputError("--task: it is for the folder of a transformers model, and none is given.")
    found: dict[str, ExportedProgram] = {}
    for method, text in sources.items():
        made: Mapping[str, ExportedProgram]
        if function := _split_function(text):
            from exir_lowering.cli.models import make_programs

            made = make_programs(*function)
        elif Path(text).is_dir():
            from exir_lowering.cli.transformers_folder import export_folder

            made = export_folder(Path(text), arguments.task)
        else:
            made = {"forward": _read_program(Path(text), arguments.trust)}
        if len(sources) > 1 or method != "forward":
            if len(made) > 1:
                raise InputError(f"{text!r} has the methods {', '.join(made)}: give it alone, without a name.")
            made = dict(zip([method], made.values(), strict=True))
        found |= made
    return found


def _read_program(path: Path, trust: bool) -> ExportedProgram:
    from exir_lowering.cli.pt2 import check_devices, check_file
    from exir_lowering.graphs.serialized.grammar import UnsafeFileError

    def explain(error: Exception) -> InputError:
        if not isinstance(error, UnsafeFileError) or kind_of(path) not in (None, PT2):
            return _refusal(path, error)
        return InputError(
            f"{str(path)!r} is not loaded, since it could run code here: {error}. torch.export.save does not write "
            "such a file for an ordinary model. If it comes from somebody you trust, --trust loads it anyway, and "
            "runs the code in it."
        )

    with explained(explain), path.open("rb") as file:
        if trust:
            check_devices(file)
        return _load(file if trust else check_file(file))


def _refusal(path: Path, error: Exception) -> InputError:
    """Describe why a file is not read."""
    kind = kind_of(path)
    reason = str(error).rstrip(".") if isinstance(error, InputError) else f"{type(error).__name__}: {first_line(error)}"
    advice = "a .pt2 file, as torch.export.save makes it, MODEL.py:FUNCTION, or the folder of a transformers model"
    content = _describe_damage(path) if kind is None or kind is PT2 else kind.name
    if content:
        advice = f"Expected {advice}"
    else:
        content = f"whole, but cannot be loaded here with torch {metadata.version('torch')}"
        advice = (
            "If it has classes or operators of a package, --import MODULE imports what registers them. If another "
            "version of torch made it, export the model again, with torch.export.save"
        )
    return InputError(f"Cannot read {str(path)!r} as an exported program: it is {content} ({reason[:800]}). {advice}.")


def _describe_damage(path: Path) -> str:
    """Return what a file is that has no program, or another checksum than it says; "" for a whole one."""
    try:
        with zipfile.ZipFile(path) as archive:
            names, damaged = {Path(name).name for name in archive.namelist()}, archive.testzip()
    except MemoryError:
        raise
    except Exception:  # whatever is wrong with it
        with path.open("rb") as file:
            start = file.read(2)
        return {b"": "empty", b"PK": "damaged, or cut short: copy it again"}.get(start, "another kind of file")
    if damaged is not None:
        return f"damaged in {damaged[:200]!r}: copy it again"
    if "data.pkl" in names:
        return "what torch.save wrote, weights or a module, and no program"
    program = names & {"model.json", "serialized_exported_program.json"}
    return "" if program else "without a program: torch.export.save was interrupted, or another tool wrote it"


def _load(file: BinaryIO) -> ExportedProgram:
    """Load a file as torch does, which logs the reason of an error and raises one that points there."""
    import torch

    logged: list[BaseException] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1]:
            logged.append(record.exc_info[1])
        return True

    logger = logging.getLogger("torch.export")
    # Before the filter that drops what the log says.
    logger.filters.insert(0, keep)
    try:
        file.seek(0)
        return torch.export.load(file)
    except MemoryError:
        raise
    except Exception as error:
        if logged:
            raise logged[0] from error
        raise
    finally:
        logger.removeFilter(keep)
