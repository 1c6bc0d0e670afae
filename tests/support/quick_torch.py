"""Two look-ups of torch that take half the time of a small lowering, remembered between the tests.

torch asks its dispatcher for all composite operators of all namespaces, five times in each conversion to Edge dialect,
and makes the type of an annotation anew for each kernel that a conversion replaces. The answers are the same until an
operator is registered. With EXIR_LOWERING_FRESH=1, as in the nightly set, torch is left alone.
"""

from __future__ import annotations

import typing
from typing import Any

import torch
import torch._ops
from torch._export import utils
from torch.export import decomp_utils, exported_program

_collect = utils._collect_all_valid_cia_ops
_found: dict[Any, set[Any]] = {}


def _remembered() -> set[Any]:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    key = (tuple(registered), tuple((name, len(_names(name))) for name in torch.ops._dir))
    if key not in _found:
        _found.clear()
        found = _collect()
        # Collecting gives torch.ops names for what was found.
        key = (tuple(registered), tuple((name, len(_names(name))) for name in torch.ops._dir))
        _found[key] = found
    return _found[key]


def _names(namespace: str) -> list[str]:
    return getattr(getattr(torch.ops, namespace, None), "_dir", [])


def install() -> None:
    """Remember the answers from now on."""
    for module in (utils, decomp_utils, exported_program):
        module._collect_all_valid_cia_ops = _remembered
    torch._ops.Callable = typing.Callable  # which remembers what it was subscripted with
