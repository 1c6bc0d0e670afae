"""The inputs of a method on the command line: calls in a file of torch.save, or drawn ones."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exir_lowering.cli.output import first_line
from exir_lowering.errors import InputError, did_you_mean, explained

if TYPE_CHECKING:
    from exir_lowering.pte.signatures import MethodSignature
    from exir_lowering.runtime.program import LoadedProgram


def add_argument(command: argparse.ArgumentParser) -> None:
    """Add the arguments for the inputs of one call."""
    command.add_argument(
        "--inputs",
        metavar="INPUTS.pt",
        help="the inputs, which torch.save wrote: a list or tuple of tensors and numbers, or a list of calls, of which "
        "the first is taken (default: random numbers in the sizes that the file says)",
    )
    command.add_argument("--seed", type=int, default=0, help="the seed of random inputs (default: 0)")


def add_data(command: argparse.ArgumentParser, name: str = "--data", whose: str = "the .pte") -> None:
    """Add the argument for data files."""
    command.add_argument(
        name, action="append", default=[], metavar="WEIGHTS.ptd", help=f"a data file that {whose} needs; repeatable"
    )


def read_calls(option: str, path: Path) -> Any:
    """Read the calls of a method, or of several by name, from a file of torch.save; InputError if it is another."""
    import torch

    what = f"{option} {str(path)!r}: not a torch.save file with only tensors, numbers, tuples, lists and dicts"
    again = "Save it again: torch.save([(x, y), ...], 'inputs.pt')."
    with explained(lambda error: InputError(f"{what} ({type(error).__name__}: {first_line(error)}). {again}")):
        # Only tensors and plain values: a torch.save file can run code otherwise.
        return torch.load(path, weights_only=True)


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


def make_inputs(given: Path | None, seed: int, program: LoadedProgram, method: str) -> list[Any]:
    """Return the inputs of a call as the method takes them: those in a file, or drawn ones."""
    if given is None:
        named = next(name for name in program.method_names if name.partition("@")[0] == method or name == method)
        return draw(program.methods[named], seed)
    found = read_calls("--inputs", given)
    values = list(found) if isinstance(found, (list, tuple)) else [found]
    if values and isinstance(values[0], (list, tuple)):
        values = list(values[0])
    return values


def draw(method: MethodSignature, seed: int) -> list[Any]:
    """Return random inputs for a method, in the largest sizes that the file says; integers are 0 or 1."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    drawn: list[Any] = []
    for one in method.inputs:
        if one.dtype is None or one.shape is None:
            drawn.append(one.value)
            continue
        shape: Sequence[int] = one.least or (1,) * len(one.shape) if one.unbound else one.shape
        if one.dtype.is_floating_point or one.dtype.is_complex:
            drawn.append(torch.randn(shape, generator=generator).to(one.dtype))
        else:  # small enough for any vocabulary, and any index
            drawn.append(torch.randint(0, 2, tuple(shape), generator=generator).to(one.dtype))
    return drawn
