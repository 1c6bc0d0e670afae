"""A model that a function of the user's makes becomes programs."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stderr
from typing import Any

import torch
from torch.export import ExportedProgram

from exir_lowering.cli import importing
from exir_lowering.cli.output import say
from exir_lowering.errors import InputError

_EXPECTED = (
    "expected a model and its inputs, such as `return model, (x,)`, `return model, {'input_ids': ids}` or `return "
    "model, (args, kwargs, dynamic_shapes)`; a torch.export.ExportedProgram; or a mapping from methods to one of these"
)


def make_programs(place: str, function: str) -> dict[str, ExportedProgram]:
    """Return the methods that a function of a module or a Python file makes, exported; InputError if it makes none."""
    who = f"{place}:{function}"
    with torch.random.fork_rng(devices=[]):
        importing.import_module(who, place)
        torch.manual_seed(0)  # random weights are the same for `lower` and `verify`, however the file is imported
        made = importing.make(who, place, function, (ExportedProgram, Mapping, torch.nn.Module))
        if not isinstance(made, Mapping):
            return {"forward": _export_made(who, made)}
        return {str(name): _export_made(f"{who}: {name!r}", one) for name, one in made.items()}


def _export_made(who: str, made: Any) -> ExportedProgram:
    if isinstance(made, ExportedProgram):
        return made
    model, *given = made if isinstance(made, (tuple, list)) and made else (made,)
    if not isinstance(model, torch.nn.Module) or not 1 <= len(given) <= 3:
        what = "a model without inputs" if isinstance(made, torch.nn.Module) else f"a {type(made).__name__}"
        raise InputError(f"{who}: it returns {what}, {_EXPECTED}.")
    inputs: Any = given[0] if len(given) == 1 else given
    if isinstance(inputs, Mapping):
        inputs = [(), inputs]
    elif not isinstance(inputs, (tuple, list)):
        inputs = [(inputs,)]
    elif not (len(inputs) > 1 and isinstance(inputs[0], (tuple, list)) and isinstance(inputs[1], Mapping | None)):
        inputs = [inputs]
    if len(inputs) > 3:
        raise InputError(f"{who}: it returns a model and {len(inputs)} things, {_EXPECTED}.")
    args, kwargs, shapes = [*inputs, None, None][:3]
    return export(who, model, tuple(args), dict(kwargs or {}), shapes)


def export(
    who: str, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any, **more: Any
) -> ExportedProgram:
    """Export a model for inference; InputError if torch.export refuses it."""
    if any(module.training for module in model.modules()):
        say(f"Note: {who}: the model was in training mode; it is exported after model.eval().", error=True)
        model.eval()
    what = f"{who}: torch.export cannot export {type(model).__name__}:"
    with importing.explaining(what, who.partition(":")[0]), torch.no_grad(), redirect_stderr(io.StringIO()):
        return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, **more)  # it prints graphs there
