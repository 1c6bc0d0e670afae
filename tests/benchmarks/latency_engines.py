"""What makes the files of the latency benchmark, and what runs them, on one core or more."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from executorch.extension.pybindings import _C
from latency_models import MODELS
from lowering_engines import FakeResults, executorch, forget, ours, run
from lowering_models import Built, export_model
from torch.export import ExportedProgram

import exir_lowering
from exir_lowering import LoweringError, LoweringOptions
from exir_lowering.pte.format import read_program

Run = Callable[[], list[Any]]

_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
_FAKES = FakeResults()


@dataclass(frozen=True)
class Subject:
    """A model, and the program that all engines take.

    Attributes:
        name: Its name.
        built: The module and its inputs.
        program: The program.
    """

    name: str
    built: Built
    program: ExportedProgram

    def expected(self) -> list[torch.Tensor]:
        """Return what PyTorch computes; for a quantised model with its quantised weights and activations."""
        quantized = self.built.quantize is not None
        with torch.no_grad():
            return _flat((self.program.module() if quantized else self.built.model)(*self.built.inputs))


def build(name: str) -> Subject:
    """Build and export a model, without what earlier ones left in memory."""
    torch.compiler.reset()
    forget()
    _FAKES.restore()
    gc.collect()
    program, built = export_model(name, MODELS)
    return Subject(name, built, program)


def use_cores(cores: int) -> None:
    """Let this process use that many cores. No file may be open: those of XNNPACK hold the old threads."""
    gc.collect()
    if _CORES:
        os.sched_setaffinity(0, _CORES[:cores])
    torch.set_num_threads(cores)
    _C._unsafe_reset_threadpool(cores)


def _lower_openvino(program: ExportedProgram) -> bytes:
    return exir_lowering.lower(program, "openvino").emit().buffer


def _lower_ours(program: ExportedProgram, **options: Any) -> bytes:
    return run(partial(ours, options=LoweringOptions(**options)), program).buffer


FILES: dict[str, Callable[[ExportedProgram], bytes]] = {
    "executorch": lambda program: run(executorch, program).buffer,
    "none": partial(_lower_ours, rewrites="none"),
    "safe": partial(_lower_ours, rewrites="safe"),
    "openvino": _lower_openvino,
}
"""What makes a file of a program."""

OURS = ("none", "safe")
MODULES = ("eager", "compile")
ENGINES = (*FILES, *MODULES)


def make_files(
    subject: Subject, engines: tuple[str, ...], keep: Path | None
) -> tuple[dict[str, bytes], dict[str, str]]:
    """Make the files of a model.

    Args:
        subject: The model.
        engines: The engines; those without files are left out.
        keep: A folder for ExecuTorch's files, which are taken from there if they exist.

    Returns:
        The files by engine; and for engines that cannot lower the model, why.
    """
    files, failures = {}, {}
    for engine in engines:
        if engine not in FILES:
            continue
        kept = keep / f"{subject.name}.pte" if keep and engine == "executorch" else None
        if kept and kept.exists():
            files[engine] = kept.read_bytes()
            continue
        try:
            files[engine] = FILES[engine](subject.program)
        except LoweringError as error:
            failures[engine] = first_line(error)
            continue
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(files[engine])
    return files, failures


def describe_file(file: bytes) -> dict[str, Any]:
    """Return what a file's tables say: its size, its planned memory, its delegates and operators on the host."""
    method = read_program(memoryview(file))["forward"]
    return {
        "bytes": len(file),
        "planned": sum(method.arenas),
        "delegates": len(method.delegations),
        "host": len(method.kernels),
    }


def open_all(
    subject: Subject, files: Mapping[str, bytes], engines: tuple[str, ...]
) -> tuple[dict[str, Run], dict[str, float], dict[str, str]]:
    """Make each engine ready to run.

    Returns:
        How to run it; seconds until the first result, of files; and for engines that cannot run the model, why.
    """
    runs: dict[str, Run] = {}
    ready: dict[str, float] = {}
    failures: dict[str, str] = {}
    for engine in engines:
        if engine in FILES and engine not in files:
            continue
        start = time.perf_counter()
        try:
            opened = _open_file(subject, files[engine]) if engine in FILES else _open_module(subject, engine)
            opened()
        except MemoryError:
            raise
        except Exception as error:
            failures[engine] = first_line(error)
            continue
        runs[engine] = opened
        if engine in FILES:
            ready[engine] = time.perf_counter() - start
    return runs, ready, failures


def _open_file(subject: Subject, file: bytes) -> Run:
    return partial(exir_lowering.load(file).run, "forward", *subject.built.inputs)


def _open_module(subject: Subject, engine: str) -> Run:
    model = torch.compile(subject.built.model) if engine == "compile" else subject.built.model

    def call() -> list[Any]:
        with torch.no_grad():
            return _flat(model(*subject.built.inputs))

    return call


def _flat(result: Any) -> list[Any]:
    return [result] if isinstance(result, torch.Tensor) else [*result]


def first_line(error: Exception) -> str:
    """Return what kind of error it is, and the start of what it says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
