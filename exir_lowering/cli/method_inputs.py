"""The inputs of a method on the command line: files, tensors by shape, numbers, lists of numbers."""

from __future__ import annotations

import argparse
import ast
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exir_lowering.cli.output import find_file, first_line
from exir_lowering.errors import InputError, did_you_mean, let_through

if TYPE_CHECKING:
    import torch

    from exir_lowering.runtime.program import LoadedProgram

_FILLS = ("randn", "rand", "ones", "zeros", "arange")
_FILL = re.compile(rf"({'|'.join(_FILLS)}):(?:([a-z]+[0-9]*):)?(\d+(?:x\d+)*|scalar)")
_SUFFIXES = (".pt", ".pth", ".npy")


_ADVICE = (
    "Give one --input for each input, in order: a file, a number, or a fill with a dtype and a shape, such as "
    "--input randn:float32:2x3."
)


def add_argument(command: argparse.ArgumentParser) -> None:
    """Add the argument."""
    command.add_argument(
        "--input",
        action="extend",
        nargs="+",
        default=[],
        metavar="INPUT",
        dest="inputs",
        help="the inputs, in order; see `exir-lower run --help`",
    )


def add_data(command: argparse.ArgumentParser, name: str = "--data", whose: str = "the .pte") -> None:
    """Add the argument for data files."""
    command.add_argument(
        name, action="append", default=[], metavar="WEIGHTS.ptd", help=f"a data file that {whose} needs; repeatable"
    )


def read_calls(option: str, path: Path) -> Any:
    """Read the calls of a method, or of several by name, from a file of torch.save; InputError if it is another."""
    return _load(option, path, "tensors, numbers, tuples, lists and dicts", "torch.save([(x, y), ...], 'inputs.pt')")


def _load(option: str, path: Path, expected: str, example: str) -> Any:
    import torch

    try:
        # Only tensors and plain values: a torch.save file can run code otherwise.
        return torch.load(path, weights_only=True)
    except Exception as error:
        let_through(error)
        raise InputError(
            f"{option} {str(path)!r}: not a torch.save file with only {expected} "
            f"({type(error).__name__}: {first_line(error)}). Save it again: {example}."
        ) from error


def choose_method(wanted: str | None, program: LoadedProgram, source: Path) -> str:
    """Choose the method, or family, to run; InputError if the file does not have it, or it has to be named."""
    names = [*dict.fromkeys(part for name in program.method_names for part in (name, name.partition("@")[0]))]
    if wanted is None and "forward" not in names and len(names) == 1:
        return names[0]
    if (wanted or "forward") in names:
        return wanted or "forward"
    which = f"there is no method {wanted or 'forward'!r}" + ("" if wanted else ", so give --method NAME")
    hint = did_you_mean(wanted or "", names)
    raise InputError(f"{str(source)!r}: {which}. The file has {', '.join(map(repr, names))}.{hint}")


def fit_inputs(program: LoadedProgram, method: str, values: list[Any]) -> list[Any]:
    """Return the inputs as the method takes them; InputError, which says what to write, if it does not."""
    try:
        return program.as_inputs(method, values)
    except InputError as error:
        raise InputError(f"{error} {_ADVICE}") from error


def check_inputs(given: Sequence[str]) -> None:
    """Raise an InputError for what is neither a file nor another form of input, before anything slow is imported."""
    for text in given:
        if _is_file(text):
            find_file(text)
        elif not _FILL.fullmatch(text):
            _parse_literal(text)


def make_inputs(given: Sequence[str]) -> list[Any]:
    """Make the inputs of arguments that `check_inputs` took, several for a list in a file, or an InputError."""
    return [value for text in given for value in _make_input(text)]


def _is_file(text: str) -> bool:
    return Path(text).suffix in _SUFFIXES or Path(text).is_file()


def _parse_literal(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = None
    if isinstance(value, (bool, int, float, list)):
        return value
    raise InputError(
        f"--input {text!r}: expected a file ({', '.join(_SUFFIXES)}), a number, a list of numbers such as "
        f"[[1,2],[3,4]], or FILL:SHAPE or FILL:DTYPE:SHAPE such as randn:1x3x224x224 or zeros:int64:1x8. "
        f"FILL is one of {', '.join(_FILLS)}."
    )


def _make_input(text: str) -> Iterator[Any]:
    """Make the inputs that an argument stands for."""
    import torch

    fill = _FILL.fullmatch(text)
    if _is_file(text):
        value = _read_file(Path(text))
        yield from value if isinstance(value, (list, tuple)) else (value,)
    elif fill:
        yield _fill(text, *fill.groups())
    else:
        value = _parse_literal(text)
        try:
            yield torch.tensor(value) if isinstance(value, list) else value
        except (ValueError, TypeError, RuntimeError) as error:
            let_through(error)
            raise InputError(
                f"--input {text!r}: no tensor can be made from the list ({first_line(error)}). Expected numbers, in "
                f"rows of one length."
            ) from error


def _fill(text: str, fill: str, dtype_name: str | None, shape: str) -> torch.Tensor:
    """Make a tensor of a shape."""
    import torch

    dtype = getattr(torch, dtype_name or "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(
            f"--input {text!r}: torch has no dtype {dtype_name!r}. Expected one such as float32, int64 or bool."
        )
    sizes = [] if shape == "scalar" else [int(part) for part in shape.split("x")]
    try:
        if fill == "arange":
            return torch.arange(math.prod(sizes)).reshape(sizes).to(dtype)
        made: torch.Tensor = getattr(torch, fill)(sizes, dtype=dtype)
        return made
    except (RuntimeError, TypeError) as error:
        let_through(error)
        raise InputError(f"--input {text!r}: torch.{fill} cannot make it: {first_line(error)}") from error


def _read_file(path: Path) -> Any:
    """Read a tensor, a number, or a list of these."""
    import torch

    if path.suffix == ".npy":
        import numpy

        try:
            return torch.from_numpy(numpy.load(path, allow_pickle=False))
        except (OSError, ValueError, TypeError, EOFError) as error:
            let_through(error)
            raise InputError(
                f"--input {str(path)!r}: not a .npy file with a numeric array: {first_line(error)}"
            ) from error
    value = _load("--input", path, "tensors or numbers", "torch.save(tensor, 'x.pt')")
    for part in value if isinstance(value, (list, tuple)) else (value,):
        if not isinstance(part, (torch.Tensor, bool, int, float)):
            raise InputError(
                f"--input {str(path)!r}: holds a {type(part).__name__}, expected a tensor, a number or a list of them."
            )
    return value
