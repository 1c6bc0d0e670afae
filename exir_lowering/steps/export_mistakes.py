"""What was most likely a mistake when a program was exported: it is lowered as it is, and warnings say so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.errors import ExportWarning, few
from exir_lowering.graphs.sources import format_lines, lines_of
from exir_lowering.model import EdgeMethod
from exir_lowering.steps.assumed_sizes import list_assumed
from exir_lowering.steps.provenance import list_narrowed


def list_mistakes(methods: Sequence[EdgeMethod]) -> tuple[str, ...]:
    """Return what to tell of methods that torch.export made: once of the variants of one."""
    given = [*reversed({id(one.converted_from): one for one in reversed(methods) if one.converted_from}.values())]
    training = (text for method in given for text in _in_training(method))
    assumed = (text for method in given for text in _assuming(method))
    return (*training, *(str(one) for one in list_narrowed(given) if one.given[1] is None), *assumed)


def warn(mistakes: Sequence[str]) -> None:
    """Warn of mistakes, from the caller of our caller."""
    for text in mistakes:
        warnings.warn(text, ExportWarning, stacklevel=3)


def _assuming(method: EdgeMethod) -> Iterator[str]:
    for one in list_assumed(method.converted_from) if method.converted_from is not None else ():
        yield (
            f"Method {method.name!r}: torch.export assumed `{few(one.guards, 2)}` for dimension {one.dimension} of "
            f"input {one.input}. Of the sizes {one.sizes[0]}..{one.sizes[-1]} that the file takes, this does not hold "
            f"for {few(map(str, one.wrong), 3)}. Eager mode checks it, a file does not: results for these sizes may be "
            "wrong. Export with a Dim of the sizes for which it holds, or compute sizes of whole numbers, as n // 2 "
            "for int(n * 0.5)."
        )


def _in_training(method: EdgeMethod) -> Iterator[str]:
    program, found = method.converted_from, dict[str, list[Node]]()
    for _, node in graphs.every_node(program.graph_module) if program is not None else ():
        given: Any = partial(graphs.argument, node) if node.op == "call_function" else {}.get
        active = True in (given("train"), given("training"))
        if given("dropout_p") or (active and (given("p") or given("dropout"))):
            found.setdefault("dropout is active", []).append(node)
        elif active and given("running_mean") is not None:  # without it, statistics are computed in any mode
            found.setdefault("batch norm computes statistics", []).append(node)
    if found:
        kinds = " and ".join(f"{words} ({len(nodes):,} x)" for words, nodes in found.items())
        lines = format_lines(lines_of(node for nodes in found.values() for node in nodes))
        yield (
            f"Method {method.name!r} was exported in training mode: {kinds}. Call model.eval() before export; "
            f"functions such as F.dropout take training=self.training. {lines}"
        )
