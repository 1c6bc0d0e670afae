"""`check`: whether runtimes that are shipped already run a file, and what they miss; nothing is run.

"runs" is said only of what was seen to run in a release: each kernel with these element types and ranks, each operator
in a payload. It is not about values that a kernel refuses, such as an index that is too large, memory and speed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from exir_lowering.inspection.forms import Form, method_forms, table_forms
from exir_lowering.inspection.reading import find_debug, inspect
from exir_lowering.inspection.releases import Target, Verdict, known_releases
from exir_lowering.plugins.payload import find_checks
from exir_lowering.pte import format as file_format, kinds, manifest, mapping
from exir_lowering.pte.debug_info import MethodDebug
from exir_lowering.pte.printing import printable

_ORDER: tuple[Verdict, ...] = ("runs", "unknown", "does not run")
_ADVICE = {"unknown": "run the file there to find out", "does not run": "change that in the model, or delegate it"}
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
    verdict: Verdict  # the worst of the methods that clients run: of a family, those that its manifest chooses there
    methods: Mapping[str, Verdict]
    findings: tuple[Finding, ...]
    needs: tuple[str, ...]  # libraries of kernels that have to be loaded

    def to_text(self) -> str:
        """Return it as plain text."""
        lines = [f"{self.runtime}: {self.verdict}", *(f"  needs {library}" for library in self.needs)]
        for method, verdict in self.methods.items():
            lines.append(f"  {method}: {verdict}")
            for each in (each for each in self.findings if each.method == method):
                calls = f" ({each.calls}x)" * bool(each.calls)
                lines += [f"    {each.what}{calls}: {each.why}", *(f"      {place}" for place in each.where[:3])]
                lines.append(f"      {each.verdict}; {each.advice}")
        return "".join(f"{printable(line)}\n" for line in lines)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a method asks of a runtime."""

    forms: Mapping[Form, list[int]]  # and the instructions that ask for each
    places: Mapping[int, tuple[str, ...]]  # for these, where in the model they are from
    memory: int  # bytes of planned memory


def check(source: str | Path | bytes, targets: Sequence[Target]) -> list[RuntimeCompatibility]:
    """Say whether runtimes run a `.pte` file; an InputError if it is something else, or damaged."""
    file = mapping.open_file(source, "check", "the path or the content of a .pte file", ".pte")
    forms, lines = file.parse(_read, kinds.PTE)
    asked, debug = {}, find_debug(file)
    for method in inspect(source).methods:
        known = debug.get(method.name, MethodDebug({}, (), {}))
        handles = {**known.kernels, **{one.instruction: one.handles for one in known.delegates}}
        at = {one.number: (*one.modules, *known.lines(handles.get(one.number, ()))) for one in method.calls}
        asked[method.name] = _Asked(forms[method.name], at, sum(arena.bytes for arena in method.memory.arenas))
    return [_judge(target, asked, lines) for target in targets]


def _read(content: memoryview) -> tuple[dict[str, dict[Form, list[int]]], tuple[manifest.Line, ...]]:
    """Return what each method asks of a runtime, with the instructions that do, and the families."""
    methods, data = file_format.read_checked(content, find_checks)
    asked: dict[str, dict[Form, list[int]]] = {}
    for name, (code, _) in methods.items():
        forms = asked[name] = {form: list[int]() for form in table_forms(content)}
        for number, form in method_forms(code, data):
            forms.setdefault(form, []).extend([] if number is None else [number])
    return asked, manifest.read({name: spec for name, (_, spec) in methods.items()})


def _judge(target: Target, asked: Mapping[str, _Asked], lines: Sequence[manifest.Line]) -> RuntimeCompatibility:
    found = [each for name, one in asked.items() for each in _find(target, name, one)]
    found.sort(key=lambda each: (-_ORDER.index(each.verdict), each.what))
    methods = {name: worst(each.verdict for each in found if each.method == name) for name in asked}
    libraries = {target.release.kernels.get(form.name, "") for one in asked.values() for form in one.forms}
    needs = tuple(text for name, text in _LIBRARIES.items() if name in libraries)
    chosen = worst(chosen_verdicts(methods, lines, target.available))
    return RuntimeCompatibility(target.name, chosen, methods, tuple(found), needs)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of some verdicts."""
    return max(verdicts, key=_ORDER.index, default="runs")


def chosen_verdicts(
    methods: Mapping[str, Verdict], lines: Sequence[manifest.Line], backends: Collection[str]
) -> Iterator[Verdict]:
    """Yield the verdicts on the methods that clients run: of families those that the manifest's rule chooses."""
    yield from (verdict for name, verdict in methods.items() if name not in {line.method for line in lines})
    for asked in lines:
        for least in (False, True):  # the largest and the smallest sizes that each method of a family takes
            given = {one: one.least if least and not one.exact else one.size for one in asked.bucket.sizes}
            sizes = {(one.input, one.dimension): size for one, size in given.items()}
            able = (line for line in lines if {*line.backends} <= {*backends} and _fits(asked, line, sizes))
            yield next((methods[line.method] for line in able), "does not run")


def _fits(asked: manifest.Line, line: manifest.Line, sizes: Mapping[tuple[int, int], int]) -> bool:
    given = ((one, sizes.get((one.input, one.dimension), one.size)) for one in line.bucket.sizes)
    same = manifest.split(asked.method)[0] == manifest.split(line.method)[0]
    return same and all((one.size if one.exact else one.least) <= size <= one.size for one, size in given)


def _find(target: Target, name: str, asked: _Asked) -> Iterator[Finding]:
    """Yield what a runtime does not run of a method, and what is not known."""
    if target.max_memory is not None and asked.memory > target.max_memory:
        why = f"{asked.memory:,} bytes, but the target has {target.max_memory:,}"
        yield Finding(name, "does not run", "planned memory", why, "lower it with smaller inputs")
    for form, numbers in asked.forms.items():
        verdict, why = target.release.judge(form)
        advice = _ADVICE.get(verdict, "")
        if (missing := _missing(target, form)) is not None:
            verdict, (why, advice) = "does not run", missing
        if verdict != "runs":
            where = dict.fromkeys(place for number in numbers for place in asked.places.get(number, ()))
            yield Finding(name, verdict, form.name, why, advice, len(numbers), tuple(where))


def _missing(target: Target, form: Form) -> tuple[str, str] | None:
    """Return what a runtime lacks for a form, and what to do; None if it lacks nothing."""
    backend = form.name.partition("/")[0]
    kernels = dict.fromkeys(target.release.kernels) if target.kernels is None else target.kernels
    if form.of == "backend" and backend not in target.available:
        return f"{target.name} has no backend {backend}", "lower for another one, or build it in"
    if form.of == "kernel" and form.name not in kernels:
        having = [name for name, known in known_releases().items() if form.name in known.kernels]
        advice = f"ExecuTorch {', '.join(having)} have it" if target.kernels is None and having else "build it in"
        return f"{target.name} has no such kernel", f"{advice}; or delegate it"
    types = kernels.get(form.name)
    other = set(re.findall(r"\w+", form.types)) - types if types is not None else set()
    return (
        (f"{target.name} has no kernel for {', '.join(sorted(other))}", "build that in, or convert") if other else None
    )
