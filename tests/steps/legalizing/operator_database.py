"""PyTorch's own database of operators, exported, lowered, run in the runtime, and compared with eager mode.

python tests/steps/legalizing/operator_database.py [--ops REGEX] [--dtypes float32,int64] [--partitioners xnnpack,host]
    [--samples 4] [--slice 1/8] [--jobs 2] [--json FILE] [--upstream]

A sample counts for what torch.export takes. Random operators, and those that return memory as it is, are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import re
import sys
import time
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram, export
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from operator_samples import sample_inputs

import exir_lowering
from exir_lowering import InvariantError, LoweringError

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
HALF = (torch.float16, torch.bfloat16)
SECONDS = 60
"""How long a sample may take, lowered for one partitioner and run."""
COUNTED = ("right", "refused", "fails", "wrong", "died")
"""What may become of a sample that torch.export takes."""
BAD = ("fails", "wrong", "died")
TIES = re.compile(r"^(aten\.)?(sort|argsort|topk|kthvalue|mode|median|nanmedian|masked_median)\b(?!\.stable)")
"""What promises no order of the places of equal elements."""
_UNSET = re.compile(r"^(new_)?empty")


@dataclass(frozen=True)
class Trial:
    """A sample of an operator, and how it is lowered."""

    operator: str
    dtype: str
    sample: int
    way: str  # the partitioner; "upstream:" before it for ExecuTorch's own lowering


@dataclass(frozen=True)
class Outcome:
    """What became of a sample: one of `COUNTED`, "not exported", or "random"."""

    trial: Trial
    kind: str
    detail: str = ""


class _Linear(NamedTuple):
    input: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Module(torch.nn.Module):
    """An operator as a function of the tensors of a sample; everything else is closed over."""

    def __init__(self, name: str, function: Callable[..., Any], sample: Any) -> None:
        super().__init__()
        self.name, self.function = name, function
        leaves, self.spec = tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.given = tuple(leaves[place].detach() for place in self.places)
        self.others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def told(self, results: Sequence[Any]) -> list[Any]:
        first, rest, kwargs = self._arguments(self.given)
        return told(self.name, (first, *rest), kwargs, results)

    def _arguments(self, tensors: Sequence[torch.Tensor]) -> Any:
        leaves = list(self.others)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self.spec)

    def forward(self, *tensors: torch.Tensor) -> Any:
        first, args, kwargs = self._arguments(tensors)
        return tree_leaves(self.function(first, *args, **kwargs))


def samples(info: Any, dtype: torch.dtype, count: int) -> Iterator[_Module]:
    """Yield the first samples of an operator that differ in more than values."""
    torch.manual_seed(zlib.crc32(f"{info.formatted_name} {dtype}".encode()))
    seen = set()
    for sample in itertools.islice(sample_inputs(info, dtype), 60):
        module = _Module(info.formatted_name, info.op, sample)
        form = repr(([(each.shape, each.stride(), each.dtype) for each in module.given], module.others, module.spec))
        if form not in seen:
            seen.add(form)
            yield module
        if len(seen) == count:
            return


def _copied(tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    copies = [each.clone() for each in tensors]
    return [each.to(dtype) if dtype is not None and each.is_floating_point() else each for each in copies]


def _exact(module: _Module) -> list[torch.Tensor | None]:
    """Return the results in float64; None where eager mode cannot tell."""
    try:
        return [torch.as_tensor(each) for each in module(*_copied(module.given, torch.float64))]
    except Exception:
        return [None]


def told(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Any]) -> list[Any]:
    """Return results with what places point at instead of them, where equal elements may come in any order."""
    source, places = args[0], results[-1]
    if not TIES.match(name) or kwargs.get("stable") or not isinstance(places, torch.Tensor) or source.dim() == 0:
        return list(results)
    if places.dtype is not torch.int64 or (len(results) == 1 and "argsort" not in name):
        return list(results)
    numbers = [each for each in args[1:] if type(each) is int][bool(re.search("topk|kthvalue", name)) :]
    dim = kwargs.get("dim", numbers[0] if numbers else -1)
    return [*results[:-1], source.gather(dim, places if places.dim() == source.dim() else places.unsqueeze(dim))]


def difference(got: Any, want: Any, exact: torch.Tensor | None) -> str:
    """Return how a result differs from eager mode's; nothing if it is right."""
    got, want = torch.as_tensor(got), torch.as_tensor(want)
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"{got.dtype} {list(got.shape)} for {want.dtype} {list(want.shape)}"
    if not want.is_floating_point() and not want.is_complex():
        return f"{int((got != want).sum())} of {want.numel()} elements differ" * (not torch.equal(got, want))
    if want.is_complex():
        return difference(torch.view_as_real(got), torch.view_as_real(want.resolve_conj()), None)
    wide, real = got.double(), want.double()
    if exact is None or exact.shape != want.shape or exact.is_complex():
        exact = real
    exact = exact.double()
    overflows = ~real.isfinite() & exact.to(want.dtype).isfinite()  # what eager mode loses may be kept
    real = torch.where(overflows & wide.isfinite(), exact, real)
    unlike = (wide.isnan() != real.isnan()) | ((wide.isinf() | real.isinf()) & (wide != real))
    if unlike.any():
        return (
            f"{int((unlike & ~real.isnan()).sum())} of {want.numel()} are NaN or infinite, {int(unlike.sum())} unlike"
        )
    finite = real.isfinite() & exact.isfinite()
    wide, real, exact = wide[finite], real[finite], exact[finite]
    if not wide.numel():
        return ""
    own = (real - exact).abs().max()
    unit = 1e-4 if want.dtype not in HALF else torch.finfo(want.dtype).eps
    least = 1e-5 * max(1.0, float(real.abs().max())) if want.dtype not in HALF else torch.finfo(want.dtype).tiny
    target = exact if want.dtype in HALF else real
    error = (wide - target).abs()
    allowed = unit * target.abs() + least + 4 * own
    return f"error {float(error.max()):.3g} of {float(real.abs().max()):.3g}" * bool((error > allowed).any())


def _first(text: str) -> str:
    return " ".join(text.split("\n")[:3])


def _lowered(program: ExportedProgram, way: str) -> tuple[Callable[..., Any], str]:
    """Return what runs a program and "", or the refusal of `lower`; raises what else happens."""
    upstream, _, name = way.rpartition(":")
    if upstream:
        return _lowered_upstream(program, name)
    try:
        lowered = exir_lowering.lower(program, None if name == "host" else name)
    except LoweringError as error:
        if isinstance(error, InvariantError) or not isinstance(error, ValueError | NotImplementedError):
            raise
        return torch.Tensor, _first(str(error))
    loaded = exir_lowering.load(lowered.emit().buffer)
    return lambda *inputs: list(loaded.run("forward", *inputs)), ""


def _lowered_upstream(program: ExportedProgram, name: str) -> tuple[Callable[..., Any], str]:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    try:
        edge = to_edge_transform_and_lower(program, partitioner=None if name == "host" else [XnnpackPartitioner()])
    except Exception as error:
        return torch.Tensor, _first(f"{type(error).__name__}: {error}")
    loaded = Runtime.get().load_program(edge.to_executorch().buffer)
    method = loaded.load_method("forward")
    return lambda *inputs: (loaded, list(method.execute([each.contiguous() for each in inputs])))[1], ""


class _Random(TorchDispatchMode):
    """Tells whether random numbers are drawn, by operators that may do so; samples set the seed back."""

    any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.get_rng_state() if torch.Tag.nondeterministic_seeded in func.tags else None
        result = func(*args, **(kwargs or {}))
        self.any |= before is not None and not torch.equal(before, torch.get_rng_state())
        return result


def try_sample(module: _Module, ways: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the way, the kind and the detail of each outcome; the kind is "" when the way begins."""
    try:
        with _Random() as draws:
            want = module(*_copied(module.given))
        exact = _exact(module)
        program = None if draws.any else export(module, tuple(_copied(module.given)), strict=False)
    except Exception as error:
        yield from ((way, "not exported", _first(f"{type(error).__name__}: {error}")) for way in ways)
        return
    if program is None:
        yield from ((way, "random", "") for way in ways)
        return
    exact = exact if len(exact) == len(want) else [None] * len(want)
    for way in ways:
        yield way, "", ""
        try:
            run, refusal = _lowered(program, way)
            if refusal:
                yield way, "refused", refusal
                continue
            got = run(*_copied(module.given))[-len(want) or None :]  # inputs that are written come first
            found = [difference(*each) for each in zip(module.told(got), module.told(want), exact, strict=True)]
            worst = next(filter(None, found), "")
            yield way, "wrong" if worst else "right", worst
        except Exception as error:
            yield way, "fails", _first(f"{type(error).__name__}: {error}")


def _work(info: Any, ways: Sequence[str], dtypes: Sequence[torch.dtype], count: int, done: set[Trial], to: Any) -> None:
    """Try an operator in a child, and send what begins and what became of it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    warnings.simplefilter("ignore")
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        if dtype not in info.supported_dtypes("cpu"):
            continue
        asked = [way for way in ways if dtype == torch.float32 or not way.startswith("upstream")]
        to.send(Outcome(Trial(info.formatted_name, name, -1, ""), ""))
        try:
            for number, module in enumerate(samples(info, dtype, count)):
                trials = {way: Trial(info.formatted_name, name, number, way) for way in asked}
                left = [way for way, trial in trials.items() if trial not in done]
                for way, kind, detail in try_sample(module, left) if left else ():
                    to.send(Outcome(trials[way], kind, detail))
        except Exception as error:  # its samples need what is not installed
            to.send(Outcome(Trial(info.formatted_name, name, -1, ""), "no samples", f"{type(error).__name__}: {error}"))
    to.close()


def _warm() -> None:
    """Import what lowering imports, once for all children; nothing is run, for the runtime has threads."""
    module = _Module("linear", torch.nn.functional.linear, _Linear(torch.ones(2, 3), (torch.ones(4, 3),), {}))
    for partitioner in ("xnnpack", None):
        exir_lowering.lower(export(module, module.given, strict=False), partitioner).emit()


@dataclass
class _Child:
    """A process that tries an operator; another one goes on where it ended."""

    info: Any
    process: Any
    pipe: Connection
    done: set[Trial]
    current: Trial | None
    since: float


def try_operators(
    chosen: Sequence[Any],
    ways: Sequence[str] = ("xnnpack", "host"),
    dtypes: Sequence[torch.dtype] = DTYPES,
    count: int = 4,
    jobs: int = 2,
) -> list[Outcome]:
    """Return what became of each sample of some operators, in their order."""
    torch.set_num_threads(1)
    _warm()
    forking = multiprocessing.get_context("fork")
    waiting, running, outcomes = [(info, set[Trial]()) for info in reversed(chosen)], list[_Child](), list[Outcome]()

    def end(child: _Child, detail: str = "") -> None:
        running.remove(child)
        if detail and child.current is not None:
            kind = "fails" if detail == "timeout" else "died"
            outcomes.append(Outcome(child.current, kind, detail))
            if child.current.sample >= 0:
                waiting.append((child.info, {each.trial for each in outcomes}))

    while waiting or running:
        while waiting and len(running) < jobs:
            info, done = waiting.pop()
            reads, writes = forking.Pipe(duplex=False)
            process = forking.Process(target=_work, args=(info, ways, dtypes, count, done, writes))
            process.start()
            writes.close()
            running.append(_Child(info, process, reads, done, None, time.monotonic()))
        for child in [each for each in running if each.pipe in wait([one.pipe for one in running], 1)]:
            try:
                outcome: Outcome = child.pipe.recv()
            except EOFError:
                child.process.join()
                code = child.process.exitcode
                end(child, f"exit code {code}" if code else "")
                continue
            child.current, child.since = (outcome.trial if not outcome.kind else None), time.monotonic()
            if outcome.kind:
                outcomes.append(outcome)
        for child in [each for each in running if time.monotonic() - each.since > SECONDS]:
            child.process.kill()
            child.process.join()
            end(child, "timeout")
    order = {info.formatted_name: number for number, info in enumerate(chosen)}
    return sorted(
        outcomes, key=lambda one: (order[one.trial.operator], one.trial.dtype, one.trial.sample, one.trial.way)
    )


def choose(pattern: str = "", part: str = "1/1") -> list[Any]:
    """Return the operators whose names match, or the n-th of so many equal slices of them."""
    number, parts = map(int, part.split("/"))
    found = [one for one in op_db if re.search(pattern, one.formatted_name) and not _UNSET.match(one.name)]
    return found[number - 1 :: parts]


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the counts by dtype and way, and the percentage of what torch.export takes."""
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for each in outcomes:
        counts[each.trial.way, each.trial.dtype][each.kind] += 1
    kinds = (*COUNTED, "not exported", "random", "no samples")
    lines = [f"{'':28}" + "".join(f"{kind:>16}" for kind in kinds)]
    for (way, dtype), found in sorted(counts.items()):
        taken = sum(found[kind] for kind in COUNTED) or 1
        share = {kind: f" ({100 * found[kind] / taken:.1f}%)" for kind in COUNTED}
        lines.append(
            f"{way or '-':18}{dtype:10}" + "".join(f"{str(found[kind]) + share.get(kind, ''):>16}" for kind in kinds)
        )
    return "\n".join(lines)


def complaints(outcomes: Sequence[Outcome], kinds: Sequence[str] = ()) -> list[str]:
    """Return a line for each operator and what is not right with it, or is of these kinds: worst last."""
    found: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for each in outcomes:
        if each.kind in (kinds or {*COUNTED[1:], "not exported", "no samples"}):
            detail = re.sub(r"\d[\d.e+-]*", "N", each.detail)[:200] if each.kind != "wrong" else each.detail
            found[each.kind, each.trial.operator, detail][f"{each.trial.dtype}/{each.trial.way}"] += 1
    order = ["not exported", "no samples", *COUNTED]
    return [
        f"{kind:13}{operator} [{' '.join(f'{way}x{count}' for way, count in where.items())}]: {detail}"
        for (kind, operator, detail), where in sorted(found.items(), key=lambda item: order.index(item[0][0]))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="")
    parser.add_argument("--dtypes", default=",".join(str(each).removeprefix("torch.") for each in DTYPES))
    parser.add_argument("--partitioners", default="xnnpack,host")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--slice", default="1/1")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--upstream", action="store_true", help="ExecuTorch's own lowering of float32 too")
    given = parser.parse_args()
    dtypes = [getattr(torch, name) for name in given.dtypes.split(",")]
    ways = given.partitioners.split(",")
    ways += [f"upstream:{name}" for name in ways] * given.upstream
    outcomes = try_operators(choose(given.ops, given.slice), ways, dtypes, given.samples, given.jobs)
    print(*complaints(outcomes), table(outcomes), sep="\n")
    if given.json:
        given.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=0))
    sys.exit(any(each.kind in BAD for each in outcomes))


if __name__ == "__main__":
    main()
