"""What a call costs on ARM's kernels: `python tests/benchmarks/arm.py`, on Debian 12, the first time as root.

Instructions of one call of ExecuTorch's file, ours, LiteRT's and ONNX Runtime's, on a Cortex-A76 that qemu makes up.
They are exact on any machine, however busy, but they are not time. The outputs are compared with PyTorch's in float64;
the exit status is 1 if one is wrong. What is needed is set up once, in --folder or in the user's cache.

    python tests/benchmarks/arm.py --models minilm,llama --by kind
    python tests/benchmarks/arm.py --file model.pte --inputs inputs.pt
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "device"))

import torch
from kinds import PARTS
from peer_files import (
    add_arguments,
    compute_expected,
    largest_error,
    load_model,
    make_files,
    read_arguments,
)
from peer_report import find_faults, print_figures, print_parts

from exir_lowering.errors import InputError
from exir_lowering.pte.format import read_program
from exir_lowering.runtime.profiling import Profile, profile, read_etdump
from exir_lowering.verification.aarch64 import Emulator, default_folder as emulator_folder, pack, unpack

_DEVICE = Path(__file__).parents[1] / "device"
_CLIENT = _DEVICE / "peer_client.py"
_PEERS = ("litert", "onnx")
ENGINES = ("executorch", "ours", *_PEERS)

_MILLIONS = 1e-3
"""Milliseconds of a clock that moves on by a microsecond for each instruction, in millions of instructions."""


class Arm:
    """The emulator, set up where it is not; it remembers what it counted."""

    def __init__(self, folder: Path) -> None:
        version = metadata.version("executorch").partition("+")[0]
        sources = sorted(path for path in _DEVICE.iterdir() if path.is_file() and path.suffix != ".py")
        self._version = _digest(version.encode(), *(one.read_bytes() for one in sources))
        done = folder / "done"
        if not done.exists() or done.read_text() != self._version:
            print(f"setting up {folder}", file=sys.stderr, flush=True)
            subprocess.run([str(_DEVICE / "set_up.sh"), str(folder), version], check=True, stdout=sys.stderr)
            done.write_text(self._version)
        self.emulator = Emulator(folder)

    def count(self, engine: str, file: Path, inputs: Sequence[torch.Tensor]) -> tuple[int, list[torch.Tensor]]:
        """Return the instructions of a call, and its outputs."""
        packed, client = pack(inputs), _CLIENT.read_bytes() if engine in _PEERS else b""
        folder = self.emulator.folder
        kept = folder / "counted" / _digest(self._version.encode(), client, file.read_bytes(), packed)
        if not kept.exists():
            words, links, settings = ["model", "forward", "inputs", "outputs", ""], {"model": file}, {}
            if engine in _PEERS:
                links["script"], words = _CLIENT, ["./script", engine, "model", "inputs", "outputs"]
                settings = {"PYTHONPATH": str(folder / "site"), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
            program = "root/usr/bin/python3.11" if engine in _PEERS else "client"
            counted, outputs, _ = self.emulator.run(program, words, links, packed, settings)
            kept.parent.mkdir(exist_ok=True)
            kept.write_bytes(struct.pack("q", counted) + outputs)
        content = kept.read_bytes()
        return struct.unpack_from("q", content)[0], [*unpack(content[8:])]

    def profile(self, file: Path, inputs: Sequence[torch.Tensor]) -> Profile:
        """Return the profile of a file of ExecuTorch's, with a microsecond for each instruction."""
        events = read_etdump(self.emulator.call(file, "forward", inputs, traced=True).etdump)
        return profile(read_program(memoryview(file.read_bytes()))["forward"], 1, events, None)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:24]


def measure(name: str, arm: Arm, own: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Count the instructions of a model, in millions, in all engines."""
    built = load_model(name)
    inputs, expected = built.inputs, compute_expected(built)
    files, failures = make_files(name, arguments.engines, own, arguments)
    row: dict[str, Any] = {"figures": {}, "errors": {}, "failures": failures, "parts": {}}

    def run(engine: str) -> None:
        try:
            counted, outputs = arm.count(engine, files[engine], inputs)
            row["figures"][engine], row["errors"][engine] = counted / 1e6, largest_error(outputs, expected)
            if arguments.by and engine in ("executorch", "ours"):
                row["parts"][engine] = _parts(arm.profile(files[engine], inputs), arguments.by, counted)
        except (RuntimeError, InputError) as error:
            failures[engine] = str(error)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(run, files))
    return row


def _parts(found: Profile, by: str, counted: int) -> dict[str, float]:
    """Return millions of instructions by part; what recording them takes is counted in the parts between operators."""
    recording = counted / 1e6 - found.rows[0].milliseconds * _MILLIONS
    return {part: took * _MILLIONS for part, took in PARTS[by](found).items()} | {"less recording": recording}


def count_file(arm: Arm, path: Path, given: Path | None, by: str) -> None:
    """Print the instructions of a call of a `.pte` file, and where they go."""
    from exir_lowering import load
    from exir_lowering.cli.method_inputs import make_inputs

    inputs = make_inputs(given, 0, load(path), "forward")
    counted = arm.count("ours", path, inputs)[0]
    print_parts(path.name, {"million instructions": _parts(arm.profile(path, inputs), by, counted)})


def main() -> int:
    """Run the benchmark; return 1 if an output is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ENGINES)
    parser.add_argument("--folder", type=Path, default=emulator_folder(), help="where it is set up")
    parser.add_argument("--jobs", type=int, default=1, help="how many engines run at a time")
    parser.add_argument("--file", type=Path, help="count a call of this .pte, and nothing else")
    parser.add_argument("--inputs", type=Path, help="with --file: what torch.save wrote (default: drawn)")
    arguments = read_arguments(parser, ENGINES)
    arm = Arm(arguments.folder)
    if arguments.file:
        count_file(arm, arguments.file, arguments.inputs, arguments.by or "operator")
        return 0
    rows: dict[str, Mapping[str, Any]] = {}
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as own:
            rows[name] = measure(name, arm, Path(own), arguments)
        print(name, rows[name]["figures"], *find_faults(rows[name]), file=sys.stderr, flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=2))
    print_figures("Millions of instructions of a call", rows, arguments.engines)
    return int(any(map(find_faults, rows.values())))


if __name__ == "__main__":
    sys.exit(main())
