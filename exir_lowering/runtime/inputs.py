"""Check the inputs of a method, and put them into the form that the runtime takes them in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy
import torch

from exir_lowering._upstream.tensors import FakeTensor
from exir_lowering.errors import InputError, exception_text
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.value_kinds import BOOL, DOUBLE, INT, KINDS, NULL, Tensor, ValueSpec, short_name, strides

FLAT = "Inputs are flat: pass what a list, tuple or dict holds one by one, or by name with **."
NESTED = (list, tuple, Mapping)


def label(method: MethodSpec, place: int, names: Sequence[str] = ()) -> str:
    """Return what messages call an input, if it is not one of the given names."""
    name = names[place] if names else method.signature.inputs[place].name
    return name if names or name == f"input {place}" else f"argument {name!r}"


def prepare(where: str, method: MethodSpec, inputs: Sequence[Any], names: Sequence[str] = ()) -> list[Any]:
    """Return flat inputs as the runtime takes them; messages begin with `where`, and may call them by other names."""
    prepared = []  # and no names: a call that is right needs none
    for index, (value, given) in enumerate(zip(method.inputs, inputs, strict=True)):
        if index in method.lost:
            raise InputError(
                f"{where}: {label(method, index, names)} cannot be given. It was an integer of any value when the "
                "model was exported, which .pte files cannot represent: they store None instead, which is all that the "
                "runtime accepts. Export the model with a fixed integer, or with a tensor in its place."
            )
        problem, given = _check(value, given)
        if problem is not None:
            name = label(method, index, names)
            raise InputError(f"{where}: {name} is {show(given)}, expected {describe(value)}. {problem}".rstrip())
        prepared.append(given)
    # The runtime does not check what sizes have in common: it stops with a bare number, or broadcasts what is 1.
    for one in method.dimensions:
        sizes = [prepared[index].size(at) for index, at, _, _ in one.places]
        found = {divmod(size - more, factor) for size, (*_, factor, more) in zip(sizes, one.places, strict=True)}
        if len(found) > 1 or any(rest or size < one.least for size, rest in found):
            name, given = one.name or "n", []
            for size, (index, at, factor, more) in zip(sizes, one.places, strict=True):
                term = f"{f'{factor} * ' * (factor > 1)}{name}{f' {more:+}' * bool(more)}"
                given.append(f"dimension {at} of {label(method, index, names)} is {size}, expected {term}")
            least = f" of at least {one.least}" if one.least else ""
            raise InputError(
                f"{where}: {'; '.join(given)}. The model was exported for one size {name!r}{least}: pass inputs of "
                "such sizes, or export it with other Dims."
            )
    return prepared


def describe(value: ValueSpec) -> str:
    """Describe what an input has to be."""
    if isinstance(value.content, Tensor):
        tensor = value.content
        shape = f"of shape {'at most ' * tensor.dynamic}{list(tensor.sizes)}"
        shape = f"with {len(tensor.sizes)} dimensions" if tensor.unbound else shape
        if tensor.greatest:
            shape = f"of shape at most {list(tensor.greatest)}, with at most {math.prod(tensor.sizes):,} elements"
        return f"a tensor of {short_name(tensor.dtype)} {shape}"
    if value.kind == NULL:
        return "None"
    if value.kind in (INT, BOOL, DOUBLE):
        return f"the {KINDS[value.kind].split()[1]} {value.content}, which it was exported with"
    return KINDS[value.kind]


def show(given: Any) -> str:
    """Describe briefly what was given."""
    if isinstance(given, torch.Tensor):
        device = "" if given.device.type == "cpu" else f" on {given.device}"
        layout = "" if given.layout == torch.strided else f" with the layout {short_name(given.layout)}"
        return f"a tensor of {short_name(given.dtype)} of shape {list(given.shape)}{device}{layout}"
    if given is None:
        return "None"
    if isinstance(given, (bool, int, float, str)):
        text = repr(given)
        return f"the {type(given).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
    return f"of type {type(given).__module__}.{type(given).__qualname__}"


def _check(value: ValueSpec, given: Any) -> tuple[str | None, Any]:
    """Return a hint when an input is wrong, "" when there is none to give; and the input as the runtime takes it."""
    if isinstance(value.content, Tensor):
        return _check_tensor(value.content, given)
    if value.kind == NULL:
        return (None, None) if given is None else ("A str or None at export is None in a .pte file.", given)
    if value.kind not in (BOOL, INT, DOUBLE):
        return "The runtime cannot be given such inputs from Python; export the model without it.", given
    expected: Any = value.content
    types = (int, float) if value.kind == DOUBLE else int
    number = isinstance(given, types) and isinstance(given, bool) == (value.kind == BOOL)
    if number and (given == expected or (math.isnan(given) and math.isnan(expected))):
        return None, expected  # it is of the very type that the runtime compares with
    return "Numbers are part of the program: export it again for another.", given


def _check_tensor(expected: Tensor, given: Any) -> tuple[str | None, Any]:
    given = as_tensor(given)
    if not isinstance(given, torch.Tensor):
        array = "PyTorch has no such type of elements." * (type(given).__module__.partition(".")[0] == "numpy")
        number = "Pass torch.tensor(...) of that dtype and shape." * isinstance(given, (bool, int, float))
        return FLAT if isinstance(given, NESTED) else array or number, given
    if given.device.type != "cpu" or given.layout != torch.strided:
        return "Pass a dense tensor on the CPU.", given
    name = short_name(expected.dtype)
    hint = f'Convert it with .to(torch.{name}), an array with .astype("{name}").'
    problems = (None if given.dtype == expected.dtype else hint), expected.misfit(given.shape)
    if any(problems):
        return " ".join(filter(None, problems)), given
    if isinstance(given, FakeTensor):
        return "It is a fake tensor, which has no values.", given
    try:
        plain = given.detach().as_subclass(torch.Tensor)
        if plain.numel() and not plain.data_ptr():
            return f"A {type(given).__name__} has no memory of its own; convert it to a plain tensor.", given
        return None, lay_out(plain, expected.dim_order)
    except MemoryError:
        raise
    except Exception as error:
        # Tensors of transforms such as vmap, and subclasses of other libraries.
        return f"Its values cannot be read: {exception_text(error)}", given


def as_tensor(given: Any) -> Any:
    """Return a tensor for an array or a number of NumPy, on its memory if that can be; others as they are."""
    if isinstance(given, (numpy.ndarray, numpy.generic)):
        with suppress(TypeError, ValueError):  # of a type, or an order of bytes, that torch does not have
            return torch.from_numpy(numpy.require(given, None, ["C", "W"]))
    return given


def lay_out(tensor: torch.Tensor, dim_order: Sequence[int]) -> torch.Tensor:
    """Return a tensor that lies in memory in an order: read in another one, its values are silently wrong."""
    # Sizes of 1 leave strides undetermined; the runtime judges the layout by them.
    return with_strides(tensor.resolve_conj().resolve_neg(), strides(tensor.shape, dim_order))


def with_strides(tensor: torch.Tensor, wanted: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with these strides: the given one, or a copy that is no view, so that users may write into it."""
    if tensor.stride() == wanted:
        return tensor
    return torch.empty_strided(tensor.shape, wanted, dtype=tensor.dtype).copy_(tensor)
