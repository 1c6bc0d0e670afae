"""Runs random programs with state in several ways, and says of each what came of it."""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import random_state_programs as programs
import torch
from executorch.exir import to_edge
from random_programs import Interpreter
from random_state_programs import Made
from stateful import PARTITIONERS, Call, Way, differences, exported, lowered, run
from torch.export import ExportedProgram

from exir_lowering.dynamo import backend, reports
from exir_lowering.errors import LoweringError

KINDS: Mapping[str, int] = {"state": 1, "methods": 2, "compiled": 1, "many": 1}
"""By name, how many methods there are; "many" draws from many operators and from half precision."""

Outcomes = list[list[str]]


def outcomes(seed: int, kind: str, count: int = 3, way: str | None = None) -> Outcomes:
    """Return the verdict for each way that a program is lowered in, what it is about, and the way.

    Verdicts are "equal", "WRONG", "refused" (an error of this package), "BROKEN" (any other one), "not exported", and
    "not compiled by torch", whatever the backend.

    Args:
        seed: Of the program, and of the ways.
        kind: One of KINDS.
        count: How many ways.
        way: The one way instead, as `str` has it.
    """
    made = programs.make(seed, KINDS[kind], kind == "many")
    ways = [_read(way)] if way else _ways(random.Random(f"ways {seed}"), kind, count)
    if kind == "compiled":
        found = [[*_verdict(lambda each=each: _compiled(made, each)), str(each)] for each in ways]
        broken = any(verdict == "BROKEN" for verdict, *_ in found)
        return [["not compiled by torch", about, ""]] if broken and (about := _refused_by_torch(made)) else found
    try:
        given = exported(made.models(), dict(reversed(made.calls)))
    except Exception as error:
        return [["not exported", f"{type(error).__name__}: {error}"[:200], ""]]
    found: Outcomes = []
    with tempfile.TemporaryDirectory(prefix="state-") as cache:  # the program is converted to Edge dialect once
        for each in ways:
            verdict = _verdict(lambda each=each: differences(run(given, made.calls, each, cache), made.expected))
            if verdict[0] == "WRONG" and differences(_interpreted(given, made.calls), made.expected):
                verdict = ["not eager in torch.export", verdict[1]]
            elif verdict[0] in ("WRONG", "BROKEN") and each.edge == "to_backend":
                try:
                    edges = {name: to_edge(program).exported_program() for name, program in given.items()}
                except Exception as error:
                    verdict = ["refused by ExecuTorch's to_edge", f"{type(error).__name__}: {error}"[:200]]
                else:
                    if differences(_interpreted(edges, made.calls), made.expected):
                        verdict = ["not eager in ExecuTorch's to_edge", verdict[1]]
            found.append([*verdict, str(each)])
    return found


def warm_up() -> None:
    """Import what lowering needs, and nothing that a forked process cannot have."""
    made = programs.make(2)
    lowered(exported(made.models(), dict(made.calls[:1])), Way("reference")).emit()


def _ways(r: random.Random, kind: str, count: int) -> list[Way]:
    """Choose ways, most of which have one conversion to Edge dialect in common; methods share no state in delegates."""
    group = r.choice([("none", "some", "some own"), ("none", "some", "some own"), ("xnnpack",), ("reference", "own")])
    group = tuple(one for one in group if kind != "methods" or "own" not in one)
    other = r.choice([one for one in PARTITIONERS if kind != "methods" or "own" not in one])
    chosen = [r.choice(group) for _ in range(count)] if r.random() < 0.7 else [*r.choices(group, k=count - 1), other]
    edge = r.choice(["fast"] * 12 + ["executorch", "to_backend"])
    ways = [
        Way(
            one,
            r.choice(["safe", "none"]),
            edge=edge,
            seed=r.randrange(100) if "some" in one else 0,
        )
        for one in chosen
    ]
    return list(dict.fromkeys(ways))


def _read(way: str) -> Way:
    partitioner, rewrites, edge, seed = way.split()
    return Way(partitioner.replace("-", " "), rewrites, edge, int(seed))


def _verdict(compare: Any) -> list[str]:
    try:
        different = compare()
    except AssertionError as error:
        return ["WRONG", f"{error}"[:300]]
    except LoweringError as error:
        return ["refused", " ".join(f"{type(error).__name__}: {error}".split())[:300]]
    except Exception as error:
        return ["BROKEN", " ".join(f"{type(error).__name__}: {error}".split())[:300]]
    return ["WRONG", different[0]] if different else ["equal", ""]


def _interpreted(given: Mapping[str, ExportedProgram], calls: Sequence[tuple[str, Call]]) -> list[list[torch.Tensor]]:
    """Return what programs return when each reads all its state before it writes any, as `eager` does."""
    state: dict[str, torch.Tensor] = {}
    results = []
    interpreters = {name: Interpreter(program) for name, program in given.items()}
    for one in interpreters.values():
        one.state = {name: state.setdefault(name, value) for name, value in one.state.items()}
    for name, call in calls:
        inputs = [value.clone() for value in call]
        results.append([*interpreters[name](*inputs), *inputs])
    return results


def _refused_by_torch(made: Made) -> str:
    """Return why torch.compile fails with a backend of its own that runs the graph in eager PyTorch, or ""."""
    (model,) = copy.deepcopy(made.models()).values()
    torch._dynamo.reset()
    try:
        with torch.no_grad():
            for _, call in made.calls:
                torch.compile(model, backend="aot_eager")(*[value.clone() for value in call])
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return ""


def _compiled(made: Made, way: Way) -> list[str]:
    """Return what differs through torch.compile, the state after each call included."""
    (model,), (other,) = (copy.deepcopy(made.models()).values() for _ in range(2))
    torch._dynamo.reset()
    options: dict[str, Any] = {"fallback": None, "partitions": "all"}
    if way.partitioner != "none":
        options["partitioners"] = way.make_partitioner()
    compiled = torch.compile(other, backend=backend, options=options)
    expected, got = [], []
    for _, call in made.calls:
        for function, module, found in ((model, model, expected), (compiled, other, got)):
            given = [value.clone() for value in call]
            with torch.no_grad(), programs.plain_branches() if module is model else torch.no_grad():
                results = list(function(*given))
            state = [*module.buffers(), *module.parameters()]
            found.append([value.detach().clone() for value in (*results, *given, *state)])
    if not reports():
        return ["nothing was compiled"]
    return differences(got, expected)
