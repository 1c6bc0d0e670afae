"""What a revision makes of a hundred programs, to compare with another one when a change should change nothing.

python tests/house/fingerprints.py OUT.json                  models, quantised, dynamic, random programs, state
python tests/house/fingerprints.py --compare OLD.json NEW.json

An older revision may not have this file; with PYTHONPATH set to its root, this one describes it. Exit status 1: the two
differ. It takes about ten minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

import exir_lowering
from exir_lowering import LoweringError, LoweringOptions, lower, plan, to_backend
from exir_lowering.backends.reference import reference_partitioner

ROOT = Path(exir_lowering.__file__).resolve().parents[1]
for folder in ("tests/support", "tests/benchmarks", "tests/steps/state"):
    sys.path.append(str(ROOT / folder))

import lowering_models  # noqa: E402
import models  # noqa: E402
import quantized_models  # noqa: E402
import random_programs  # noqa: E402
import random_state_programs  # noqa: E402
import stateful  # noqa: E402

PACKAGES = ("", ".graphs", ".plugins", ".partitioners", ".plans", ".dynamo", ".compat", ".testing", ".backends.xnnpack")
UNCACHED = LoweringOptions(cache=False)
LARGE = {"resnet50", "minilm", "llama16_prefill", "llama16_decode", "whisper_encoder", "whisper_decoder"}


def digest(content: Any) -> str:
    """Return a short digest of bytes or text."""
    return hashlib.sha256(content if isinstance(content, bytes) else str(content).encode()).hexdigest()[:16]


def describe_program(programs: Mapping[str, ExportedProgram] | ExportedProgram, partitioners: Any) -> dict[str, str]:
    """Return digests of the plan and of every file, or the message of the error."""
    try:
        edge = any(program.dialect == "EDGE" for program in getattr(programs, "values", list)())
        planned = plan(programs, partitioners, options=UNCACHED)
        lowered = (to_backend if edge else lower)(programs, partitioners, options=UNCACHED)
        artifact = lowered.emit()
    except LoweringError as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}  # later ones may name generated code
    files = {f"file {name}": digest(bytes(content)) for name, content in artifact.data_files.items()}
    return {"plan": digest(str(planned).replace(str(ROOT), "")), "file": digest(bytes(artifact.buffer)), **files}


def real_programs() -> Iterator[tuple[str, Any, Any]]:
    """Yield models with a name and what lowers them."""
    for name in models.MODELS:
        program = models.exported(name)[2]
        yield name, program, "xnnpack"
        yield f"{name} on the host", program, None
    for name in lowering_models.MODELS:
        if name not in LARGE:
            yield f"benchmark {name}", lowering_models.export_model(name)[0], "xnnpack"
    for dynamic in (False, True):
        partitioners = quantized_models.partitioners(dynamic)
        yield f"quantized {dynamic}", quantized_models.quantized(dynamic), partitioners


def made_programs() -> Iterator[tuple[str, Any, Any]]:
    """Yield random programs, and random state."""
    for seed, made in enumerate(random_programs.random_programs(7000, 24)):
        yield f"random {seed}", made.methods, [None, "xnnpack"][seed % 2]
    for seed in range(30):
        state = random_state_programs.make(8000 + seed, 1 + seed % 2)
        exported = stateful.exported(state.models(), dict(state.calls))
        own = reference_partitioner(own_state=True)
        yield f"state {seed}", exported, [None, "xnnpack", own][seed % 3]


def public_names() -> dict[str, str]:
    """Return each public name with its signature."""
    found = {}
    for package in PACKAGES:
        module = importlib.import_module(f"exir_lowering{package}")
        for name in sorted(set(getattr(module, "__all__", ()))):
            value = getattr(module, name)
            found[f"{module.__name__}.{name}"] = _signature(value)
            for member, function in sorted(vars(value).items()) if inspect.isclass(value) else ():
                if not member.startswith("_"):
                    found[f"{module.__name__}.{name}.{member}"] = _signature(function)
    return found


def _signature(value: Any) -> str:
    try:
        return str(inspect.signature(value)) if isinstance(value, Callable) else type(value).__name__  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return type(value).__name__


def describe() -> dict[str, Any]:
    """Describe everything; a program that cannot be made is left out, in each revision alike."""
    found: dict[str, Any] = {"names": public_names(), "errors pages": _errors_pages()}
    for make in (real_programs, made_programs):
        for name, program, partitioners in make():
            found[name] = describe_program(program, partitioners)
            print(name, found[name], file=sys.stderr, flush=True)
    return found


def _errors_pages() -> str:
    return digest("".join(page.read_text() for page in sorted((ROOT / "docs" / "errors").glob("*.md"))))


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> int:
    """Print what differs, a line each; return how much it is."""
    count = 0
    for name in sorted({*old, *new}):
        first, second = old.get(name), new.get(name)
        for key in sorted({*first, *second}) if isinstance(first, dict) and isinstance(second, dict) else ():
            if first.get(key) != second.get(key):
                count += 1
                print(f"{name}: {key}: {first.get(key)} -> {second.get(key)}")
        if not (isinstance(first, dict) and isinstance(second, dict)) and first != second:
            count += 1
            print(f"{name}: {first} -> {second}")
    print(f"{len({*old, *new})} entries, {count} differences")
    return count


def main() -> int:
    """Describe this revision, or compare two descriptions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--compare", action="store_true")
    given = parser.parse_args()
    if given.compare:
        old, new = (json.loads(path.read_text()) for path in given.files)
        return int(compare(old, new) > 0)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    given.files[0].write_text(json.dumps(describe(), indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
