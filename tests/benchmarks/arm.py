"""What a call costs on ARM's kernels: `python tests/benchmarks/arm.py`, on Debian 12, the first time as root.

Instructions of one call of ExecuTorch's file, ours, LiteRT's and ONNX Runtime's, on a Cortex-A76 that qemu makes up.
They are exact on any machine, however busy, but they are not time. The outputs are compared with PyTorch's in float64;
the exit status is 1 if one is wrong. What is needed is set up once, in the folder EXIR_ARM or in the user's cache.

    python tests/benchmarks/arm.py --models minilm,llama --by kind
    python tests/benchmarks/arm.py --file model.pte --inputs inputs.pt
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
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
from peer_client import TYPES, read_arrays
from peer_files import (
    add_arguments,
    compute_expected,
    default_folder,
    largest_error,
    load_model,
    make_files,
    read_arguments,
)
from peer_report import find_faults, print_figures, print_parts

from exir_lowering.pte.format import read_program
from exir_lowering.runtime.profiling import Profile, profile, read_etdump

_DEVICE = Path(__file__).parents[1] / "device"
_CLIENT = _DEVICE / "peer_client.py"
_PEERS = ("litert", "onnx")
ENGINES = ("executorch", "ours", *_PEERS)

_NUMBERS = {getattr(torch, name): number for number, name in TYPES.items()}
_MILLIONS = 1e-3
"""Milliseconds of a clock that moves on by a microsecond for each instruction, in millions of instructions."""


class Arm:
    """Runs files on a Cortex-A76 that qemu makes up, and remembers what it counted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        version = metadata.version("executorch").partition("+")[0]
        sources = sorted(path for path in _DEVICE.iterdir() if path.is_file() and path.suffix != ".py")
        self._version = _digest(version.encode(), *(one.read_bytes() for one in sources))
        done = self.folder / "done"
        if not done.exists() or done.read_text() != self._version:
            print(f"setting up {folder}", file=sys.stderr, flush=True)
            subprocess.run([str(_DEVICE / "set_up.sh"), str(folder), version], check=True, stdout=sys.stderr)
            done.write_text(self._version)

    def count(self, engine: str, file: Path, inputs: bytes) -> tuple[int, list[torch.Tensor]]:
        """Return the instructions of a call, and its outputs."""
        client = _CLIENT.read_bytes() if engine in _PEERS else b""
        kept = self.folder / "counted" / _digest(self._version.encode(), client, file.read_bytes(), inputs)
        if not kept.exists():
            counted, outputs, _ = self._run(engine, file, inputs, False)
            kept.parent.mkdir(exist_ok=True)
            kept.write_bytes(struct.pack("q", counted) + outputs)
        content = kept.read_bytes()
        return struct.unpack_from("q", content)[0], [torch.from_numpy(one.copy()) for one in read_arrays(content[8:])]

    def profile(self, file: Path, inputs: bytes) -> Profile:
        """Return the profile of a file of ExecuTorch's, with a microsecond for each instruction."""
        events = read_etdump(self._run("executorch", file, inputs, True)[2])
        return profile(read_program(memoryview(file.read_bytes()))["forward"], 1, events, None)

    def _run(self, engine: str, file: Path, inputs: bytes, traced: bool) -> tuple[int, bytes, bytes]:
        root = self.folder / "root"
        # Where a program's memory lies moves up to two percent of the count of a small model: names, variables and
        # addresses are always the same.
        links, settings = {"model": file, "client": self.folder / "client"}, {}
        if engine in _PEERS:
            links |= {"client": root / "usr/bin/python3.11", "script": _CLIENT}
            settings = {"PYTHONPATH": str(self.folder / "site"), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
        if traced:
            settings["LD_PRELOAD"] = str(self.folder / "clock.so")
        with tempfile.TemporaryDirectory() as name:
            kept = Path(name)
            for link, target in links.items():
                (kept / link).symlink_to(target.absolute())
            (kept / "inputs").write_bytes(inputs)
            command = [
                "qemu-aarch64",
                "-cpu",
                "cortex-a76",
                "-plugin",
                str(self.folder / "counter.so"),
                "-L",
                str(root),
            ]
            for variable, value in settings.items():
                command += ["-E", f"{variable}={value}"]
            command += ["./client", *(["./script", engine] if engine in _PEERS else [])]
            command += ["model", "inputs", "outputs", *(["trace"] if traced else [])]
            environment = {"PATH": os.environ["PATH"]}
            done = subprocess.run(command, capture_output=True, text=True, cwd=kept, env=environment)
            counts = re.findall(r"^call (\d+)$", done.stdout, re.MULTILINE)
            if done.returncode or len(counts) != 2:
                raise RuntimeError(f"{engine}: {(done.stdout + done.stderr).strip()[-300:]}")
            outputs, trace = (kept / "outputs").read_bytes(), (kept / "trace").read_bytes() if traced else b""
            return int(counts[-1]), outputs, trace


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:24]


def pack(inputs: Sequence[torch.Tensor]) -> bytes:
    """Return the tensors as the clients read them."""
    parts = []
    for one in inputs:
        parts.append(struct.pack(f"{2 + one.dim()}i", _NUMBERS[one.dtype], one.dim(), *one.shape))
        parts.append(one.contiguous().numpy().tobytes())
    return b"".join(parts)


def measure(name: str, arm: Arm, own: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Count the instructions of a model, in millions, in all engines."""
    built = load_model(name)
    inputs, expected = pack(built.inputs), compute_expected(built)
    files, failures = make_files(name, arguments.engines, own, arguments)
    row: dict[str, Any] = {"figures": {}, "errors": {}, "failures": failures, "parts": {}}

    def run(engine: str) -> None:
        try:
            counted, outputs = arm.count(engine, files[engine], inputs)
            row["figures"][engine], row["errors"][engine] = counted / 1e6, largest_error(outputs, expected)
            if arguments.by and engine in ("executorch", "ours"):
                row["parts"][engine] = _parts(arm.profile(files[engine], inputs), arguments.by, counted)
        except RuntimeError as error:
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

    inputs = pack([*make_inputs(given, 0, load(path), "forward")])
    counted = arm.count("ours", path, inputs)[0]
    print_parts(path.name, {"million instructions": _parts(arm.profile(path, inputs), by, counted)})


def main() -> int:
    """Run the benchmark; return 1 if an output is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ENGINES)
    parser.add_argument("--folder", type=Path, default=default_folder("arm"), help="where it is set up")
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
