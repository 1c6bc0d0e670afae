"""Check that a payload is consistent, before any of it is executed.

The checksum only detects damage: anyone may have written the payload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from exir_lowering import InputError
from exir_lowering.backends.reference.blob import Graph, GraphRef, Program, ValueRef

DEPTH = 100
"""How deep graphs may be nested; each level uses some of Python's stack."""


def check(program: Program) -> None:
    """Check that every number in a program is in range, and that no graph calls itself.

    Raises InputError if not: the payload is inconsistent, so this backend did not write it.
    """
    if not program.graphs:
        raise _unsound("it has no graph")
    _numbers("state", program.states, len(program.tensors))
    inputs = [_kind("input", each, {"user": 0, "tensor": len(program.tensors), "state": len(program.states)})
              for each in program.inputs]  # fmt: skip
    for each in program.outputs:
        _kind("output", each, {"user": 0, "state": len(program.states)})
    first = program.graphs[0]
    results = first.results
    if first.inputs != len(inputs) or not isinstance(results, list) or len(results) != len(program.outputs):
        raise _unsound(f"its graph has {first.inputs} inputs and the results {str(results)[:80]}")
    for number, graph in enumerate(program.graphs):
        _graph(number, graph, len(program.tensors), len(program.graphs))
    _depths(program.graphs)


def _graph(number: int, graph: Graph, tensors: int, graphs: int) -> None:
    if type(graph.inputs) is not int or not 0 <= graph.inputs < 1 << 20:
        raise _unsound(f"graph {number} has {graph.inputs!r} inputs")
    _numbers("constant", graph.constants, tensors)
    known = graph.inputs + len(graph.constants)
    for instruction in graph.code:
        where = f"graph {number}, {instruction.operator}"
        if not isinstance(instruction.operator, str) or not isinstance(instruction.args, list):
            raise _unsound(f"{where}: its arguments are {str(instruction.args)[:80]}")
        if not isinstance(instruction.kwargs, dict) or type(instruction.handle) is not int:
            raise _unsound(f"{where}: its options are {str(instruction.kwargs)[:80]}")
        if instruction.kwargs.get("pin_memory"):
            raise _unsound(f"{where}: it makes pinned memory, which only other devices need")
        _references(where, (instruction.args, instruction.kwargs), known, graphs)
        known += 1
    _references(f"graph {number}, its results", graph.results, known, 0)


def _references(where: str, argument: Any, values: int, graphs: int) -> None:
    for reference in references(argument):
        count, what = (values, "value") if isinstance(reference, ValueRef) else (graphs, "graph")
        _numbers(f"{what} of {where}", [reference.index], count)


def references(argument: Any) -> Iterator[ValueRef | GraphRef]:
    """Yield the values and graphs to which an argument refers."""
    if isinstance(argument, (ValueRef, GraphRef)):
        yield argument
    elif isinstance(argument, (list, tuple, dict)):
        for item in argument.values() if isinstance(argument, dict) else argument:
            yield from references(item)


def _depths(graphs: Sequence[Graph]) -> None:
    """Check, without recursion, that graphs do not call themselves or each other endlessly."""
    calls = [
        {r.index for i in graph.code for r in references((i.args, i.kwargs)) if isinstance(r, GraphRef)}
        for graph in graphs
    ]
    depths = [0] * len(graphs)
    level = set(range(len(graphs)))
    for depth in range(min(len(graphs), DEPTH) + 1):
        if not level:
            return
        for number in level:
            depths[number] = depth
        level = {called for number in level for called in calls[number]}
    raise _unsound(f"its graphs call each other in a cycle, or are nested more than {DEPTH} deep")


def _kind(what: str, entry: Any, kinds: dict[str, int]) -> str:
    if not isinstance(entry, list) or not entry or not isinstance(entry[0], str) or entry[0] not in kinds:
        raise _unsound(f"it has the {what} {str(entry)[:80]}, expected one of {', '.join(kinds)}")
    kind: str = entry[0]
    _numbers(what, entry[1:], kinds[kind])
    if len(entry) != (1 if kind == "user" else 2):
        raise _unsound(f"it has the {what} {str(entry)[:80]}")
    return kind


def _numbers(what: str, numbers: Any, count: int) -> None:
    if not isinstance(numbers, list) or not all(type(number) is int and 0 <= number < count for number in numbers):
        raise _unsound(f"{what} is {str(numbers)[:80]}, expected numbers below {count}")


def _unsound(what: str) -> InputError:
    return InputError(f"A reference payload is inconsistent: {what}. Lower the model again.")
