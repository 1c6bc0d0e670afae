"""Python values as JSON with tensors apart, as a lowered module's file stores them. Reading them executes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from exir_lowering._upstream.fakes import FakeTensor
from exir_lowering.errors import InputError
from exir_lowering.pte.value_kinds import CODES

_DIGITS = 4300  # the most that Python converts by default
_TOO_LARGE = 10**_DIGITS
DEEPEST = 300
"""How deep a value may be nested; Python's own limit is a setting of the process, which torch raises."""
STORABLE = "None, bool, int, float, str, torch.Tensor, and lists, tuples and dicts of these"


def encode(where: str, value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a value as JSON, with numbers for its tensors, which are added; InputError if it cannot be stored."""
    try:
        return _encode(where, value, tensors)
    except RecursionError:
        raise InputError(f"{where} contains itself, or is nested too deeply to be stored.") from None


class Tensors:
    """The tensors that JSON refers to, each once: a small file cannot ask for many copies of a large one."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._left = dict(enumerate(tensors))

    def take(self, number: Any) -> torch.Tensor:
        """Return a tensor by its number, once; TypeError or LookupError if there is none or it was already taken."""
        if type(number) is not int:
            raise TypeError(f"{number!r} is not the number of a tensor")
        return self._left.pop(number)


def decode(json: Any, tensors: Tensors, depth: int = 0) -> Any:
    """Return the value that `encode` made JSON of; for other JSON, any error that `record.read` catches."""
    if depth > DEEPEST:
        raise ValueError(f"a value that is nested more than {DEEPEST} deep")
    if json is None or isinstance(json, (bool, int, float, str)):
        return json
    if isinstance(json, list):
        return [decode(item, tensors, depth + 1) for item in json]
    ((kind, content),) = json.items()
    if kind == "float":
        if not isinstance(content, str):
            raise TypeError(f"{content!r} is not the text of a float")
        return float(content)
    if kind == "tuple":
        return tuple(decode(item, tensors, depth + 1) for item in content)
    if kind == "dict":
        return {decode(key, tensors, depth + 1): decode(item, tensors, depth + 1) for key, item in content}
    if kind == "tensor":
        return tensors.take(content)
    raise ValueError(f"unknown kind {kind!r}")


def storable(where: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it is stored, in the default order; InputError if its kind or type cannot be stored."""
    problem = None
    if type(tensor) is not torch.Tensor or isinstance(tensor, FakeTensor):
        problem = (
            f"is a {type(tensor).__module__}.{type(tensor).__qualname__}; store its plain tensor: .detach().clone()"
        )
    elif tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        problem = f"is a {tensor.layout} tensor on {tensor.device}; only dense tensors on the CPU can be stored"
    elif tensor.dtype not in CODES:
        problem = f"has the dtype {tensor.dtype}, which ExecuTorch does not know"
    if problem is not None:
        raise InputError(f"{where} {problem}.")
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _encode(where: str, value: Any, tensors: list[torch.Tensor], depth: int = 0) -> Any:
    if depth > DEEPEST:
        raise RecursionError
    kind = type(value)
    if kind is int and abs(value) >= _TOO_LARGE:
        raise InputError(
            f"{where} is an int of more than {_DIGITS} digits, which cannot be stored. Store it as hex(...)."
        )
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind in (list, tuple):
        items = [_encode(f"{where}[{index}]", item, tensors, depth + 1) for index, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind is dict:
        pairs = [
            [
                _encode(f"a key of {where}", key, tensors, depth + 1),
                _encode(f"{where}[{key!r}]", item, tensors, depth + 1),
            ]
            for key, item in value.items()
        ]
        return {"dict": pairs}
    if isinstance(value, torch.Tensor):
        tensors.append(storable(where, value))
        return {"tensor": len(tensors) - 1}
    raise InputError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored. Storable: {STORABLE}."
    )
