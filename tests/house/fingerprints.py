"""What a revision makes of 200 programs and mistakes: a change that should change nothing, changes nothing here.

python tests/house/fingerprints.py                           describe all, and compare with fingerprints.json
python tests/house/fingerprints.py --only "bert|^error"      those in whose names the pattern is found
python tests/house/fingerprints.py --only variants --accept  write what they are now into fingerprints.json
python tests/house/fingerprints.py --keep FOLDER             write each text and file too, named by its digest
python tests/house/fingerprints.py OUT.json                  write it; another revision's, if PYTHONPATH is its root
python tests/house/fingerprints.py --compare OLD.json NEW.json

Exit status 1: something differs. Where the bytes of a file differ, but nothing in it except what it says of how it was
made, that is counted, and is no difference. What a revision does not have is "absent".
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import inspect
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

# Before torch is imported: random weights and folded constants are then the same on every processor.
os.environ.update(ATEN_CPU_CAPABILITY="default", MKL_CBWR="COMPATIBLE", ONEDNN_MAX_CPU_ISA="SSE41")

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

import fingerprinted

FROZEN = Path(__file__).with_name("fingerprints.json")
PACKAGES = ("", ".graphs", ".plugins", ".partitioners", ".plans", ".dynamo", ".compat", ".testing", ".backends.xnnpack")
COMMANDS = ("lower", "plan", "run", "inspect", "verify", "bisect", "bench", "quantize", "check", "doctor", "plugins")
Entries = Mapping[str, Mapping[str, str]]


def public_names() -> dict[str, dict[str, str]]:
    """Return each public name with its signature and those of its members, and the options of each command."""
    found: dict[str, dict[str, str]] = {}
    for package in PACKAGES:
        module = importlib.import_module(f"exir_lowering{package}")
        for name in sorted(set(getattr(module, "__all__", ()))):
            value = getattr(module, name)
            members = sorted(vars(value).items()) if inspect.isclass(value) else ()
            found[f"name {module.__name__}.{name}"] = {
                "": _signature(value),
                **{member: _signature(each) for member, each in members if not member.startswith("_")},
            }
    return found


def _signature(value: Any) -> str:
    try:
        found = str(inspect.signature(value)) if isinstance(value, Callable) else type(value).__name__  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found = type(value).__name__
    return fingerprinted.clean(found)


def commands() -> dict[str, dict[str, str]]:
    """Return the options of each command."""
    from exir_lowering.cli import main

    found = {}
    for name in COMMANDS:
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(io.StringIO()):
            main([name, "--help"])
        found[f"command {name}"] = {"": " ".join(sorted(set(re.findall(r"--[a-z][a-z-]*", text.getvalue()))))}
    return found


def versions() -> dict[str, str]:
    """Return what the bytes depend on."""
    return {name: importlib.metadata.version(name) for name in ("torch", "executorch", "torchao", "transformers")}


def describe(only: str = "") -> Iterator[tuple[str, Mapping[str, str]]]:
    """Describe all that a pattern is found in the name of."""
    groups = (lambda: {"versions": versions()}, public_names, commands)
    for group in groups:
        yield from ((name, found) for name, found in group().items() if re.search(only, name))
    for name, case in fingerprinted.all_cases().items():
        if re.search(only, name):
            torch.manual_seed(0)
            try:
                found = dict(case())
            except Exception as error:
                found = {"absent": fingerprinted.clean(f"{type(error).__name__}: {error}".splitlines()[0])}
            print(name, found, file=sys.stderr, flush=True)
            yield name, found


def compare(old: Entries, new: Entries) -> int:
    """Print what differs, a line each; return how much it is."""
    count = manifests = 0
    for name in sorted({*old, *new}):
        first, second = old.get(name, {}), new.get(name, {})
        differ = [key for key in sorted({*first, *second}) if first.get(key) != second.get(key)]
        if differ and all(key.endswith(("file", "size")) for key in differ) and any("program" in key for key in first):
            manifests += 1
            continue
        count += len(differ)
        for key in differ:
            print(f"{name}: {key}: {first.get(key)} -> {second.get(key)}")
    print(
        f"{len({*old, *new})} entries, {count} differences; {manifests} files say something else of how they were made"
    )
    return count


def write(entries: Entries, path: Path) -> None:
    """Write entries, a line each."""
    lines = (f"{json.dumps(name)}: {json.dumps(found, sort_keys=True)}" for name, found in sorted(entries.items()))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> int:
    """Describe this revision, or compare two descriptions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--only", default="", metavar="PATTERN")
    parser.add_argument("--accept", action="store_true")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    if given.compare:
        old, new = (json.loads(path.read_text()) for path in given.files)
        return int(compare(old, new) > 0)
    if given.keep:
        given.keep.mkdir(parents=True, exist_ok=True)
        fingerprinted.KEEP = given.keep
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = dict(describe(given.only))
    if given.files:
        write(found, given.files[0])
        return 0
    frozen = json.loads(FROZEN.read_text()) if FROZEN.exists() else {}
    old = {name: entry for name, entry in frozen.items() if re.search(given.only, name)}
    count = compare(old, found)
    if given.accept:
        write({name: entry for name, entry in frozen.items() if name not in old} | found, FROZEN)
    return int(count > 0)


if __name__ == "__main__":
    raise SystemExit(main())
