"""Where weights go: into the `.pte` file or into data files next to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import torch

from exir_lowering import graphs
from exir_lowering._upstream.delegates import place_named_data
from exir_lowering.errors import InputError, exception_text, explained
from exir_lowering.steps.file import File

Policy: TypeAlias = "str | Callable[[str, int], str | None]"
"""The data file of all weights, or a function from a weight's key and bytes to its file, None for the `.pte`."""

_NOT_IN_A_NAME = frozenset("/\\\0")
_FILE = "constant_tag"  # ExecuTorch's key of node.meta for the data file of a constant, which its emitter reads


def place_weights(file: File) -> None:
    """Move delegates' data and the host's constants, but literals, to where a policy puts them."""
    policy = file.options.external_weights
    if policy is None:
        return
    if file.config.external_constants:
        raise InputError(
            "external_weights: the config also sets external_constants. Remove one of them; external_weights also "
            "places the weights of delegates."
        )

    if not isinstance(policy, str) and not callable(policy):
        raise InputError(
            f"external_weights: got {policy!r}, expected the name of a data file, or a function from a weight's key "
            "and bytes to the name of its file."
        )

    @cache  # an answer may change, and the file and its report have to agree
    def decide(key: str, size: int) -> str | None:
        what, of = f"external_weights: {policy!r} raised", f"for {key!r} of {size} bytes."
        with explained(lambda error: InputError(f"{what} {exception_text(error)} {of}")):
            name: Any = policy if isinstance(policy, str) else policy(key, size)
        if name is None:
            return None
        if not isinstance(name, str) or not name.removesuffix(".ptd") or not _NOT_IN_A_NAME.isdisjoint(name):
            raise InputError(
                f"external_weights: got {name!r} for {key!r}, expected the name of a file next to the .pte file, such "
                "as 'weights', or None for the .pte file itself."
            )
        return name.removesuffix(".ptd")

    for program in file.programs.values():
        written = graphs.written_state(program)
        for node, spec in graphs.lifted_inputs(program).items():
            name, value = str(spec.target), graphs.lifted_value(program, spec.target)
            # ExecuTorch keeps literals in the `.pte` file.
            if isinstance(value, torch.Tensor) and name not in written and "_lifted_tensor" not in node.name:
                node.meta[_FILE] = decide(name, value.numel() * value.element_size())
        for _, module, attribute in graphs.delegates(program.graph_module):
            setattr(module, attribute, place_named_data(getattr(module, attribute), decide))
