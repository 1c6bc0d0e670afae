"""Classes of transformers, exported as its ExecuTorch exporter does, lowered in three ways, run, compared with eager
mode.

python tests/compat/exporters/class_table.py [--cases REGEX | --sample] [--seconds 1000] [--memory 12] [--results FILE]
    [--print]

Ways: `upstream` is ExecuTorch with the exporter's patches, `patched` is `patch_executorch()` with them, `plain` is
`lower` without them, nor their repairs of the program. A program is exported once for the first two, once for the last,
by a process of its own; what lowers and runs it is a process, too. Results are appended to a file of JSON lines, and
what is in it is not run again; `--print` shows it as a table. `--sample` runs twenty classes in the first two ways, for
the ratio of their CPU seconds.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from math import exp, log
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from exported_classes import Entry, entries
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx._pytree import tree_flatten_spec
from torch.utils._pytree import tree_leaves

WAYS = ("upstream", "patched", "plain")
SIZES = ((2, 1, 0), (2, 1, 1), (3, 2, 2), (3, 1, 3), (2, 2, 4))
"""Rows, scale and seed of the inputs: the first are exported, two more are run where the program takes them."""

RIGHT = 2e-3
"""What the largest difference may be, as a part of the largest number of that output."""

SAMPLE = """
    BertModel DistilBertModel GPT2LMHeadModel LlamaForCausalLM Qwen3ForCausalLM Gemma2ForCausalLM
    T5ForConditionalGeneration BartForConditionalGeneration ViTModel ConvNextModel SegformerForSemanticSegmentation
    Sam2VisionModel Wav2Vec2Model HubertModel WhisperForConditionalGeneration CLIPModel SiglipModel
    PerceiverForSequenceClassification MambaForCausalLM MixtralForCausalLM"""
"""Twenty classes, for a comparison of time."""


@dataclass(frozen=True)
class Row:
    """What became of a class in one way.

    Args:
        outcome: right, wrong, unsteady (wrong, and eager mode differs as much for inputs that are moved a little),
            refused (no file, or the runtime does not take it), not exported, died, or over time.
        error: The largest difference to eager mode, as a part of the largest number.
        calls: Of how many inputs; sizes: of how many shapes of them.
        exported: CPU seconds of torch.export.
        lowered: CPU seconds from its program to the file.
        edge: CPU seconds of that from its Edge program on.
        size: The bytes of the file.
        message: Why there is no number.
    """

    name: str
    kind: str
    skipped: str
    shapes: str
    way: str
    outcome: str
    error: float | None = None
    calls: int = 0
    sizes: int = 0
    exported: float | None = None
    lowered: float | None = None
    edge: float | None = None
    size: int | None = None
    message: str = ""


def in_process(task: Callable[[], object], seconds: float, memory: float, several: int = 1) -> tuple[str, str]:
    """Run a task in a process with limits, of CPU seconds and GiB: how it ended, and what it raised.

    Four times as long may pass, for other work of the machine, and that `several` times, for processes that it starts.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_AS, (int(memory * 2**30),) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
        message = ""
        try:
            task()
        except BaseException as error:
            frames = [one for one in traceback.extract_tb(error.__traceback__) if "/torch/fx/" not in one.filename]
            where = " < ".join(f"{Path(one.filename).name}:{one.lineno}" for one in frames[-3:][::-1])
            text = re.sub(r"\s+", " ", str(error))
            message = f"{type(error).__name__}: {text[:600]} ({where})"
        os.write(writer, message.encode()[:4000])
        os._exit(bool(message))
    os.close(writer)
    until = time.monotonic() + 4 * seconds * several
    status = None
    while status is None:
        ended, code = os.waitpid(child, os.WNOHANG)
        if ended:
            status = code
        elif time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reader)
            return "over time", f"over {seconds:.0f} s"
        else:
            time.sleep(0.05)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return "over time", f"over {seconds:.0f} s of CPU"
    if os.WIFSIGNALED(status):
        return "died", f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    return ("failed" if said else "done"), said


def export(entry: Entry, dynamic: bool, patches: ExitStack, plain: bool) -> tuple[Any, ExportedProgram]:
    """A model and its program, as the exporter makes it; its patches stay until the stack is left."""
    from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter
    from transformers.exporters.exporter_executorch import prepare_for_xnnpack
    from transformers.exporters.utils import apply_fx_node_fixes, apply_fx_program_fixes, apply_patches

    model = entry.model()
    model, inputs, _ = prepare_for_xnnpack(model, entry.inputs(model, *SIZES[0]))
    if not plain:
        patches.enter_context(apply_patches("executorch"))
        patches.enter_context(apply_patches("executorch.xnnpack"))
    program, _ = DynamoExporter().export_program(model, inputs, DynamoConfig(dynamic=dynamic))
    if not plain:
        apply_fx_program_fixes("executorch", program)
        apply_fx_node_fixes("executorch", program.graph_module)
    return model, program


def lower(program: ExportedProgram, way: str, spent: list[float] | None = None) -> bytes:
    """The file of a program, lowered for XNNPACK; the CPU seconds of each part of it after the Edge program."""
    spent = [] if spent is None else spent
    if way == "plain":
        import exir_lowering

        return exir_lowering.lower(program, "xnnpack").emit().buffer
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeProgramManager, to_edge_transform_and_lower
    from transformers.exporters.exporter_executorch import _get_edge_compile_config

    from exir_lowering.compat import patch_executorch

    with ExitStack() as patched:
        if way == "patched":
            patched.enter_context(patch_executorch())
            from executorch.exir import to_edge_transform_and_lower
        for name in ("to_backend", "to_executorch"):
            timed = mock.patch.object(EdgeProgramManager, name, _timed(getattr(EdgeProgramManager, name), spent))
            patched.enter_context(timed)
        config = _get_edge_compile_config("xnnpack")
        edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], compile_config=config)
        return edge.to_executorch().buffer


def _timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """A function that notes the CPU seconds of each call."""

    def timed(*args: Any, **named: Any) -> Any:
        before = time.process_time()
        try:
            return function(*args, **named)
        finally:
            spent.append(time.process_time() - before)

    return timed


def warm() -> None:
    """Import and fill what every lowering needs, so that no class pays for it."""
    for way in WAYS:
        layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1)).eval()
        lower(torch.export.export(layer, (torch.ones(2, 4),)), way)


def calls(
    entry: Entry, model: Any, program: ExportedProgram, dynamic: bool
) -> Iterator[tuple[list[Any], list[Any], Any]]:
    """Inputs of the sizes that a program takes: their leaves, what eager mode returns, and their shapes."""
    from transformers.exporters.utils import prepare_for_export

    spec = program.call_spec.in_spec
    found = 0
    for size in SIZES:
        if (size[:2] != SIZES[0][:2] and not dynamic) or found == 3:
            continue
        inputs = entry.inputs(model, *size)
        try:
            with torch.no_grad():
                expected = tree_leaves(model(**copy.deepcopy(inputs)))
            _, prepared, _ = prepare_for_export(model, copy.deepcopy(inputs))
            leaves = tree_flatten_spec(((), dict(prepared)), spec)
        except Exception:
            if size == SIZES[0]:
                raise
            continue
        if size[:2] == SIZES[0][:2] or takes(program, leaves):
            found += 1
            feed = [
                leaf.contiguous() if isinstance(leaf, Tensor) else None if isinstance(leaf, str) else leaf
                for leaf in leaves
            ]
            yield feed, expected, tuple(tuple(leaf.shape) for leaf in feed if isinstance(leaf, Tensor))


def takes(program: ExportedProgram, leaves: list[Any]) -> bool:
    """Whether inputs have sizes that a program was exported for."""
    names = program.graph_signature.user_inputs
    placeholders = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    known: dict[Any, int] = {}
    for name, leaf in zip(names, leaves, strict=False):
        val = placeholders.get(name) if isinstance(name, str) else None
        if not isinstance(val, Tensor) or not isinstance(leaf, Tensor):
            continue
        for size, got in zip(val.shape, leaf.shape, strict=True):
            if isinstance(size, int):
                if size != got:
                    return False
                continue
            expression = size.node.expr
            if expression.is_Symbol:
                bounds = program.range_constraints.get(expression)
                if known.setdefault(expression, got) != got or (bounds and not bounds.lower <= got <= bounds.upper):
                    return False
    for name, leaf in zip(names, leaves, strict=False):
        val = placeholders.get(name) if isinstance(name, str) else None
        if isinstance(val, Tensor) and isinstance(leaf, Tensor):
            for size, got in zip(val.shape, leaf.shape, strict=True):
                if not isinstance(size, int) and size.node.expr.subs(known) != got:
                    return False
    return True


def difference(got: list[Any], expected: list[Any]) -> float:
    """The largest difference of tensors to those expected, as a part of the largest number of each."""
    values, wanted = ([one for one in many if isinstance(one, Tensor)] for many in (got, expected))
    if len(values) != len(wanted):
        raise ValueError(f"{len(values)} tensors came out, {len(wanted)} were expected")
    worst = 0.0
    for one, other in zip(values, wanted, strict=True):
        if tuple(one.shape) != tuple(other.shape):
            raise ValueError(f"a tensor of shape {tuple(one.shape)} came out, {tuple(other.shape)} was expected")
        a, b = one.to(torch.float64), other.to(torch.float64)
        same = (a == b) | (a.isnan() & b.isnan())
        if not bool(same.all()):
            finite = b[b.isfinite()].abs()
            largest = float(finite.max()) if finite.numel() else 0.0
            worst = max(
                worst,
                float(torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf")).max()) / (largest + 1e-6),
            )
    return worst


def run(row: Row, entry: Entry, model: Any, program: ExportedProgram) -> Row:
    """Lower a program, run the file in ExecuTorch's runtime, and compare."""
    from executorch.runtime import Runtime

    tried = list(calls(entry, model, program, row.shapes == "dynamic"))
    before, spent = time.process_time(), list[float]()
    buffer = lower(program, row.way, spent)
    row = replace(row, lowered=round(time.process_time() - before, 2), edge=round(sum(spent), 2) if spent else None)
    row = replace(row, size=len(buffer), calls=len(tried), sizes=len({shapes for *_, shapes in tried}))
    method = Runtime.get().load_program(buffer).load_method("forward")
    worst = max(difference(list(method.execute(feed)), expected) for feed, expected, _ in tried)
    outcome = "right" if worst <= RIGHT else "wrong" if worst > 2 * sway(entry, model) else "unsteady"
    return replace(row, error=worst, outcome=outcome)


def sway(entry: Entry, model: Any) -> float:
    """How much eager mode's results change with its inputs: choices between nearly equal numbers make them jump."""
    worst = 0.0
    for seed in (0, 1):
        inputs = entry.inputs(model, seed=seed)
        moved = {
            key: value * (1 + 1e-6 * torch.randn_like(value)) if value.is_floating_point() else value
            for key, value in inputs.items()
            if isinstance(value, Tensor)
        }
        with torch.no_grad():
            worst = max(worst, difference(tree_leaves(model(**moved)), tree_leaves(model(**inputs))))
    return worst


def try_class(entry: Entry, shapes: str, ways: list[str], results: Path, seconds: float, memory: float) -> None:
    """Write the rows of a class."""

    def write(row: Row) -> None:
        with results.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        print(
            entry.name,
            shapes,
            row.way,
            row.outcome,
            row.error,
            row.exported,
            row.lowered,
            row.message[:150],
            flush=True,
        )

    for several in (["upstream", "patched"], ["plain"]):
        several = [way for way in several if way in ways]
        if not several:
            continue
        blank = Row(entry.name, entry.kind, entry.skipped, shapes, several[0], "not exported")
        mark = results.with_suffix(".exported")
        mark.unlink(missing_ok=True)

        def made(several: list[str] = several, blank: Row = blank, mark: Path = mark) -> None:
            with ExitStack() as patches:
                before = time.process_time()
                model, program = export(entry, shapes == "dynamic", patches, several == ["plain"])
                row = replace(blank, exported=round(time.process_time() - before, 2), outcome="refused")
                mark.touch()
                for way in several:
                    one = replace(row, way=way)
                    ended, said = in_process(lambda one=one: write(run(one, entry, model, program)), seconds, memory)
                    if ended != "done":
                        write(replace(one, outcome="refused" if ended == "failed" else ended, message=said))

        ended, said = in_process(made, seconds, memory, 1 + len(several))
        if ended != "done" and not mark.exists():
            for way in several:
                write(replace(blank, way=way, outcome="not exported", message=f"{ended}: {said}"))
        mark.unlink(missing_ok=True)


def printed(rows: list[Row]) -> str:
    """The table, and the ratio of the ways' CPU seconds."""
    by_class: dict[tuple[str, str], dict[str, Row]] = {}
    rows = list({(row.name, row.shapes, row.way): row for row in rows}.values())
    for row in rows:
        by_class.setdefault((row.name, row.shapes), {})[row.way] = row

    def cell(row: Row | None) -> str:
        if row is None or row.error is None:
            return "" if row is None else row.outcome
        return f"{row.outcome} {row.error:.0e}" + f" ({row.sizes} sizes)" * (row.sizes > 1)

    def seconds(row: Row | None, field: str) -> str:
        value = getattr(row, field) if row else None
        return "" if value is None else f"{value:.1f}"

    head = ("class", "shapes", "skipped", "ExecuTorch", "patched", "plain", "export, s", "ExecuTorch, s", "patched, s")
    lines = [f"| {' | '.join((*head, 'plain, s'))} |", "|---" * 10 + "|"]
    both, order = [], {name: index for index, name in enumerate(entries())}
    for (name, shapes), ways in sorted(by_class.items(), key=lambda one: (one[0][1] == "dynamic", order[one[0][0]])):
        up, ours, plain = (ways.get(way) for way in WAYS)
        any_row = next(iter(ways.values()))
        if up and ours and up.outcome == ours.outcome == "right":
            both.append((up, ours))
        cells = [name, shapes, any_row.skipped, *map(cell, (up, ours, plain)), seconds(ours or plain, "exported")]
        lines.append("| " + " | ".join([*cells, *(seconds(one, "lowered") for one in (up, ours, plain))]) + " |")
    lines.append("")
    for way in WAYS:
        counted = Counter((row.shapes, row.outcome) for row in rows if row.way == way)
        lines.append(
            f"* {way}: {', '.join(f'{count} {shapes} {outcome}' for (shapes, outcome), count in counted.items())}"
        )
    lines.append(f"* {_listed(rows)}")
    for field, what in (("lowered", "from the program to the file"), ("edge", "from the Edge program to the file")):
        ratios = [getattr(up, field) / getattr(ours, field) for up, ours in both if getattr(ours, field)]
        if ratios:
            mean = exp(sum(map(log, ratios)) / len(ratios))
            lines.append(f"* {what}: ExecuTorch takes {mean:.2f} times as long (geometric mean of {len(ratios)})")
    return "\n".join(lines)


def _listed(rows: list[Row]) -> str:
    """How many classes of the lists of the exporter's tests are right in one of our ways, for the shapes listed."""
    right = {(row.name, row.shapes) for row in rows if row.way != "upstream" and row.outcome == "right"}
    listed: dict[tuple[str, str], list[bool]] = {}
    for entry in entries().values():
        for how in filter(None, entry.skipped.split("; ")):
            shapes = [one for one in ("static", "dynamic") if one in how] or ["static", "dynamic"]
            found = any((entry.name, one) in right for one in shapes)
            listed.setdefault((entry.name.partition(".")[0], how), []).append(found)
    counts = Counter(how for _, how in listed)
    good = Counter(how for (_, how), parts in listed.items() if all(parts))
    return "right of those listed: " + ", ".join(f"{good[how]} of {counts[how]} ({how})" for how in counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="(patched|plain)$", help="a regular expression of: class, kind, shapes, way")
    parser.add_argument("--sample", action="store_true", help="twenty classes, static, without and with this package")
    parser.add_argument("--seconds", type=float, default=1000, help="of CPU, for the export, and for each way")
    parser.add_argument("--memory", type=float, default=12, help="GiB")
    parser.add_argument("--results", type=Path, default=Path("classes.jsonl"))
    parser.add_argument("--print", action="store_true")
    given = parser.parse_args()
    rows = (
        [Row(**json.loads(line)) for line in given.results.read_text().splitlines()] if given.results.exists() else []
    )
    if given.print:
        print(printed(rows))
        return
    if given.sample:
        given.cases = f"^({'|'.join(SAMPLE.split())}) .* static (upstream|patched)$"
    torch.set_num_threads(1)
    import transformers
    import transformers.exporters.exporter_executorch

    import exir_lowering.compat  # noqa: F401

    transformers.logging.set_verbosity_error()
    warm()
    known = {(row.name, row.shapes, row.way) for row in rows}
    for shapes in ("static", "dynamic"):
        for entry in entries().values():
            cases = {way: f"{entry.name} {entry.kind} {shapes} {way}" for way in WAYS}
            ways = [way for way, case in cases.items() if re.search(given.cases, case)]
            ways = [way for way in ways if (entry.name, shapes, way) not in known]
            try_class(entry, shapes, ways, given.results, given.seconds, given.memory)


if __name__ == "__main__":
    main()
