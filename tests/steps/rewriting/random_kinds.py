"""The kinds of random programs that are rewritten: of each kind one for each seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import both_forms
import module_programs
import operator_programs
import quantized_attention
import random_attention
import torch
from random_flow import export_random
from random_programs import random_program
from torch.export import ExportedProgram

Made = tuple[str, Any, Any]


def _of_examples(name: str, program: ExportedProgram, seed: int) -> Made:
    args, kwargs = program.example_inputs or ((), {})
    if kwargs:
        raise ValueError("named inputs")
    flat = tuple(torch.utils._pytree.tree_leaves(args))
    return name, program, list(both_forms.variants(flat, random.Random(seed), 3))


def _operators(seed: int) -> Made:
    """Make a program of five calls of operators."""
    found = [operator_programs.call(number) for number in range(5 * seed, 5 * seed + 5)]
    calls = [one for one in found if one is not None and not one.writes]
    program = operator_programs.export_calls(calls)
    return _of_examples(", ".join(one.name for one in calls), program, seed)


def _methods(seed: int) -> Made:
    made = random_program(seed)
    return f"{len(made.methods)} methods", made.methods, made.inputs


KINDS: Mapping[str, Callable[[int], Made]] = {
    "attention": random_attention.make,
    "state": lambda seed: random_attention.make(seed, state=True),
    "ops": _operators,
    "modules": lambda seed: _of_examples(*module_programs.make(seed), seed),
    "random": export_random,
    "methods": _methods,
    "quantized": quantized_attention.make,
}
"""By name, what makes a name, a program or several, and the inputs of consecutive calls."""
