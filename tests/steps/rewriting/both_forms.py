"""Rewrites programs and compares the two forms: in eager PyTorch, and in ExecuTorch's runtime."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from both_ways import quiet
from edge_differences import list_differences
from executorch.exir.backend.partitioner import Partitioner
from random_programs import Interpreter
from rewriting_support import always
from torch.export import ExportedProgram

import exir_lowering
from exir_lowering import Limits, LoweringOptions
from exir_lowering._upstream import locks
from exir_lowering.errors import LoweringError
from exir_lowering.graphs import debug_handles, source_line
from exir_lowering.model import EdgeMethod
from exir_lowering.plugins import Rewrite
from exir_lowering.rewrites.safe import SAFE
from exir_lowering.steps.arguments import RequestedMethod
from exir_lowering.steps.conversion_context import converting
from exir_lowering.steps.edge import to_edge
from exir_lowering.steps.rewrite import rewrite
from exir_lowering.steps.session import Session

Call = tuple[Any, ...]
Calls = Sequence[Call]

BITS: Sequence[Rewrite] = tuple(always(one) for one in SAFE if one.exactness == "bits")
ALL: Sequence[Rewrite] = tuple(map(always, SAFE))
TAKEN: Sequence[Rewrite] = tuple(one() for one in SAFE)
"""Rewrites that claim the same bits, all, and those of users, some only where partitioners take them."""

_ROUNDING = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float64: 1e-5}
_LARGE = 1e6
"""Where sums of such numbers cancel, or overflow, rounding is all that is left."""


@dataclass
class Outcome:
    """What the comparison of one program found.

    Attributes:
        differences: What differs; empty if nothing does.
        rewritten: How often something was rewritten, by rewrite.
        runs: How often the two forms were run and compared.
    """

    differences: list[str] = field(default_factory=list)
    rewritten: Counter[str] = field(default_factory=Counter)
    runs: int = 0


def compare(
    programs: ExportedProgram | Mapping[str, ExportedProgram],
    calls: Calls | Mapping[str, Calls],
    partitioners: tuple[Partitioner, ...] = (),
    *,
    thorough: bool = False,
) -> Outcome:
    """Rewrite programs, and compare what they return in consecutive calls.

    Args:
        programs: A program, or several that are lowered together.
        calls: The inputs of each call; by method if there are several.
        partitioners: Whose operators are kept whole; with some, rewrites are as users have them.
        thorough: Whether to check also that the given program stays as it is, and that the result is always the same.
    """
    if isinstance(programs, ExportedProgram):
        programs, calls = {"forward": programs}, {"forward": calls}  # type: ignore[dict-item]
    session, outcome = Session(LoweringOptions()), Outcome()
    with quiet():
        methods = to_edge([RequestedMethod(name, one, partitioners, None) for name, one in programs.items()], session)
        _compare_methods(methods, calls, thorough, session, outcome)
    return outcome


def rewritten(methods: Sequence[EdgeMethod], rewrites: Any, session: Session, *states: Any) -> tuple[EdgeMethod, ...]:
    """Rewrite methods as `lower` does."""
    with locks.conversion(), converting([method.program for method in methods], gradients=True):
        return rewrite(methods, rewrites, session, *states)


def _compare_methods(
    methods: Sequence[EdgeMethod], calls: Any, thorough: bool, session: Session, outcome: Outcome
) -> None:
    before = [copy.deepcopy(one.program) for one in methods] if thorough else []
    for rewrites in (TAKEN,) if methods[0].partitioners else (BITS, ALL):
        try:
            made = rewritten(methods, rewrites, session)
        except LoweringError as error:
            outcome.differences.append(f"{type(error).__name__}: {error}")
            continue
        done = [one.rewrite for method in made for one in method.rewritings]
        if rewrites is not BITS:
            outcome.rewritten.update(done)
        exact = {one.name for one in rewrites if one.exactness == "bits"}.issuperset(done)
        for old, new in zip(methods, made, strict=True):
            if new.rewritings:
                _run_both(old, new, calls[old.name], exact, outcome)
        if thorough:
            again = rewritten(methods, rewrites, session)
            for one, other in zip(made, again, strict=True):
                outcome.differences += list_differences(one.program, other.program)
    for method, kept in zip(methods, before, strict=False):
        if str(method.program.graph) != str(kept.graph) or method.program.graph_signature != kept.graph_signature:
            outcome.differences.append(f"{method.name}: the given program was changed")


def _run_both(old: EdgeMethod, new: EdgeMethod, calls: Calls, exact: bool, outcome: Outcome) -> None:
    plain, rewritten = Interpreter(old.program), Interpreter(new.program)
    large = False
    for number, call in enumerate(calls):
        given, same = copy.deepcopy(call), copy.deepcopy(call)
        try:
            torch.manual_seed(0)
            expected = plain(*given)
        except Exception:  # the program does not take such inputs
            return
        outcome.runs += 1
        try:
            torch.manual_seed(0)
            found = rewritten(*same)
        except Exception as error:
            outcome.differences.append(f"call {number} raised {type(error).__name__}: {error} / returned")
            return
        pairs = [*zip(expected, found, strict=True), *zip(given, same, strict=True)]
        pairs += [(plain.state[name], rewritten.state[name]) for name in plain.state if name in rewritten.state]
        # State may be what large numbers made in a call before.
        large = (large and bool(plain.state)) or (not exact and any(map(_is_large, [*call, *expected])))
        for place, (one, other) in enumerate(pairs):
            text = None if large else difference(one, other, exact)
            if text is not None:
                outcome.differences.append(f"call {number} result {place}{'' if exact else ' (rounded)'}: {text}")


def difference(one: Any, other: Any, exact: bool) -> str | None:
    """Return how two results differ, None if they are equal: bit by bit if `exact`, where all NaN are one."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None if type(one) is type(other) and (one == other or one != one) else f"{one} / {other}"
    if one.shape != other.shape or one.dtype is not other.dtype:
        return f"{one.dtype} {tuple(one.shape)} / {other.dtype} {tuple(other.shape)}"
    if one.is_complex():  # its NaN are equal too
        one, other = (torch.view_as_real(value.resolve_conj().resolve_neg()) for value in (one, other))
    if not one.is_floating_point():
        return None if torch.equal(one, other) else _first(one, other, one != other)
    nan, other_nan = one.isnan(), other.isnan()
    if exact:
        wrong = (one != other) | (one.signbit() != other.signbit())
        wrong = torch.where(nan | other_nan, nan != other_nan, wrong)
    else:
        a, b = one.double(), other.double()
        finite = a[a.isfinite()]
        scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
        near = (a - b).abs() <= _ROUNDING.get(one.dtype, 2e-4) * scale
        wrong = ~(near | (a == b) | (nan & other_nan))
    return _first(one, other, wrong) if bool(wrong.any()) else None


def _first(one: torch.Tensor, other: torch.Tensor, wrong: torch.Tensor) -> str:
    return f"{int(wrong.sum())} of {wrong.numel()} {one.dtype} elements: {one[wrong][:3]} / {other[wrong][:3]}"


def _is_large(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return False
    return bool((value.isfinite() & (value.abs() > _LARGE)).any())


def _is_finite(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or bool(value.isfinite().all())


def run_files(program: ExportedProgram, calls: Calls, partitioners: Any) -> list[str]:
    """Return how two files, without rewrites and with the safe ones, differ when they are run; and what debugging lost.

    Args:
        program: The program.
        calls: The inputs of consecutive calls.
        partitioners: For `lower`.
    """
    found = []
    with quiet():
        for chosen in ("none", "safe"):
            lowered = exir_lowering.lower(program, partitioners, options=LoweringOptions(rewrites=chosen))
            emitted = lowered.emit()
            # ExecuTorch's choose_qparams ends the process on infinite values: its methods run in another one.
            limits = Limits(seconds=60) if _quantizes_while_running(program) else None
            found.append((lowered, emitted, exir_lowering.load(emitted.buffer, limits=limits)))
    (_, _, plain), (lowered, emitted, rewritten) = found
    done = {one.rewrite for method in lowered.report.methods for one in method.rewritings}
    exact = partitioners is None and {one.name for one in SAFE if one.exactness == "bits"}.issuperset(done)
    differences = _lost_lines(lowered, emitted)
    for number, call in enumerate(calls):
        results = [_run_file(file, call) for file in (plain, rewritten)]
        if not exact and any(map(_is_large, [*call, *results[0]])):
            if program.graph_signature.buffers_to_mutate:
                break
            continue
        if "wide-depthwise" in done and not all(map(_is_finite, call)):
            continue  # XNNPACK multiplies elements beyond a kernel by zero, which spreads NaN
        for place, (one, other) in enumerate(zip(*results, strict=True)):
            text = difference(one, other, exact)
            if text is not None:
                differences.append(f"file: call {number} result {place}{'' if exact else ' (rounded)'}: {text}")
    return differences


def _quantizes_while_running(program: ExportedProgram) -> bool:
    return any("choose_qparams" in str(node.target) for node in program.graph.nodes)


def _lost_lines(lowered: Any, emitted: Any) -> list[str]:
    """Return the debug handles of removed operators that do not lead to their lines any more."""
    lost = []
    for name, program in lowered.unchanged.items():
        method = emitted.debug_info.methods[name]
        for node in debug_handles.copy_with_handles(program).graph.nodes:
            handle, line = debug_handles.handle(node), source_line(node)
            if node.op == "call_function" and line and (handle is None or line not in method.lines([handle])):
                lost.append(f"{name}: {node.name} with handle {handle} does not lead to {line}")
    return lost


def _run_file(file: Any, call: Call) -> list[Any]:
    try:
        return copy.deepcopy(_leaves(file.run("forward", *copy.deepcopy(call))))
    except Exception as error:
        return [type(error).__name__]


def _leaves(value: Any) -> list[Any]:
    return list(torch.utils._pytree.tree_leaves(value))


# -- inputs -----------------------------------------------------------------------------------------------------------


def hostile(call: Call, random_: random.Random) -> Call:
    """Return inputs of the same shapes, with what models do not expect; integers stay, as they may be indices."""
    kind = random_.choice(KINDS)
    return tuple(_spoil(value.clone(), kind, random_) if isinstance(value, torch.Tensor) else value for value in call)


KINDS = ("nan", "-inf", "inf", "both", "huge", "denormal", "zero", "rows", "uniform", "mixed")


def _spoil(value: torch.Tensor, kind: str, random_: random.Random) -> torch.Tensor:
    generator = torch.Generator().manual_seed(random_.randrange(1 << 30))
    if value.dtype is torch.bool:
        value = torch.rand(value.shape, generator=generator) < random_.choice([0.0, 0.2, 0.8, 1.0])
        return value if value.dim() == 0 else _spoil_rows(value, False, random_)
    if not value.is_floating_point() or value.numel() == 0:
        return value
    numbers = [*_NUMBERS.get(kind, ())] or [one for some in _NUMBERS.values() for one in some]
    if kind == "uniform":
        return torch.full_like(value, random_.choice([0.0, -0.0, 1.0, float("nan"), float("-inf"), float("inf")]))
    if kind == "rows":
        return _spoil_rows(value, random_.choice(numbers), random_)
    chosen = torch.rand(value.shape, generator=generator) < random_.choice([0.05, 0.5])
    which = torch.randint(0, len(numbers), value.shape, generator=generator)
    return torch.where(chosen, torch.tensor(numbers, dtype=torch.float64)[which].to(value.dtype), value)


_NUMBERS: Mapping[str, Sequence[float]] = {
    "nan": (float("nan"),),
    "-inf": (float("-inf"),),
    "inf": (float("inf"),),
    "both": (float("inf"), float("-inf")),
    "huge": (3e38, -3e38, 1e30, -1e30, 1e20),
    "denormal": (1e-40, -1e-40, 1e-30, 0.0),
    "zero": (0.0, -0.0),
}


def _spoil_rows(value: torch.Tensor, number: float, random_: random.Random) -> torch.Tensor:
    if value.dim() == 0 or value.numel() == 0:
        return value
    value[..., random_.randrange(value.shape[-2]) if value.dim() > 1 else slice(None), :] = number
    return value


def variants(call: Call, random_: random.Random, count: int) -> Iterator[Call]:
    """Yield inputs, and then hostile ones of the same shapes."""
    yield call
    for _ in range(count):
        yield hostile(call, random_)
