"""Run ExecuTorch's own tests of its backend API (in its wheel) with this package's engine.

python tests/compat/upstream_suite.py                     each test that passes on ExecuTorch's engine has to pass
python tests/compat/upstream_suite.py --engine convex     with this package's proposals in ExecuTorch's partitioners too
python tests/compat/upstream_suite.py --delegates         those too that need the demo backend, in Python
python tests/compat/upstream_suite.py --engine upstream   run them on ExecuTorch's engine
python tests/compat/upstream_suite.py --part 1/7          run a part of them
python tests/compat/upstream_suite.py --record            write down which pass there, in upstream_suite_passing.txt
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

PASSING = Path(__file__).parent / "upstream_suite_passing.txt"

DELEGATED = frozenset(
    {
        *(
            f"test_backends_lifted.py::TestBackends::{name}"
            for name in (
                "test_add_mul_partitioner",
                "test_backend_with_compiler",
                "test_backend_with_compiler_delegate_and_operator",
                "test_backend_with_compiler_delegate_and_operator_with_two_modules",
                "test_backend_with_compiler_out_of_range",
                "test_lowered_add_mul",
            )
        ),
        "test_compatibility.py::TestCompatibility::test_compatibility_in_runtime",
        "test_compatibility.py::TestCompatibility::test_compatibility_in_runtime_edge_program_manager",
        "test_lowered_backend_module.py::TestBackendAPI::test_emit_lowered_backend_module_end_to_end",
        "test_partitioner.py::TestPartitioner::test_partitioner_splits_constant_data",
        "test_rpc.py::TestRPCDemos::test_delegate_program_with_nested_delegate",
        "test_rpc.py::TestRPCDemos::test_delegate_whole_program",
        "test_rpc.py::TestRPCDemos::test_delegate_partial_program",
        "test_to_backend_multi_method.py::TestToBackendMultiMethod::test_multi_method_end_to_end",
    }
)
"""The tests that execute payloads of ExecuTorch's demo backends. On a stock wheel they fail."""


def suite() -> Path:
    """Return the folder of the tests."""
    spec = importlib.util.find_spec("executorch.exir.backend")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("executorch is not installed")
    return Path(spec.submodule_search_locations[0]) / "test"


class Outcomes:
    """A pytest plug-in that notes which tests passed, subtests included."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one report."""
        name = report.nodeid.split("/")[-1]
        if report.failed:
            self.failed.add(name)
        elif report.when == "call" and report.passed:
            self.passed.add(name)

    def result(self) -> set[str]:
        """Return the tests that passed in every part."""
        return self.passed - self.failed


def run(engine: str, delegates: bool = False, part: str = "") -> set[str]:
    """Run the tests, or those of one part, and return the names of those that pass."""
    from executorch_demo import DemoDelegate, ExecutorDelegate

    from exir_lowering import compat

    outcomes = Outcomes()
    # Beside demos/rpc there is a test of a runtime that is in no wheel.
    found = {path.name: path for folder in (suite(), suite() / "demos/rpc") for path in folder.glob("test_*.py")}
    files = sorted(map(str, found.values()))
    if part:
        names = [name.partition("::") for name in sorted(expected_of(delegates, part))]
        files = [f"{found[file]}::{test}" for file, _, test in names]
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull, "--show-capture=no"]
    options += ["--rootdir", str(suite()), "--import-mode=importlib", "--tb=line", "-W", "ignore"]
    ours = compat.patch_executorch(convex_proposals=engine == "convex")
    context = contextlib.nullcontext() if engine == "upstream" else ours
    with context, compat.serve_delegates([DemoDelegate, ExecutorDelegate]) if delegates else contextlib.nullcontext():
        pytest.main([*options, *files], plugins=[outcomes])
    return outcomes.result()


def expected_of(delegates: bool, part: str) -> set[str]:
    """Return the tests that have to pass, or a part of them, with some of each file."""
    names = sorted({*PASSING.read_text().split(), *DELEGATED})
    number, _, count = part.partition("/")
    chosen = names[int(number) - 1 :: int(count)] if part else names
    return {name for name in chosen if delegates or name not in DELEGATED}


def main() -> int:
    """Run the suite and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("ours", "convex", "upstream"), default="ours")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--delegates", action="store_true")
    parser.add_argument("--part", default="", metavar="K/N")
    arguments = parser.parse_args()
    passed = run("upstream" if arguments.record else arguments.engine, arguments.delegates, arguments.part)
    if arguments.record:
        PASSING.write_text("\n".join(sorted(passed)) + "\n")
        print(f"{len(passed)} tests pass on ExecuTorch's engine")
        return 0
    expected = expected_of(arguments.delegates, arguments.part)
    if arguments.delegates:
        for name in sorted(DELEGATED & expected):
            print(f"  {'passes' if name in passed else 'fails'} with a Python delegate: {name}")
    missing = sorted(expected - passed)
    passing = len(expected) - len(missing)
    print(f"engine {arguments.engine}: {passing} of {len(expected)} tests that pass on ExecuTorch's")
    for name in missing:
        print(f"  does not pass: {name}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
