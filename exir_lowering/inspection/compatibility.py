"""`check`: whether runtimes that are shipped already run a file, and what they miss."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from exir_lowering.pte import files, format as file_format, manifest, slots
from exir_lowering.pte.code import DELEGATE, FREE, JUMP, KERNEL, MOVE, Code, Payload, items
from exir_lowering.pte.container import Data, open_program
from exir_lowering.pte.debug_info import DebugFile, MethodDebug
from exir_lowering.pte.payloads import read_payload
from exir_lowering.pte.printing import printable
from exir_lowering.pte.releases import Form, Target, Verdict, find_target, join_ranks, known_releases
from exir_lowering.pte.slots import KernelTypes as K
from exir_lowering.pte.value_kinds import Tensor, ValueSpec

_LISTS = frozenset({K.TENSOR_LIST, K.OPTIONAL_TENSOR_LIST})
_KINDS = (K.INT, K.DOUBLE, K.NULL, K.INT_LIST, K.DOUBLE_LIST, K.BOOL_LIST)
_LETTERS: Mapping[int, str] = dict(zip(_KINDS, "idnlrb", strict=True))
_WORDS: Mapping[int, str] = {MOVE: "a move", JUMP: "a jump", FREE: "a free"}
_OPERAND = re.compile(r"^(.*?)\[([^\]]*)\]$")
_DATA_FILE = "weights in a data file"


def table_forms(content: memoryview) -> set[Form]:
    """Return what a file asks of a runtime's schema: the fields of its tables that it uses."""
    program, _ = open_program(content)
    tables = [("Program", program), *(("ExecutionPlan", each) for each in program.tables(slots.Program.EXECUTION_PLAN))]
    return {Form(f"field {slot} of {name}") for name, table in tables for slot in range(16) if table.has(slot)}


def method_forms(code: Code, data: Data) -> Iterator[tuple[int | None, Form]]:
    """Yield what a method asks of a runtime, with the numbers of the instructions that ask for it."""
    yield from ((None, Form(feature)) for feature in sorted(_features(code, data)))
    places = [(payload.backend, id(payload.content)) for payload in code.payloads]  # which delegates may share
    distinct = dict(zip(places, code.payloads, strict=True))
    payloads = {place: tuple(_payload_forms(payload, data)) for place, payload in distinct.items()}
    for number, (kind, target, arguments) in enumerate(each for chain in code.chains for each in chain):
        if kind == KERNEL:
            yield number, _kernel_form(code, target, arguments)
        elif kind == DELEGATE:
            yield from ((number, form) for form in payloads[places[target]])


def _features(code: Code, data: Data) -> set[str]:
    kinds = {instruction[0] for chain in code.chains for instruction in chain}
    used = {_WORDS[kind] for kind in kinds - {KERNEL, DELEGATE}}
    used |= {"several arenas"} if len(code.arenas) > 2 else set()
    for tensor in (value.content for value in code.values):
        if not isinstance(tensor, Tensor):
            continue
        used |= {"a dynamic shape"} if tensor.dynamic else set()
        used |= {"an unbound shape"} if tensor.unbound else set()
        if tensor.external:
            used.add(_DATA_FILE)
        elif tensor.stored:
            used.add("first values of state" if tensor.planned else "weights of the host")
            used |= {"weights in the tables of the program"} if data.inline_constants else set()
    return used


def _kernel_form(code: Code, target: int, arguments: tuple[int, ...]) -> Form:
    values, types, rest, tensors = code.values, list[str](), list[str](), list[Tensor]()
    for argument in arguments[: len(arguments) - _repeats(code, arguments)]:
        value = values[argument]
        listed = value.kind in _LISTS
        parts = [values[item] for item in items(values, argument)]
        found = [part.content for part in parts if isinstance(part.content, Tensor)]
        words = [str(tensor.dtype).removeprefix("torch.") for tensor in found]
        types += [f"[{' '.join(sorted(set(words)))}]"] if listed else words
        negative = "-" * any(one.kind == K.INT and int(one.content) < 0 for one in parts)  # type: ignore[arg-type]
        missing = "o" * (listed and -1 in value.content)  # type: ignore[operator]
        rest.append(missing if listed or found else _letter(value) + negative)
        tensors += found
    orders = {"".join(map(str, each.dim_order)) for each in tensors if list(each.dim_order) != sorted(each.dim_order)}
    name = ".".join(filter(None, code.operators[target]))
    if name.startswith("executorch_prim::"):  # of any types and ranks
        return Form(name, rest="".join(rest), of="kernel")
    ranks = join_ranks([len(each.sizes) for each in tensors])
    return Form(name, " ".join(types), ranks, "".join(rest + sorted(orders)), "kernel")


def _repeats(code: Code, arguments: tuple[int, ...]) -> bool:
    """Return whether the last argument is what the kernel returns: what it wrote to, again."""
    last = code.values[arguments[-1]] if arguments else None
    if last is not None and last.kind == K.TENSOR_LIST and isinstance(last.content, tuple):
        return {*last.content} <= {*arguments[:-1]}
    return arguments[-1:] != () and arguments[-1] in arguments[:-1]


def _letter(value: ValueSpec) -> str:
    known = repr(value.content) if value.kind in (K.BOOL, K.STRING) else _LETTERS.get(value.kind, "?")
    return known[0] if value.kind == K.BOOL else known + "0" * (value.content == ())


def _payload_forms(payload: Payload, data: Data) -> Iterator[Form]:
    """Yield the forms of a payload's operators; only its backend if its operators are not known."""
    checked = read_payload(payload.backend, payload.content)
    if checked is None or not checked.operators:
        yield Form(payload.backend, of="backend")
        return
    for operator in checked.operators:
        found = [match for each in (*operator.inputs, *operator.outputs) if (match := _OPERAND.match(each))]
        ranks = join_ranks([len(match[2].split(",")) if match[2] else 0 for match in found])
        rest = "named data" if checked.weights and any("constant" in each for each in operator.inputs) else ""
        types = " ".join(match[1] for match in found)
        yield Form(f"{payload.backend}/{operator.name}", types, ranks, rest, "backend")
    if not set(checked.weights) <= set(data.named):
        yield Form(_DATA_FILE)


_ORDER: tuple[Verdict, ...] = ("runs", "unknown", "does not run")
_ADVICE = {"unknown": "run the file there to find out", "does not run": "change that in the model, or delegate it"}
_LIBRARIES: Mapping[str, str] = {
    "quantized": "the quantized kernels (quantized_ops_lib; in Python `import executorch.kernels.quantized`)",
    "llm": "the custom kernels of language models (custom_ops; `load` and `exir-lower` find those of the wheel)",
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
    where: tuple[str, ...] = ()  # the lines of the model that ask for it, as far as they are known


@dataclass(frozen=True, slots=True)
class RuntimeCompatibility:
    """Whether a runtime runs a file."""

    runtime: str
    verdict: Verdict  # the worst of what clients run: of a family, for each size, the first method with all backends
    methods: Mapping[str, Verdict]
    findings: tuple[Finding, ...]
    needs: tuple[str, ...]  # libraries of kernels that have to be loaded
    ran: tuple[str, ...] = ()  # the methods of which not everything was known, and that it has run just now

    def to_text(self) -> str:
        """Return it as plain text."""
        lines = [f"{self.runtime}: {self.verdict}", *(f"  needs {library}" for library in self.needs)]
        for method, verdict in self.methods.items():
            lines.append(f"  {method}: {verdict}{' (it was run here)' * (method in self.ran)}")
            for each in (each for each in self.findings if each.method == method):
                calls = f" ({each.calls}x)" * bool(each.calls)
                lines += [f"    {each.what}{calls}: {each.why}", *(f"      {place}" for place in each.where[:3])]
                lines.append(f"      {each.verdict}; {each.advice}")
        return "".join(f"{printable(line)}\n" for line in lines)


@dataclass(frozen=True, slots=True)
class _Requirements:
    """What a method asks of a runtime."""

    forms: Mapping[Form, list[int]]  # and the instructions that ask for each
    lines: Callable[[int], list[str]]  # of the model, that an instruction is from
    memory: int  # bytes of planned memory


_Run = Callable[[str], bool]  # runs a method in the runtime that is installed, which is asked what is not known of it


def check(source: str | Path | bytes, targets: Sequence[Target], run: _Run | None = None) -> list[RuntimeCompatibility]:
    """Say whether runtimes run a `.pte` file; an InputError if it is something else, or damaged."""
    file = files.open_file(source, "check", "the path or the content of a .pte file", ".pte")
    debug = DebugFile(file).methods

    def read(content: memoryview) -> tuple[dict[str, _Requirements], Sequence[manifest.Line]]:
        methods, data = file_format.read_checked(content)
        required: dict[str, _Requirements] = {}
        for name, (code, *_) in methods.items():
            forms = {form: list[int]() for form in table_forms(content)}
            for number, form in method_forms(code, data):
                forms.setdefault(form, []).extend([] if number is None else [number])
            required[name] = _Requirements(forms, debug.get(name, MethodDebug({}, (), {})).lines_at, sum(code.arenas))
        return required, manifest.read({name: spec for name, (_, spec, _) in methods.items()})

    required, families = file.parse(read, files.PTE)
    return [_judge(target, required, families, run if target == find_target(None) else None) for target in targets]


def _judge(
    target: Target, required: Mapping[str, _Requirements], lines: Sequence[manifest.Line], run: _Run | None
) -> RuntimeCompatibility:
    found, ran = list[Finding](), list[str]()
    for name, one in required.items():
        own = [*_find(target, name, one)]
        # One run does not take both ways at a jump.
        if run and {each.verdict for each in own} == {"unknown"} and Form(_WORDS[JUMP]) not in one.forms:
            ran += [name] * run(name)
            own = [*_find(target, name, one, name in ran)]
        found += own
    found.sort(key=lambda each: (-_ORDER.index(each.verdict), each.what))
    methods = {name: worst(each.verdict for each in found if each.method == name) for name in required}
    libraries = {target.release.kernels.get(form.name, "") for one in required.values() for form in one.forms}
    needs = tuple(text for name, text in _LIBRARIES.items() if name in libraries)
    listed = {(manifest.split(line.method)[0], line.bucket): list[Verdict]() for line in lines}
    for line in lines:
        if target.available.issuperset(line.backends):
            listed[manifest.split(line.method)[0], line.bucket].append(methods[line.method])
    named = {line.method for line in lines}
    chosen = [verdict for name, verdict in methods.items() if name not in named]
    chosen += [able[0] if able else "does not run" for able in listed.values()]
    return RuntimeCompatibility(target.name, worst(chosen), methods, tuple(found), needs, tuple(ran))


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of some verdicts."""
    return max(verdicts, key=_ORDER.index, default="runs")


def _find(target: Target, name: str, required: _Requirements, ran: bool = False) -> Iterator[Finding]:
    """Yield what a runtime does not run of a method, and what is not known."""
    if target.max_memory is not None and required.memory > target.max_memory:
        why = f"{required.memory:,} bytes, but the target has {target.max_memory:,}"
        yield Finding(name, "does not run", "planned memory", why, "lower it with smaller inputs")
    for form, numbers in required.forms.items():
        verdict, why = target.release.judge(form)
        advice = _ADVICE.get(verdict, "")
        if (missing := _missing(target, form)) is not None:
            verdict, (why, advice) = "does not run", missing
        elif ran and form.types not in target.release.evidence.get(form.name, {}).get("not", ()):  # not wrong, either
            verdict = "runs"
        if verdict != "runs":
            where = dict.fromkeys(line for number in numbers for line in required.lines(number))
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
    other = sorted(set(re.findall(r"\w+", form.types)) - types) if types is not None else ()
    return (f"{target.name} has no kernel for {', '.join(other)}", "build that in, or convert") if other else None
