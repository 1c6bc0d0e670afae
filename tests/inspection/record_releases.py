"""Record what ExecuTorch's releases run, in `exir_lowering/pte/releases.json`.

    PYTHONPATH=tests/support python tests/inspection/record_releases.py 1.4.1 1.5.1
    python tests/inspection/record_releases.py 1.3.1 --python /path/to/python/with/torch/2.12

It downloads the wheel of each release for the Python that runs it, unpacks it, and runs cases in its runtime: a file
for each kind of call of each kernel, from torch's own samples of operators, and small programs. `--python` has a torch
that the wheel works with; this one by default. The cases take some minutes to make; `--cases` keeps them in a file.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

TABLE = Path(__file__).parents[2] / "exir_lowering" / "pte" / "releases.json"
RUNNER = Path(__file__).with_name("release_runner.py")
TABLES = ("Program", "ExecutionPlan", "Tensor", "ExtraTensorInfo")


def make_cases() -> list[Any]:
    """Make the cases: about 25,000."""
    import executorch.kernels.quantized  # noqa: F401
    from release_probes import Unwritable, order_cases, primitive_cases, record_calls, write_call
    from release_programs import program_cases

    from exir_lowering._upstream import installed

    cases = []
    kernels = sorted(installed.kernels() or ())
    for call in record_calls(kernels):
        with contextlib.suppress(Unwritable, IndexError, TypeError):  # no file can have it
            cases.append(write_call(*call))
    return [*cases, *primitive_cases(kernels), *order_cases(), *program_cases()]


def forms_of(content: bytes, method: str) -> frozenset[Any]:
    """Return what a file asks of a runtime."""
    from exir_lowering.inspection.compatibility import method_forms
    from exir_lowering.pte.code import read_methods

    code, data = read_methods(memoryview(content), lambda code, data: code)
    return frozenset(form for _, form in method_forms(code[method], data))


def unpack(release: str, wheels: Path) -> Path:
    """Download the wheel of a release unless it is there, and unpack it; return the folder."""
    folder = wheels / release
    if not folder.exists():
        command = ["pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", str(wheels)]
        subprocess.run([sys.executable, "-m", *command, f"executorch=={release}"], check=True)
        wheel = next(wheels.glob(f"executorch-{release}-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder


def start(folder: Path, python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start the runner in the environment of a release."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [python, "-W", "ignore", str(RUNNER), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def run_cases(folder: Path, python: str, cases: Path) -> list[str]:
    """Run all cases."""
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch, "results")
        ended = start(folder, python, str(cases), str(results))
        if ended.returncode:
            raise SystemExit(f"{folder}: the cases could not be run:\n{ended.stderr}")
        return results.read_text().splitlines()


def read_schema(folder: Path) -> dict[str, int]:
    """Return how many fields the tables of program.fbs have that new fields were added to."""
    text = re.sub(r"//.*", "", (folder / "executorch/schema/program.fbs").read_text())
    bodies = (re.search(rf"^table {name} \{{(.*?)^\}}", text, re.MULTILINE | re.DOTALL) for name in TABLES)
    return {name: len(re.findall(r"\w+\s*:", body[1])) for name, body in zip(TABLES, bodies, strict=True) if body}


def learn(outcomes: Iterable[tuple[frozenset[Any], str]]) -> dict[str, dict[tuple[str, str, str], str]]:
    """Return what became of each form, by its name: "pass", "refused", or "doubt" where cases disagree."""
    outcomes = list(outcomes)
    passed = {form for forms, outcome in outcomes if outcome == "pass" for form in forms}
    known: dict[Any, set[str]] = collections.defaultdict(set)
    for form in passed:
        known[form].add("pass")
    for forms, outcome in outcomes:
        blamed = forms - passed if len(forms - passed) else forms if len(forms) == 1 else ()
        if outcome != "pass" and len(blamed) == 1:
            known[next(iter(blamed))].add(outcome.partition(":")[0])
    found: dict[str, dict[tuple[str, str, str], str]] = collections.defaultdict(dict)
    for form, words in known.items():
        word = next(iter(words)) if len(words) == 1 else "doubt"
        found[form.name][form.types, form.ranks, form.rest] = "doubt" if word == "differs" else word
    return found


def factorise(forms: Mapping[tuple[str, str, str], str]) -> dict[str, Any]:
    """Return the evidence of a kernel: what each factor of a form decides alone, and exceptions."""
    runs = [{form[place] for form, word in forms.items() if word == "pass"} for place in range(3)]
    fails: list[set[str]] = [set(), set(), set()]
    doubts, tangled = set(), False
    for form, word in sorted(forms.items()):
        outside = [place for place in range(3) if form[place] not in runs[place]]
        if word == "refused" and len(outside) == 1:
            fails[outside[0]].add(form[outside[0]])
        elif word == "refused" and not outside:
            tangled = True
        elif word == "doubt" and not outside:  # what it computes depends on the numbers
            doubts.add(form[0])
    if tangled:  # factors decide together: only what was seen is known
        known = {word: sorted(form for form, one in forms.items() if one == word) for word in ("pass", "refused")}
        return {"runs": known["pass"], "fails": known["refused"], **({"not": sorted(doubts)} if doubts else {})}
    evidence = {"yes": [sorted(each) for each in runs], "no": [sorted(each) for each in fails], "not": sorted(doubts)}
    return {key: value for key, value in evidence.items() if any(value)}


def main() -> None:
    """Record the releases that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="+")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--wheels", type=Path, default=Path(tempfile.gettempdir(), "executorch-wheels"))
    parser.add_argument("--cases", type=Path, default=Path(tempfile.gettempdir(), "executorch-cases.pt"))
    arguments = parser.parse_args()
    arguments.wheels.mkdir(parents=True, exist_ok=True)
    if not arguments.cases.exists():
        torch.save(make_cases(), arguments.cases)
    cases = torch.load(arguments.cases, weights_only=False)
    asked = [forms_of(case[0], case[1]) for case in cases]
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {"version": 1, "releases": {}, "evidence": {}}
    for release in arguments.releases:
        folder = unpack(release, arguments.wheels)
        ended = start(folder, arguments.python, "NAMES")
        if ended.returncode:
            raise SystemExit(f"{release}: its runtime cannot be imported by {arguments.python}:\n{ended.stderr}")
        names = json.loads(ended.stdout)
        kept = arguments.wheels / f"{release}.results"
        outcomes = kept.read_text().splitlines() if kept.exists() else []
        if len(outcomes) != len(cases):
            outcomes = run_cases(folder, arguments.python, arguments.cases)
            kept.write_text("\n".join(outcomes))
        print(release, collections.Counter(outcome.partition(":")[0] for outcome in outcomes))
        add(table, release, names, read_schema(folder), learn(zip(asked, outcomes, strict=True)))
    write(table)


def add(table: dict[str, Any], release: str, names: dict[str, Any], schema: Any, found: Mapping[str, Any]) -> None:
    """Add a release to the table, or replace it."""
    backends = names.pop("backends")
    table["releases"][release] = {"backends": backends, "schema": schema, "kernels": names}
    for name in {*table["evidence"], *found}:
        groups = table["evidence"].setdefault(name, [])
        for group in groups:
            group[0] = [each for each in group[0] if each != release]
        evidence = json.loads(json.dumps(factorise(found.get(name, {}))))
        same = next((group for group in groups if group[1] == evidence), None)
        if evidence and same is not None:
            same[0] = sorted([*same[0], release], reverse=True)
        elif evidence:
            groups.append([[release], evidence])
        table["evidence"][name] = sorted((group for group in groups if group[0]), reverse=True, key=lambda g: g[0])
    table["evidence"] = {name: groups for name, groups in table["evidence"].items() if groups}


def write(table: dict[str, Any]) -> None:
    """Write the table, a kernel a line, so that a difference can be read."""
    plain = {key: value for key, value in table.items() if key != "evidence"}
    lines = [f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in sorted(table["evidence"].items())]
    head = json.dumps(plain, separators=(",", ":"))[:-1]
    TABLE.write_text(f'{head}, "evidence": {{\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()
