"""`check`: whether runtimes that are shipped already run a file, and what they miss; nothing is run.

"runs" is said only of what was seen to run in a release: each kernel with these element types and ranks, each operator
in a payload. It is not about values that a kernel refuses, such as an index that is too large, memory and speed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from exir_lowering.errors import InputError
from exir_lowering.inspection import modules
from exir_lowering.inspection.data import as_data
from exir_lowering.inspection.forms import Form, method_forms
from exir_lowering.inspection.reading import inspect
from exir_lowering.inspection.releases import Target, Verdict, find_release, known_releases
from exir_lowering.pte import container, kinds, mapping, slots
from exir_lowering.pte.code import Code, read_methods
from exir_lowering.pte.container import Data
from exir_lowering.pte.debug_info import MethodDebug
from exir_lowering.pte.printing import printable

_ORDER: tuple[Verdict, ...] = ("runs", "unknown", "does not run")
_LIBRARIES: Mapping[str, str] = {
    "quantized": "the quantized kernels (quantized_ops_lib; in Python `import executorch.kernels.quantized`)",
    "llm": "the custom kernels of language models (custom_ops)",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a runtime does not run, or of which that is not known."""

    method: str
    verdict: Verdict
    what: str  # the kernel, the operator of a backend, or the feature of the file
    why: str
    advice: str
    calls: int = 0  # how many instructions ask for it
    where: tuple[str, ...] = ()  # the modules and lines of the model that ask for it, as far as they are known


@dataclass(frozen=True, slots=True)
class RuntimeCompatibility:
    """Whether a runtime runs a file."""

    runtime: str
    verdict: Verdict  # the worst of the methods; of a family, such as forward@npu and forward@cpu, the best counts
    methods: Mapping[str, Verdict]
    findings: tuple[Finding, ...]
    needs: tuple[str, ...]  # libraries of kernels that have to be loaded


@dataclass(frozen=True, slots=True)
class Compatibility:
    """Which runtimes run a file."""

    name: str
    runtimes: tuple[RuntimeCompatibility, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of the runtimes."""
        return _worst(each.verdict for each in self.runtimes)

    def to_json(self) -> str:
        """Return it as JSON: `{"version": 1, "name", "runtimes"}`."""
        return json.dumps(as_data(self), indent=2)

    def to_text(self) -> str:
        """Return it as plain text."""
        return "".join(f"{printable(line)}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        for runtime in self.runtimes:
            yield f"{runtime.runtime}: {runtime.verdict}"
            yield from (f"  needs {library}" for library in runtime.needs)
            for method, verdict in runtime.methods.items():
                yield f"  {method}: {verdict}"
                for each in (each for each in runtime.findings if each.method == method):
                    yield f"    {each.what}{f' ({each.calls}x)' * bool(each.calls)}: {each.why}"
                    yield from (f"      {place}" for place in each.where[:3])
                    yield f"      {each.verdict}; {each.advice}"


def check(source: str | Path | bytes, targets: Sequence[Target]) -> Compatibility:
    """Say whether runtimes run a `.pte` file; an InputError if it is something else, or damaged."""
    file = mapping.open_file(source, "check", "the path or the content of a .pte file", ".pte")
    if kinds.kind_of_content(file.content) is kinds.PTD:
        raise InputError(f"check: {file.name} is a data file, expected a .pte file.")
    asked, debug = file.parse(_read, kinds.PTE), modules.find_debug(file)
    places: dict[str, dict[int, tuple[str, ...]]] = {}
    for method in inspect(source).methods:
        known = debug.get(method.name, MethodDebug({}, (), {}))
        handles = {**known.kernels, **{one.instruction: one.handles for one in known.delegates}}
        lines = {call.number: known.lines(handles.get(call.number, ())) for call in method.calls}
        places[method.name] = {call.number: (*call.modules, *lines[call.number]) for call in method.calls}
    return Compatibility(file.name, tuple(_judge(target, asked, places) for target in targets))


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a method asks of a runtime."""

    forms: Mapping[Form, list[int]]  # and the instructions that ask for each
    kernels: frozenset[str]
    backends: frozenset[str]
    fields: frozenset[tuple[str, int]]  # the fields of the program's tables that are used
    memory: int


def _read(content: memoryview) -> dict[str, _Asked]:
    program, _ = container.open_program(content)
    fields: dict[str, frozenset[tuple[str, int]]] = {}
    for plan in program.tables(slots.Program.EXECUTION_PLAN):
        tables = {"Program": program, "ExecutionPlan": plan}
        used = frozenset((name, field) for name, table in tables.items() for field in range(16) if table.has(field))
        fields[plan.text(slots.ExecutionPlan.NAME)] = used
    return read_methods(content, partial(_ask, fields))[0]


def _ask(fields: Mapping[str, frozenset[tuple[str, int]]], code: Code, data: Data) -> _Asked:
    forms: dict[Form, list[int]] = {}
    for number, form in method_forms(code, data):
        forms.setdefault(form, []).extend([] if number is None else [number])
    kernels = frozenset(".".join(filter(None, name)) for name in code.operators)
    return _Asked(
        forms, kernels, frozenset(each.backend for each in code.payloads), fields[code.name], sum(code.arenas)
    )


def _judge(
    target: Target, asked: Mapping[str, _Asked], places: Mapping[str, Mapping[int, tuple[str, ...]]]
) -> RuntimeCompatibility:
    found = [each for name, one in asked.items() for each in _find(target, name, one, places[name])]
    found.sort(key=lambda each: (-_ORDER.index(each.verdict), each.what))
    methods = {name: _worst(each.verdict for each in found if each.method == name) for name in asked}
    families: dict[str, list[Verdict]] = {}
    for name, verdict in methods.items():
        families.setdefault(name.partition("@")[0], []).append(verdict)
    libraries = {target.release.kernels.get(kernel, "") for one in asked.values() for kernel in one.kernels}
    needs = tuple(text for name, text in _LIBRARIES.items() if name in libraries)
    worst = _worst(min(each, key=_ORDER.index) for each in families.values())
    return RuntimeCompatibility(target.name, worst, methods, tuple(found), needs)


def _worst(verdicts: Iterable[Verdict]) -> Verdict:
    return max(verdicts, key=_ORDER.index, default="runs")


def _find(target: Target, name: str, asked: _Asked, places: Mapping[int, tuple[str, ...]]) -> Iterator[Finding]:
    """Yield what a runtime does not run of a method, and what is not known."""
    for table, field in sorted(asked.fields):
        if field >= target.release.schema.get(table, 0):
            why = f"ExecuTorch {target.release.name} ignores it"
            yield Finding(name, "does not run", f"field {field} of {table}", why, "lower it for that runtime")
    if target.max_memory is not None and asked.memory > target.max_memory:
        why = f"{asked.memory:,} bytes, but the target has {target.max_memory:,}"
        yield Finding(name, "does not run", "planned memory", why, "lower it with smaller inputs")
    for form, numbers in asked.forms.items():
        verdict, why = target.release.judge(form)
        advice = (
            "run the file there to find out" if verdict == "unknown" else "change that in the model, or delegate it"
        )
        missing = _missing(target, asked, form)
        if missing is not None:
            verdict, (why, advice) = "does not run", missing
        if verdict != "runs":
            where = dict.fromkeys(place for number in numbers for place in places.get(number, ()))
            yield Finding(name, verdict, form.name, why, advice, len(numbers), tuple(where))


def _missing(target: Target, asked: _Asked, form: Form) -> tuple[str, str] | None:
    """Return what a runtime lacks for a form, and what to do; None if it lacks nothing."""
    release, backend = target.release, form.name.partition("/")[0]
    backends = release.backends if target.backends is None else target.backends
    kernels = dict.fromkeys(release.kernels) if target.kernels is None else target.kernels
    if backend in asked.backends - backends:
        return f"{target.name} has no backend {backend}", "lower for another one, or build it in"
    if form.name in asked.kernels - kernels.keys():
        having = [name for name in known_releases() if form.name in find_release(name).kernels]
        advice = f"ExecuTorch {', '.join(having)} have it" if target.kernels is None and having else "build it in"
        return f"{target.name} has no such kernel", f"{advice}; or delegate it"
    types = kernels.get(form.name)
    other = set(re.findall(r"\w+", form.types)) - types if types is not None else set()
    return (
        (f"{target.name} has no kernel for {', '.join(sorted(other))}", "build that in, or convert") if other else None
    )
