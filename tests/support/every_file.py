"""Every `.pte` that tests make is inspected, and verified: `PYTHONPATH=tests/support pytest -p every_file FILES`.

A test fails when the bytes that `inspect` counts are not those of the file, or when `verify` finds that it is off, in
EVERY_FILE_CASES of its cases. Each file is tried once, after the test that made it, with the state that its programs
had when they were lowered. What is made in other processes, or by ExecuTorch's own `to_executorch`, is not seen.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast
from weakref import WeakKeyDictionary

import pytest
import torch
from torch.export import ExportedProgram

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")  # else OpenVINO computes in bfloat16
CASES = int(os.environ.get("EVERY_FILE_CASES", "4"))
INSPECTED_ONLY = {  # tests whose files are not right, by the beginning of their name, and why
    "tests/steps/test_edge_errors.py::test_an_operator_without_a_kernel": "the runtime has no kernel for it",
}
if not any(map(torch.cpu.get_capabilities().get, ("avx512_vnni", "avx_vnni"))):
    INSPECTED_ONLY["tests/backends/test_openvino.py"] = "OpenVINO's products of int8 saturate on this processor"

State = list[tuple[torch.Tensor, torch.Tensor]]  # buffers, and what is in them
ORIGINALS: WeakKeyDictionary[ExportedProgram, tuple[ExportedProgram, State]] = WeakKeyDictionary()
MADE: list[tuple[Any, dict[str, tuple[ExportedProgram, State]]]] = []
SEEN: set[bytes] = set()


def pytest_sessionstart() -> None:
    from exir_lowering import lowered, pipeline
    from exir_lowering.lowered_module import emitting

    lower, emit, prepare = pipeline._lower, lowered.emit, emitting._prepare

    def watched_lower(given: Any, *rest: Any, **named: Any) -> Any:
        held = {}
        for method in given:
            program = method.converted_from or method.program
            held[method.name] = program, [(each.detach(), each.detach().clone()) for each in program.buffers()]
        result = lower(given, *rest, **named)
        ORIGINALS.update({result.programs[name]: one for name, one in held.items()})
        return result

    def watched_prepare(program: ExportedProgram) -> ExportedProgram:
        prepared = prepare(program)
        ORIGINALS.update({prepared: ORIGINALS[program]} if program in ORIGINALS else {})
        return prepared

    def watched_emit(made: Any, options: Any) -> Any:
        artifact = emit(made, options)
        MADE.append((artifact, {name: ORIGINALS[one] for name, one in made.programs.items() if one in ORIGINALS}))
        return artifact

    line, faces, modules = cast(Any, (pipeline, lowered, emitting))
    line._lower, faces.emit, modules.emit, modules._prepare = watched_lower, watched_emit, watched_emit, watched_prepare


def fill(state: State) -> None:
    with torch.no_grad():
        for each, value in state:
            each.copy_(value)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    try:
        result = yield
        problems = [problem for made in MADE for problem in try_file(item, *made)]
    finally:
        MADE.clear()
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)
    return result


def try_file(item: pytest.Item, artifact: Any, known: dict[str, tuple[ExportedProgram, State]]) -> Iterator[str]:
    """Yield what is wrong with a file, and note what was done with it."""
    from exir_lowering import LoweringError, inspect, verify
    from exir_lowering.errors import BackendUnavailableError
    from exir_lowering.verification.cases import Generated

    content, make, state = artifact.buffer, Generated.__init__, [pair for _, state in known.values() for pair in state]

    def take_few(self: Generated, *given: Any) -> None:
        make(self, *given)
        del self.cases[CASES:]

    if (digest := hashlib.sha256(content).digest()) in SEEN:
        return
    SEEN.add(digest)
    outcome, now = "verified", [(each, each.clone()) for each, _ in state]
    try:
        report = inspect(content)
        if sum(part.size for part in report.ranges) != len(content):
            yield f"inspect counts other bytes than the file has:\n{report}"
        if not known or any(item.nodeid.startswith(name) for name in INSPECTED_ONLY):
            outcome = "of unknown programs" if not known else "listed as not to be verified"
            return
        fill(state)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Generated, "__init__", take_few)
            found = verify(artifact, {name: program for name, (program, _) in known.items()})
        if not all(method.ok for method in found.methods.values()):  # tests may keep state apart
            yield str(found)
    except BackendUnavailableError:
        outcome = "for backends that are not here"
    except LoweringError as error:
        yield f"{type(error).__name__}: {error}"
    finally:
        fill(now)
        item.user_properties += [("every file", "inspected"), ("every file", outcome)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [each for kind in ("passed", "failed", "xfailed") for each in terminalreporter.stats.get(kind, [])]
    counts = Counter(what for each in reports for name, what in each.user_properties if name == "every file")
    said = ", ".join(f"{count:,} {what}" for what, count in counts.most_common())
    terminalreporter.write_line(f"every file: {said or 'none was made'}")
