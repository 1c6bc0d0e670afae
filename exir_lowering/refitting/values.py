"""The values that are given, checked against what the file says of the model's weights."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash

from exir_lowering.errors import InputError
from exir_lowering.graphs.ranges.analysis import REPLACED_BOUND
from exir_lowering.pte.recipes import Weight, is_bounded

_SHOWN = 5


def read_values(who: str, given: Any, weights: Mapping[str, Weight], strict: bool) -> dict[str, torch.Tensor]:
    """Return the values to use by name, tied ones under each name; raise an InputError for what does not fit."""
    if not isinstance(given, Mapping):
        raise InputError(f"{who}: state_dict: got {type(given).__name__}, expected a mapping from names to tensors.")
    unknown = [name for name in given if name not in weights]
    if unknown:
        close = difflib.get_close_matches(str(unknown[0]), weights, n=2)
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise InputError(
            f"{who}: state_dict has {_list(unknown)}, which the file's model does not have. Its names are those of the "
            f"program that was exported.{hint}"
        )
    for name, value in given.items():
        _check(f"{who}: state_dict[{name!r}]", value, weights[name])
    found: dict[str, torch.Tensor] = {}
    groups: dict[str, list[str]] = {}
    for name, weight in weights.items():
        groups.setdefault(weight.tied or name, []).append(name)
    for names in groups.values():
        have = [name for name in names if name in given]
        for other in have[1:]:
            if given[other] is not given[have[0]] and digest(given[other]) != digest(given[have[0]]):
                raise InputError(
                    f"{who}: state_dict: {have[0]!r} and {other!r} are one tensor in the model, but got two different "
                    "values. Give the same for both, or only one of them; lower the model again if they are not tied."
                )
        found.update({name: given[have[0]].detach() for name in names if have})
    missing = [name for name in weights if name not in found]
    if strict and missing:
        raise InputError(
            f"{who}: state_dict lacks {_list(missing)}. Give all values of the model, or strict=False, which keeps "
            "those that are missing."
        )
    return found


def _check(who: str, value: Any, weight: Weight) -> None:
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{who}: got a {type(value).__name__}, expected a tensor.")
    kind, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
    if (kind, shape) != (weight.dtype, weight.shape):
        raise InputError(
            f"{who}: got {kind}{list(shape)}, expected {weight.dtype}{list(weight.shape)}: a file keeps the shapes and "
            "dtypes that it was lowered with. Convert the value, or lower the model again."
        )
    plain = value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
    if not plain or type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise InputError(f"{who}: got a {type(value).__name__} on {value.device}, expected a dense tensor on the CPU.")
    if weight.reason and digest(value) != weight.digest:
        raise InputError(f"{who}: its value cannot be replaced: {weight.reason}. Lower the model again.")
    if weight.bounded and not is_bounded(value):
        raise InputError(
            f"{who}: an element is larger than {REPLACED_BOUND:,.0f}, or infinite; the lowering relied on the opposite. "
            "Lower the model again."
        )


def digest(value: torch.Tensor) -> str:
    """Return the digest of a tensor's elements."""
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return str(xxhash.xxh3_128_hexdigest(flat.numpy().data))


def _list(names: Sequence[Any]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
