"""Why a partitioner left an operator on the host: its own words, or which of its checks failed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from executorch.exir.backend.canonical_partitioners.config_partitioner import (
    ConfigerationBasedPartitioner,
    format_target_name,
)
from executorch.exir.backend.partitioner import Partitioner
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from exir_lowering import graphs
from exir_lowering._upstream.hooks import listening
from exir_lowering._upstream.tensors import SYMBOLS
from exir_lowering.errors import exception_text
from exir_lowering.graphs import measures
from exir_lowering.model import Rejection

_INVALID_DTYPE = "invalid dtype"
_SHAPED = ("aten.view_copy.default", "aten.view.default", "aten.expand_copy.default")

Refusals: TypeAlias = dict[Node, dict[str, str]]
"""What a partitioner reported while it ran, by node: each reason, and who gave it first."""


@contextmanager
def listen() -> Iterator[Refusals]:
    """Record the reasons that are reported in ExecuTorch's ways while the context lasts."""
    reported: Refusals = {}

    def report(node: Node, reason: str, by: str) -> None:
        reported.setdefault(node, {}).setdefault(reason.strip().rstrip("."), by)

    with listening(report):
        yield reported


def collect_rejections(
    tagged: ExportedProgram,
    partitioner: Partitioner,
    given: Mapping[str, Rejection],
    refusals: Refusals,
    *,
    besides: Collection[str] = (),
) -> tuple[Rejection, ...]:
    """Return a rejection, without its method, for each operator without a tag that does not move with a tagged call.

    The partitioner's checks must not see those `besides`, as ExecuTorch's mark nodes, which compile differently then.
    """
    name = type(partitioner).__name__
    found = []
    for path, node in graphs.staying_nodes(tagged.graph_module):
        if not graphs.is_operator(node) or graphs.DELEGATION_TAG in node.meta:
            continue
        key = graphs.qualified_name(path, node)
        if key in besides:
            continue
        if key in given:
            found.append(given[key])
            continue
        code, reason, by = _reason(partitioner, tagged, path, node, refusals)
        found.append(Rejection("", key, graphs.operator_name(node), reason, by or name, code))
    return tuple(found)


def _reason(
    partitioner: Partitioner, tagged: ExportedProgram, path: tuple[str, ...], node: Node, refusals: Refusals
) -> tuple[str, str, str]:
    """Return the code, the text and who says so: the partitioner's own words, otherwise the check that fails."""
    reasons = refusals.get(node)
    if reasons:
        text = "; ".join(_cause(node, words) for words in reasons)
        return "check", _with_values(node, text), next(iter(reasons.values()))
    name = type(partitioner).__name__
    while isinstance(getattr(partitioner, "partitioner", None), Partitioner):  # one that does less than another one
        partitioner = partitioner.partitioner
    if isinstance(partitioner, ConfigerationBasedPartitioner):
        return _configured(partitioner, tagged, path, node)
    return "unclaimed", f"not claimed, and {name} does not say why", ""


def _configured(
    partitioner: ConfigerationBasedPartitioner, tagged: ExportedProgram, path: tuple[str, ...], node: Node
) -> tuple[str, str, str]:
    """Name the failing check of a partitioner that is a table of configurations by operator."""
    name, operator = type(partitioner).__name__, graphs.operator_name(node)
    if path:
        return "nested", f"{name} looks at the top graph only, and this is in {'.'.join(path)}", ""
    config = partitioner.target_partitioner_configs.get(format_target_name(getattr(node.target, "__name__", "")))
    if config is None:
        return "op", f"{name} has no configuration for {operator}", ""
    check = f"{type(config).__name__}.check_constraints"
    try:
        taken = config.check_constraints(node, tagged)
    except MemoryError:
        raise
    except Exception as error:  # a check that relies on what the partitioner did before
        return "check", f"{check} raised {exception_text(error)}", check
    if not taken:
        return "check", _with_values(node, f"{check} returned False"), check
    return "check", f"{type(config).__name__}.get_partition returned no partition with it", type(config).__name__


def _cause(node: Node, words: str) -> str:
    """Return the actual cause: ExecuTorch's check for XNNPACK says "invalid dtype" of all that is unusual."""
    if words != _INVALID_DTYPE:
        return words
    values = [source.meta.get("val") for source in node.all_input_nodes]
    read = [tensor for value in values for tensor in measures.tensors(value)]
    sizes = [size for tensor in read for size in tensor.shape]
    why = ""
    if any(isinstance(value, (int, float, *SYMBOLS)) for value in values):
        why = "one of its arguments is a number that is computed at run time, not a tensor"
    elif any(map(has_free_unbacked_symbols, read)):
        why = "one of its inputs has a size that depends on the values of a tensor"
    elif any(isinstance(size, int) and size == 0 for size in sizes):
        why = "one of its inputs has no elements"
    if not why:
        return words
    advice = "; with -1 in its place the shape needs none" if graphs.operator_name(node) in _SHAPED else ""
    return f'{why} (the check says "{words}"){advice}'


def _with_values(node: Node, reason: str) -> str:
    """Add the types of an operator's inputs and results: reasons such as "invalid dtype" lack them."""
    read = [tensor for source in node.all_input_nodes for tensor in measures.tensors(source.meta.get("val"))]
    made = list(measures.tensors(node.meta.get("val")))
    arrow = f"{', '.join(map(_type, read)) or 'nothing'} -> {', '.join(map(_type, made)) or 'no tensor'}"
    return f"{reason} ({arrow})"


def _type(tensor: object) -> str:
    dtype, shape = getattr(tensor, "dtype", ""), getattr(tensor, "shape", ())
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
