"""A plan as JSON: everything in it, and the coverages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from exir_lowering.plans.planned import MethodPlan

if TYPE_CHECKING:
    from exir_lowering.plans.lowering_plan import LoweringPlan

VERSION = 1
"""Increased when a field of the JSON changes its meaning or is removed."""


def to_json(plan: LoweringPlan) -> str:
    """Return a plan as JSON; equal plans give equal text.

    Args:
        plan: The plan.

    Returns:
        `{"version": 1, "methods": [...]}`: the fields of `MethodPlan` and of what it holds, under their names, and for
        each method the `coverage` of its `operators`, `flops` and `weights`, 0 to 1, or null if it has none. A report
        has additional fields.
    """
    return json.dumps(as_data(plan), indent=2)


def as_data(plan: LoweringPlan) -> dict[str, Any]:
    """Return what `to_json` writes."""
    more = {field.name: plain(getattr(plan, field.name)) for field in fields(plan) if field.name != "methods"}
    return {"version": VERSION, "methods": [_method(method) for method in plan.methods], **more}


def coverages(method: MethodPlan) -> dict[str, float | None]:
    """Return the delegated shares of a method, 0 to 1; None where the total is zero."""
    return {
        "operators": method.coverage if method.nodes else None,
        "flops": method.flops_coverage if any(node.flops for node in method.nodes) else None,
        "weights": method.weights_coverage if method.weight_bytes else None,
    }


def _method(method: MethodPlan) -> dict[str, Any]:
    values: dict[str, Any] = plain(method)
    return {"name": values.pop("name"), "coverage": coverages(method), **values}


def plain(value: Any) -> Any:
    """Return values as JSON can hold them."""
    if is_dataclass(value) and not isinstance(value, type):
        names = (field.name.lstrip("_") for field in fields(value))  # a property tells what a private field keeps
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): plain(value[key]) for key in sorted(value)}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value.hex() if isinstance(value, bytes) else value
