"""How fast the files run beside other runtimes: `python tests/benchmarks/peers.py`, with the extra `peers`.

Milliseconds of a call of ExecuTorch's file, ours and our OpenVINO variant, LiteRT's file with its XNNPACK, and of ONNX
Runtime and OpenVINO with the same ONNX file: in turns in one process, on as many pinned cores as `--cores` says, with
as many threads:
    1   figures are CPU time, which other work on the machine hardly changes
    2   figures are wall time: the machine has to be quiet
The outputs are compared with PyTorch's in float64; the exit status is 1 if one is wrong.

    python tests/benchmarks/peers.py --models minilm,llama --by kind
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "device"))

import torch
from kinds import PARTS
from latency import time_in_turns
from latency_engines import first_line, use_cores
from peer_client import open_litert, open_onnx
from peer_files import (
    add_arguments,
    compute_expected,
    largest_error,
    load_model,
    make_files,
    read_arguments,
)
from peer_report import find_faults, print_figures

import exir_lowering

Call = tuple[Callable[[], Any], Callable[[], Sequence[Any]]]
"""What calls a file, and what returns the outputs of the last call."""


def _open_pte(path: Path, inputs: Sequence[torch.Tensor], threads: int) -> Call:
    program, made = exir_lowering.load(path), []

    def call() -> None:
        made[:] = program.run("forward", *inputs)

    return call, lambda: made


def _open_openvino(path: Path, inputs: Sequence[torch.Tensor], threads: int) -> Call:
    import openvino

    # It would compute with bfloat16 where a CPU has it.
    config = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    model = openvino.Core().compile_model(str(path), "CPU", config)
    request = model.create_infer_request()
    for index, one in enumerate(inputs):
        request.set_input_tensor(index, openvino.Tensor(one.numpy()))
    return request.infer, lambda: [request.get_output_tensor(index).data for index in range(len(model.outputs))]


def _open_peer(opens: Callable[..., Call], path: Path, inputs: Sequence[torch.Tensor], threads: int) -> Call:
    return opens(path, [one.numpy() for one in inputs], threads)


ENGINES: dict[str, tuple[str, Callable[[Path, Sequence[torch.Tensor], int], Call]]] = {
    "executorch": ("executorch", _open_pte),
    "ours": ("ours", _open_pte),
    "ours_openvino": ("ours_openvino", _open_pte),
    "litert": ("litert", partial(_open_peer, open_litert)),
    "onnx": ("onnx", partial(_open_peer, open_onnx)),
    "openvino": ("onnx", _open_openvino),
}
"""What file an engine takes, and what opens it."""


def measure(name: str, cores: Sequence[int], own: Path, arguments: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """Measure a model on each number of cores."""
    built = load_model(name)
    inputs = [one.contiguous() for one in built.inputs]
    expected = compute_expected(built)
    wanted = tuple(dict.fromkeys(ENGINES[engine][0] for engine in arguments.engines))
    files, failed = make_files(name, wanted, own, arguments)
    rows = {}
    for count in cores:
        use_cores(count)
        failures = {engine: failed[ENGINES[engine][0]] for engine in arguments.engines if ENGINES[engine][0] in failed}
        row: dict[str, Any] = {"figures": {}, "errors": {}, "failures": failures, "parts": {}}
        runs = {}
        for engine in arguments.engines:
            kind, opens = ENGINES[engine]
            if kind not in files:
                continue
            try:
                call, outputs = opens(files[kind], inputs, count)
                call()
                row["errors"][engine] = largest_error([torch.as_tensor(one) for one in outputs()], expected)
                runs[engine] = call
            except MemoryError:
                raise
            except Exception as error:
                row["failures"][engine] = first_line(error)
        taken = time_in_turns(runs, arguments.rounds) if runs else {}
        least = "cpu_min" if count == 1 else "wall_min"
        row["figures"] = {engine: found[least] for engine, found in taken.items()}
        row["all"] = taken
        if arguments.by:
            for engine in [one for one in ("executorch", "ours") if one in runs]:
                profile = exir_lowering.load(files[engine]).profile("forward", *inputs, runs=arguments.rounds)
                row["parts"][engine] = PARTS[arguments.by](profile)
        runs.clear()
        rows[count] = row
    return rows


def main() -> int:
    """Run the benchmark; return 1 if an output is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ENGINES)
    parser.add_argument("--rounds", type=int, default=10, help="calls of each engine; the fastest one counts")
    parser.add_argument("--cores", default="1", help="1, 2, or 1,2: cores, and threads")
    arguments = read_arguments(parser, ENGINES)
    cores = [int(count) for count in arguments.cores.split(",")]
    if max(cores) > (os.cpu_count() or 1):
        parser.error(f"--cores {max(cores)}: this machine has {os.cpu_count()}")
    warnings.simplefilter("ignore")
    rows: dict[int, dict[str, Mapping[str, Any]]] = {count: {} for count in cores}
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as own:
            measured = measure(name, cores, Path(own), arguments)
        for count, row in measured.items():
            rows[count][name] = row
            figures = {engine: round(found, 2) for engine, found in row["figures"].items()}
            print(name, count, figures, *find_faults(row), file=sys.stderr, flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=2))
    for count, found in rows.items():
        kind = "CPU milliseconds on 1 core" if count == 1 else f"Milliseconds on {count} cores"
        print_figures(f"{kind}, the least of {arguments.rounds} calls", found, arguments.engines)
    return int(any(find_faults(row) for found in rows.values() for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
