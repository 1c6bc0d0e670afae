"""The programs for `lower` and `plan`: their arguments, the files, and how they become Edge dialect."""

from __future__ import annotations

import argparse
import logging
import re
import zipfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from exir_lowering.cli import partitioning
from exir_lowering.cli.output import find_file, first_line
from exir_lowering.errors import InputError
from exir_lowering.pte.kinds import PT2, kind_of_file

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from exir_lowering.options import LoweringOptions


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments that `lower` and `plan` share."""
    add_models(command)
    partitioning.add_arguments(command)
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
        metavar="[METHOD=]MODEL.pt2",
        help='a program; a single one is the method "forward", several need METHOD=MODEL.pt2 each',
    )
    command.add_argument(
        "--trust",
        action="store_true",
        help="load files as torch.export.load does, which runs code in them; without it, a file that would run code is "
        "refused",
    )


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
        require_coverage=arguments.require_coverage,
        require_memory=arguments.require_memory,
        memory_planner=arguments.memory_planner,
        fast=arguments.fast,
        unsupported=arguments.unsupported,
        target=arguments.target,
        **more,
    )


def find_programs(given: Sequence[str]) -> dict[str, Path]:
    """Return the file of each method in `[METHOD=]MODEL.pt2` arguments; InputError if one is missing or unclear."""
    files: dict[str, Path] = {}
    for text in given:
        method, equals, rest = text.partition("=")
        # A file may have an equals sign in its name or in that of a directory.
        if not equals or not method or Path(text).is_file() or not (method.isidentifier() or Path(rest).is_file()):
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
        if method in files:
            raise InputError(f"{text!r}: the method {method!r} is given twice. Name each file differently.")
        files[method] = find_file(rest)
        if not zipfile.is_zipfile(files[method]):  # before anything slow is imported
            raise _refusal(files[method], "BadZipFile: File is not a zip file")
    return files


def read_programs(files: Mapping[str, Path], trust: bool) -> dict[str, ExportedProgram]:
    """Read the programs; with `trust` as torch does, which runs code in them, else InputError if one would."""
    return {method: _read_program(path, trust) for method, path in files.items()}


def _read_program(path: Path, trust: bool) -> ExportedProgram:
    from exir_lowering.cli.pt2 import check_devices, check_file
    from exir_lowering.graphs.serialized.grammar import UnsafeFileError

    try:
        with path.open("rb") as file:
            if trust:
                check_devices(file)
            return _load(file if trust else check_file(file))
    except MemoryError:
        raise
    except Exception as error:
        if isinstance(error, UnsafeFileError) and kind_of_file(path) in (None, PT2):
            raise InputError(
                f"{str(path)!r} is not loaded, since it could run code here: {error}. torch.export.save does not write "
                "such a file for an ordinary model. If it comes from somebody you trust, --trust loads it anyway, and "
                "runs the code in it."
            ) from error
        reason = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {first_line(error)}"
        raise _refusal(path, reason) from error


def _refusal(path: Path, reason: str) -> InputError:
    kind = kind_of_file(path)
    content = "damaged, cut short, or something else" if path.stat().st_size else "empty"
    if kind is not None:
        content = "damaged, or from another version of torch" if kind is PT2 else kind.name
    return InputError(
        f"Cannot read {str(path)!r} as an exported program: it is {content} ({reason[:800]}). Expected a .pt2 file "
        f"made by torch.export.save, here with torch {metadata.version('torch')}. Export the model again, or copy the "
        "file again."
    )


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
