"""A model that a function of the user's makes becomes programs."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stderr
from typing import Any

import torch
from torch.export import ExportedProgram

from exir_lowering.cli import importing
from exir_lowering.cli.output import first_line, say
from exir_lowering.errors import InputError

_EXPECTED = (
    "expected a model and its inputs, such as `return model, (x,)`, `return model, {'input_ids': ids}` or `return "
    "model, (args, kwargs, dynamic_shapes)`; a torch.export.ExportedProgram; or a mapping from methods to one of these"
)


def make_programs(place: str, function: str) -> dict[str, ExportedProgram]:
    """Return the methods that a function of a module or a Python file makes, exported; InputError if it makes none."""
    who = f"{place}:{function}"
    with importing.importable(place), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = importing.find_object(who, place, function)
        torch.manual_seed(0)  # random weights are the same for `lower` and `verify`, however the file is imported
        made = found if isinstance(found, (ExportedProgram, Mapping)) else importing.call(who, found, place)
        if not isinstance(made, Mapping):
            return {"forward": _export_made(who, made)}
        return {str(name): _export_made(f"{who}: {name!r}", one) for name, one in made.items()}


def _export_made(who: str, made: Any) -> ExportedProgram:
    if isinstance(made, ExportedProgram):
        return made
    model, *given = made if isinstance(made, (tuple, list)) and made else (made,)
    if not isinstance(model, torch.nn.Module) or not 1 <= len(given) <= 3:
        alone = isinstance(model, torch.nn.Module) and not given
        what = "a model without inputs" if alone else f"a {type(made).__name__}"
        raise InputError(f"{who}: it returns {what}, {_EXPECTED}.")
    inputs: Any = given[0] if len(given) == 1 else given
    if isinstance(inputs, Mapping):
        inputs = [(), dict(inputs)]
    elif not isinstance(inputs, (tuple, list)):
        inputs = [(inputs,)]
    elif not (len(inputs) > 1 and isinstance(inputs[0], (tuple, list)) and isinstance(inputs[1], Mapping | None)):
        inputs = [tuple(inputs)]
    args, kwargs, shapes = [*inputs, None, None][:3]
    return export(who, model, tuple(args), dict(kwargs or {}), shapes)


def export(
    who: str, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any, **more: Any
) -> ExportedProgram:
    """Export a model for inference; InputError if torch.export refuses it."""
    if any(module.training for module in model.modules()):
        say(f"Note: {who}: the model was in training mode; it is exported after model.eval().", error=True)
        model.eval()
    try:
        with torch.no_grad(), redirect_stderr(io.StringIO()):  # where it prints graphs
            return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, **more)
    except MemoryError:
        raise
    except Exception as error:
        line = importing.line_of(error, who.partition(":")[0])
        branch = " What depends on a tensor's values is torch.where, or torch.cond." * ("data-dependent" in str(error))
        raise InputError(
            f"{who}: torch.export cannot export {type(model).__name__}: {type(error).__name__}: "
            f"{first_line(error)[:800]}{line}.{branch} --debug shows all that torch says."
        ) from error
