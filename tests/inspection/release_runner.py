"""Run cases in a release's runtime, and say what became of each; executed by a Python that has that release and torch.

`release_runner.py NAMES` prints what the runtime has. `release_runner.py CASES RESULTS` runs the cases, and writes a
line for each: "pass", "differs" or "refused".
"""

import gc
import glob
import importlib
import json
import os
import re
import signal
import sys
from typing import Any

import torch

_NAME = re.compile(rb"\x00((?:quantized_decomposed|llama)::\w+(?:\.\w+)?)(?=\x00)")


def runtime() -> Any:
    for name in ("_C", "_portable_lib"):
        try:
            return importlib.import_module(f"executorch.extension.pybindings.{name}")
        except ModuleNotFoundError as error:
            if not str(error.name).endswith(name):
                raise
    raise SystemExit("there is no runtime")


def load_libraries(module: Any) -> dict[str, list[str]]:
    """Load the libraries of more kernels that the wheel has; return the names that each of them adds."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(module.__file__)))
    found, known = {}, set(module._get_operator_names())
    for word, pattern in (
        ("quantized", "kernels/quantized/libquantized_ops_aot_lib.so"),
        ("llm", "extension/llm/custom_ops/libcustom_ops_aot_lib.so"),
    ):
        for library in glob.glob(os.path.join(root, pattern)):
            try:
                torch.ops.load_library(library)
                now = set(module._get_operator_names())
            except OSError:  # it needs another torch: what it has is in its strings, and nothing is known of it
                with open(library, "rb") as file:
                    now = known | {name.decode() for name in _NAME.findall(file.read())}
            found[word], known = sorted(now - known), now
    return found


def run(module: Any, content: bytes, method: str, inputs: list[Any], expected: list[Any]) -> str:
    program = module._load_for_executorch_from_buffer(content)
    made = program.run_method(method, tuple(inputs))
    made = [one for one in made if isinstance(one, torch.Tensor)]
    if len(made) != len(expected):
        return f"differs: {len(made)} results, not {len(expected)}"
    for one, other in zip(made, expected):  # noqa: B905 - as many
        if other.is_meta:
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                return f"differs: {one.dtype} {list(one.shape)}"
            continue
        relative, absolute = (2e-2, 2e-2) if other.dtype in (torch.float16, torch.bfloat16) else (1e-3, 1e-4)
        try:
            torch.testing.assert_close(one, other, equal_nan=True, rtol=relative, atol=absolute)
        except AssertionError as error:
            return f"differs: {str(error)[:120]}"
    return "pass"


def main() -> None:
    module = runtime()
    names, backends = module._get_operator_names(), module._get_registered_backend_names()
    more = load_libraries(module)
    if sys.argv[1] == "NAMES":
        print(json.dumps({"": sorted(names), **more, "backends": sorted(backends)}))
        return
    cases = torch.load(sys.argv[1], weights_only=False)
    with open(sys.argv[2], "w", buffering=1) as results:
        gc.freeze()  # a child would copy the memory of what it collects
        gc.disable()
        torch.testing.assert_close(torch.ones(2), torch.ones(2))  # what it imports, children have then
        done = 0
        while done < len(cases):
            done = run_in_child(module, cases, done, results)


def run_in_child(module: Any, cases: list[Any], done: int, results: Any) -> int:
    """Run cases from a number on in a child, until one ends it, which is refused; return the number after it."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        for stream in (1, 2):  # where the runtime says why it refuses a case
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        with os.fdopen(writes, "w", buffering=1) as pipe:
            for number in range(done, len(cases)):
                signal.alarm(60)
                try:
                    outcome = run(module, *cases[number])
                except Exception as error:
                    outcome = f"refused: {type(error).__name__}: {error}"
                print(" ".join(outcome.split())[:200], file=pipe)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        for line in pipe:
            results.write(line)
            done += 1
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if done < len(cases):
        results.write(f"refused: died of {code}\n")
        done += 1
    return done


if __name__ == "__main__":
    main()
