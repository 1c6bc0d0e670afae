"""A `.pte` file on ARM's kernels, without a phone: ExecuTorch's wheel for aarch64 on a Cortex-A76 that qemu makes up.

What this needs is in a folder that `tests/device/set_up.sh` of the source makes. The client there, a C++ program, calls
a method twice and counts the instructions of the second call: they are the same on any machine, however busy.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exir_lowering.errors import InputError
from exir_lowering.pte import files
from exir_lowering.pte.format import MethodSpec, read_checked
from exir_lowering.pte.printing import Shown, make_table, printable, render
from exir_lowering.pte.value_kinds import CODES, DTYPES, MemoryLayout
from exir_lowering.runtime.profiling import Profile, ProfileRow, profile, read_etdump
from exir_lowering.runtime.program import LoadedProgram
from exir_lowering.verification.measure import Difference, Tolerance, check_share, measure

if TYPE_CHECKING:
    from rich.table import Table

VERSION = 1
"""Incremented when a field of the JSON changes its meaning or is removed."""

_PLAIN: Mapping[type, tuple[torch.dtype, str]] = {
    bool: (torch.bool, "?"),
    int: (torch.int64, "q"),
    float: (torch.float64, "d"),
}
_CALL, _NO_TENSOR = re.compile(r"^call (\d+)$", re.MULTILINE), -1


def default_folder() -> Path:
    """Return the folder in the user's cache where it is looked for."""
    import platformdirs

    return platformdirs.user_cache_path("exir-lowering", appauthor=False) / "aarch64"


@dataclass(frozen=True, slots=True)
class EmulatedCall:
    """The second of two equal calls of a method."""

    outputs: tuple[torch.Tensor, ...]  # numbers are tensors without dimensions
    instructions: int
    etdump: bytes = b""


class Emulator:
    """Runs files on a Cortex-A76 that qemu makes up."""

    def __init__(self, folder: Path) -> None:
        """Use what is in a folder; InputError if `set_up.sh` did not make it."""
        self.folder = folder.absolute()
        if not (self.folder / "client").exists():
            raise InputError(
                f"{str(folder)!r} has no client for aarch64: run `tests/device/set_up.sh {folder} VERSION` of the "
                "source of exir-lowering once, with ExecuTorch's version, as root on Debian 12; or name its folder."
            )

    def call(
        self, source: Path, method: str, inputs: Sequence[Any], *, data: Sequence[Path] = (), traced: bool = False
    ) -> EmulatedCall:
        """Call a method twice; InputError with what the runtime said if it fails. Tracing it adds instructions."""
        files = {f"data{number}": path for number, path in enumerate(data)}
        words = ["model", method, "inputs", "outputs", "trace" if traced else "", *files]
        settings = {"LD_PRELOAD": str(self.folder / "clock.so")} if traced else {}
        counted, outputs, trace = self.run("client", words, {"model": source, **files}, pack(inputs), settings)
        return EmulatedCall(tuple(unpack(outputs)), counted, trace)

    def run(
        self,
        program: str | Path,
        words: Sequence[str],
        links: Mapping[str, Path],
        inputs: bytes,
        settings: Mapping[str, str],
    ) -> tuple[int, bytes, bytes]:
        """Run a client in an empty folder with links to files; return its count, its outputs and its trace."""
        # Where a program's memory lies moves up to two percent of the count of a small model: names, variables and
        # addresses are always the same.
        with tempfile.TemporaryDirectory() as name:
            kept = Path(name)
            for link, target in {"client": self.folder / program, **links}.items():
                (kept / link).symlink_to(target.absolute())
            (kept / "inputs").write_bytes(inputs)
            command = ["qemu-aarch64", "-cpu", "cortex-a76", "-plugin", str(self.folder / "counter.so")]
            command += ["-L", str(self.folder / "root")]
            for variable, value in settings.items():
                command += ["-E", f"{variable}={value}"]
            environment = {"PATH": os.environ["PATH"]}
            done = subprocess.run([*command, "./client", *words], capture_output=True, cwd=kept, env=environment)
            said = (done.stdout + done.stderr).decode(errors="replace")
            counts = _CALL.findall(said)
            if done.returncode or len(counts) != 2:
                said = "; ".join(map(printable, said.split("\n")[-4:]))
                raise InputError(
                    f"On aarch64, {words[0]} ended with code {done.returncode}: {said or 'it said nothing'}."
                )
            trace = kept / "trace"
            return int(counts[-1]), (kept / "outputs").read_bytes(), trace.read_bytes() if trace.exists() else b""


def pack(values: Sequence[Any]) -> bytes:
    """Return values as the client reads them: type, rank, sizes and order of dimensions as int32, then the elements."""
    parts = []
    for one in values:
        if isinstance(one, torch.Tensor) and one.dtype in CODES:
            order = one.dim_order()
            laid_out = one.detach().permute(order).contiguous()
            parts.append(struct.pack(f"{2 + 2 * one.dim()}i", CODES[one.dtype], one.dim(), *one.shape, *order))
            parts.append(laid_out.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif type(one) in _PLAIN:
            dtype, letter = _PLAIN[type(one)]
            parts.append(struct.pack(f"=ii{letter}", CODES[dtype], _NO_TENSOR, one))
        else:
            raise InputError(f"On aarch64, an input is {one!r}, expected numbers and tensors of a file's types.")
    return b"".join(parts)


def unpack(content: bytes) -> Iterator[torch.Tensor]:
    """Yield the tensors that the client wrote."""
    at = 0
    while at < len(content):
        code, rank = struct.unpack_from("2i", content, at)
        numbers = struct.unpack_from(f"{2 * rank}i", content, at + 8)
        sizes, order, dtype = numbers[:rank], numbers[rank:], DTYPES[code]
        at += 8 + 8 * rank
        size = math.prod(sizes) * dtype.itemsize
        found = torch.frombuffer(bytearray(content[at : at + size]) or bytearray(1), dtype=torch.uint8)[:size]
        laid_out = found.view(dtype).view([sizes[dim] for dim in order])
        yield laid_out.permute([order.index(dim) for dim in range(rank)])
        at += size


@dataclass(frozen=True, slots=True)
class ComparedOutput:
    """An output on aarch64 beside the one that the file computes here."""

    place: int
    error: float  # the largest
    allowed: float
    ok: bool
    problem: str  # what is wrong, where it is not the size of an error


@dataclass(frozen=True, slots=True, repr=False)
class OnAarch64(Shown):
    """What a method computes on ARM's kernels, and what that takes.

    Attributes:
        method: The method.
        instructions: How many a call takes.
        outputs: How far each output is from what the file computes on this machine.
        rows: The method's kernels and delegates in the order of the file, each with its instructions in a third call.
            The runtime traces that one, which takes some thousand instructions for each delegate.
    """

    method: str
    instructions: int
    outputs: tuple[ComparedOutput, ...]
    rows: tuple[tuple[str, int], ...]

    @property
    def ok(self) -> bool:
        """Whether all outputs are right."""
        return all(one.ok for one in self.outputs)

    def table(self) -> Table:
        """Return the table for a terminal."""
        verdict = "right" if self.ok else "WRONG"
        title = f"{printable(self.method)} on aarch64: {verdict}, {self.instructions:,} instructions"
        total = sum(count for _, count in self.rows)
        rows = [(printable(name), f"{count:,}", f"{count / total:.1%}") for name, count in self.rows]
        return make_table(("what", "traced instructions", "share"), rows, ("traced instructions", "share"), title)

    def to_text(self, width: int = 120) -> str:
        """Return it as plain text, in lines of some characters."""
        lines = []
        for one in self.outputs:
            far = one.problem or f"largest error {one.error:.3g}, allowed {one.allowed:.3g}"
            lines.append(f"output {one.place}: {'right' if one.ok else 'WRONG'}; {far}")
        return render([self.table(), *lines], width)

    def to_json(self) -> str:
        """Return it as JSON: `{"version": 1, "ok", "method", "instructions", "outputs", "rows"}`."""
        return json.dumps({"version": VERSION, "ok": self.ok, **asdict(self)}, indent=2)


def compare(
    emulator: Emulator,
    source: Path,
    program: LoadedProgram,
    method: str,
    inputs: Sequence[Any],
    *,
    data: Sequence[Path] = (),
    tolerance: float | None = None,
) -> OnAarch64:
    """Call a method here and on aarch64, twice each, and compare the second calls.

    Args:
        emulator: What runs it.
        source: The file.
        program: The same file, loaded.
        method: The method; of a family, the member.
        inputs: Its inputs, tensors and numbers.
        data: The data files that it needs.
        tolerance: The largest error of floating-point numbers, as a share of the largest magnitude in an output; None
            for one by dtype, looser where the file computes with quantised numbers.

    Raises:
        InputError: The runtime on aarch64 does not load or run it; an input is neither a tensor nor a number; or the
            tolerance is not above 0.
    """
    check_share("check", tolerance)
    program.run(method, *inputs)
    expected = [one for one in program.run(method, *inputs) if one is not None]
    found = emulator.call(source, method, inputs, data=data)
    spec, allowed = _read(source, method, tolerance)
    compared = []
    for place, (right, got) in enumerate(zip(expected, found.outputs, strict=True)):
        wanted = right if isinstance(right, torch.Tensor) else torch.tensor(right, dtype=_PLAIN[type(right)][0])
        one: Difference = measure(wanted, got, allowed, 0.0, None)
        compared.append(ComparedOutput(place, one.largest, one.allowed, one.score <= 1, one.problem))
    traced = profile(spec, 1, read_etdump(emulator.call(source, method, inputs, data=data, traced=True).etdump), None)
    return OnAarch64(method, found.instructions, tuple(compared), tuple(_rows(traced)))


def _read(source: Path, method: str, share: float | None) -> tuple[MethodSpec, Tolerance]:
    """Return what is known of a method, and how far its outputs may be off."""
    file = files.open_file(source, "check", "the path of a .pte file", ".pte")
    code, spec, payloads = file.parse(lambda content: read_checked(content)[0][method], files.PTE)
    operators = [one for payload in payloads if payload is not None for one in payload.operators]
    words = " ".join((*spec.operators, *(text for one in operators for text in (*one.inputs, *one.outputs))))
    quantized = "quantized_decomposed" in words or "int8" in words or "int4" in words
    dtypes = [value.content.dtype for value in code.values if isinstance(value.content, MemoryLayout)]
    halves = [one for one in dtypes if one in (torch.float16, torch.bfloat16)]
    coarsest = max(halves, key=lambda one: torch.finfo(one).eps, default=torch.float32)
    return spec, Tolerance(share, quantized, coarsest)


def _rows(found: Profile) -> Iterator[tuple[str, int]]:
    """Yield the kernels and delegates, each with its instructions: the clock moves by a microsecond for each."""
    rows: Sequence[ProfileRow] = found.rows
    for row in rows:
        if row.kind in ("kernel", "delegate"):
            backend = f" ({row.backend})" if row.kind == "delegate" else ""
            yield f"{row.name}{backend}", round(row.milliseconds * 1e3)
