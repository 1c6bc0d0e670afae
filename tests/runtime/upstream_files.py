"""Every file that ExecuTorch's own tests execute is loaded by this package, too: it has to accept it and agree.

python tests/runtime/upstream_files.py                          the operators and the XNNPACK tests of the wheel
python tests/runtime/upstream_files.py exir/tests               the tests in a folder of the wheel
python tests/runtime/upstream_files.py backends/test/suite -k relu --json found.json

Each call in ExecuTorch's runtime is made again by `load`, with its checks. Exit status 1: a file or a
call is refused on which the runtime was right, or the results are others.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from exir_lowering import load

FOLDERS = ("backends/test/suite/operators", "backends/xnnpack/test/ops")


class Comparison:
    """What came of files and of calls; a plug-in of pytest."""

    def __init__(self, every: int) -> None:
        self._every = every
        self.counts: Counter[str] = Counter()
        self.problems: list[dict[str, str]] = []
        self._test = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if _backend(item) in ("xnnpack", "portable")][:: self._every]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._test = item.nodeid

    def note(self, kind: str, said: str) -> None:
        self.counts[kind] += 1
        self.problems.append({"kind": kind, "test": self._test, "said": said})

    def install(self) -> None:
        """Watch what ExecuTorch's tests load."""
        from executorch.extension.pybindings import portable_lib

        original = portable_lib._load_for_executorch_from_buffer

        def load_watched(buffer: bytes, *arguments: Any, **named: Any) -> Any:
            module = original(buffer, *arguments, **named)
            other = arguments or not named.keys() <= {"program_verification"}  # such as data files
            return module if other else Watched(module, bytes(buffer), self)

        portable_lib._load_for_executorch_from_buffer = load_watched


class Watched:
    """ExecuTorch's module; its calls are made again by this package."""

    def __init__(self, module: Any, content: bytes, comparison: Comparison) -> None:
        self._module, self._comparison = module, comparison
        self._ours = None
        comparison.counts["files"] += 1
        try:
            self._ours = load(content)
        except Exception as error:
            comparison.note("file refused", f"{type(error).__name__}: {error}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, inputs: Any, *more: Any, **named: Any) -> Any:
        return self.run_method("forward", inputs, *more, **named)

    def forward(self, inputs: Any, *more: Any, **named: Any) -> Any:
        return self.run_method("forward", inputs, *more, **named)

    def run_method(self, method: str, inputs: Any = (), *more: Any, **named: Any) -> Any:
        copies = [_copy(value) for value in inputs]
        expected = self._module.run_method(method, inputs, *more, **named)
        if self._ours is not None:
            kept = [_copy(value) for value in expected]
            self._comparison.counts["calls"] += 1
            try:
                got = self._ours.run(method, *copies)
                torch.testing.assert_close(list(got), kept, equal_nan=True, rtol=0, atol=0)
            except AssertionError as error:
                self._comparison.note("other results", str(error)[:500])
            except Exception as error:
                self._comparison.note("call refused", f"{type(error).__name__}: {error}")
        return expected


def _backend(item: pytest.Item) -> str:
    """Return the backend that a test of ExecuTorch's suite of operators and models is for."""
    flow = getattr(getattr(item, "callspec", None), "params", {}).get("test_runner")
    return getattr(flow, "backend", "portable")


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def main() -> int:
    """Run tests; return 1 if there is a defect of this package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    parser.add_argument("-k", dest="chosen", default="")
    parser.add_argument("--every", type=int, default=1, help="run the first of so many tests")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was found until then is shown
    spec = importlib.util.find_spec("executorch")
    assert spec is not None and spec.submodule_search_locations
    wheel = Path(next(iter(spec.submodule_search_locations)))
    comparison = Comparison(given.every)
    comparison.install()
    chosen = ["-k", given.chosen] if given.chosen else []
    folders = [str(wheel / folder) for folder in given.folders]
    pytest.main(
        [
            "-q",
            "-p",
            "no:cacheprovider",
            "--tb=no",
            "--no-header",
            "--continue-on-collection-errors",
            "-W",
            "ignore",
            *chosen,
            *folders,
        ],
        [comparison],
    )
    for problem in comparison.problems:
        print(*problem.values(), sep="\n  ")
    print(dict(comparison.counts))
    if given.json:
        given.json.write_text(json.dumps({"counts": comparison.counts, "problems": comparison.problems}, indent=1))
    return int(bool(comparison.problems) or not comparison.counts["calls, runtime"])


if __name__ == "__main__":
    sys.exit(main())
