"""Methods that return a constant: the given ones, and those that ExecuTorch's language-model runner reads."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from exir_lowering.errors import InputError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_RUNNER = "ExecuTorch's TextLLMRunner"
_TOKENS, _TOKENS_AND_START = [(False, 2)], [(False, 2), (False, 1)]
_LOGITS = [(True, 2)], [(True, 3)]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    command.add_argument(
        "--constant",
        metavar="NAME[:TYPE]=VALUE",
        action="append",
        default=[],
        dest="constants",
        help="add a method that returns a value, such as get_max_seq_len=64, use_kv_cache=true or get_eos_ids=[1,2]; "
        "give TYPE (int, float, bool or str) if the value looks like another type; repeatable",
    )
    command.add_argument(
        "--runner-metadata",
        action="store_true",
        help=f"add the metadata methods that {_RUNNER} reads, such as get_vocab_size, with values from the program; "
        "--constant adds those that the program does not have, such as get_eos_ids, and takes precedence",
    )


def read_constants(arguments: argparse.Namespace, methods: Collection[str]) -> dict[str, Any]:
    """Return the values that are given, before anything slow; InputError if one is invalid."""
    constants: dict[str, Any] = {}
    for given in arguments.constants:
        name, equals, text = given.partition("=")
        name, colon, kind = name.partition(":")
        if not name.isidentifier() or not equals or (colon and kind not in _TYPES):
            raise InputError(
                f"--constant {given!r}: expected NAME=VALUE, such as get_max_seq_len=64, or NAME:TYPE=VALUE, where "
                f"TYPE is {', '.join(_TYPES)}."
            )
        if name in methods or name in constants:
            raise InputError(f"--constant {given!r}: there is a method {name!r} already. Choose another name.")
        try:
            constants[name] = _check(_TYPES[kind](text) if colon else _guess(text))
        except (ValueError, KeyError, RecursionError) as error:
            raise InputError(
                f"--constant {given!r}: {text!r} is no {kind or 'value'} that a method can return. Expected a number "
                "of at most 64 bits, true, false, a string, or a list of one of these, such as [1,2]."
            ) from error
    if arguments.runner_metadata:
        _check_methods(methods)
    return constants


def _check_methods(methods: Collection[str]) -> None:
    if "forward" not in methods:
        problem = f"there are {', '.join(map(repr, methods))}. Give the program as forward=MODEL.pt2"
    elif "decode" in methods:
        problem = (
            "'decode' for every token after the prompt, without the state that 'forward' wrote: it gives each method "
            "separate state. Give 'decode' another name, such as step=MODEL.pt2"
        )
    else:
        return
    raise InputError(f"--runner-metadata: {_RUNNER} calls a method 'forward', and {problem}.")


def add_metadata(constants: Mapping[str, Any], program: ExportedProgram) -> dict[str, Any]:
    """Return the given values, and before them what "forward" in Edge dialect says; InputError if it cannot be run."""
    signature = program.graph_signature
    values: dict[str, Any] = {node.name: node.meta.get("val") for node in program.graph.nodes}
    inputs: list[Any] = [values.get(str(name)) for name in signature.user_inputs]
    results: list[Any] = [values.get(str(name)) for name in signature.user_outputs]
    if _kinds(inputs) not in (_TOKENS, _TOKENS_AND_START) or _kinds(results) not in _LOGITS:
        raise InputError(
            f"--runner-metadata: {_RUNNER} calls 'forward' with tokens, [1, n] of int64, and their start position, "
            "[1] of int64, and expects logits, [1, n, vocabulary] or [1, vocabulary]; this 'forward' takes "
            f"{_describe(inputs)} and returns {_describe(results)}."
        )
    lengths = list(_cache_lengths(program))
    operators = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    found = {
        "get_vocab_size": results[0].shape[-1],
        "use_kv_cache": len(inputs) > 1,
        "use_sdpa_with_kv_cache": any("llama" in name and "sdpa" in name for name in operators),
        "enable_dynamic_shape": not isinstance(inputs[0].shape[1], int),
    }
    if lengths:
        found |= dict.fromkeys(("get_max_seq_len", "get_max_context_len"), max(lengths))
        found["get_n_layers"] = len(lengths) // 2
    elif "get_max_seq_len" not in constants:
        raise InputError(
            "--runner-metadata: 'forward' has no key-value cache, so the maximum sequence length is not known. Give "
            "it, such as --constant get_max_seq_len=128."
        )
    return {**found, **constants}


def _kinds(values: list[Any]) -> list[tuple[bool, int]]:
    """Return of each tensor whether it holds numbers with fractions, and its number of dimensions."""
    return [(v.is_floating_point(), v.dim()) if hasattr(v, "dim") else (False, -1) for v in values]


def _describe(values: list[Any]) -> str:
    shown = (f"{[*v.shape]} of {str(v.dtype)[6:]}" if hasattr(v, "dim") else str(v) for v in values)
    return ", ".join(shown) or "nothing"


def _cache_lengths(program: ExportedProgram) -> Iterator[int]:
    """Yield how many tokens each buffer holds of which some are written: its size where what is written is smaller."""
    from exir_lowering.graphs import written_state

    written, buffers = written_state(program), program.graph_signature.inputs_to_buffers
    for node in program.graph.nodes:
        if node.op != "placeholder" or buffers.get(node.name) not in written or node.meta["val"].dim() < 3:
            continue
        sizes = node.meta["val"].shape
        parts = [value.meta["val"].shape for user in node.users for value in user.all_input_nodes if value is not node]
        for part in parts:
            # A size that is not known yet is smaller: to compare it would make it a condition of the program.
            smaller = [size for size, new in zip(sizes, part, strict=False) if not isinstance(new, int) or size != new]
            if len(part) == len(sizes) and len(smaller) == 1:
                yield smaller[0]
                break


def _guess(text: str) -> Any:
    """Return the value that a text looks like: one of JSON, or a text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return json.loads(text)
    except ValueError:
        if text[:1] in ("", "[", "{", '"'):
            raise
        return text


def _check(value: Any) -> Any:
    """Return the value, or raise a ValueError if no method of a file can return it."""
    parts = value if isinstance(value, list) else [value]
    if len({type(part) for part in parts}) != 1 or not all(map(_can_return, parts)):
        raise ValueError
    return value


def _can_return(part: Any) -> bool:
    if isinstance(part, str):
        return "\0" not in part.encode().decode()
    if isinstance(part, float):
        return math.isfinite(part)
    return isinstance(part, int) and -(2**63) <= part < 2**63


def _truth(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


_TYPES: Mapping[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": _truth, "str": str}
