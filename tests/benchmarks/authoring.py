"""From nothing to the first right result of a backend of one's own: `python tests/benchmarks/authoring.py [--json]`.

It does what `exir-lower new-backend` prints, in an empty folder, then adds an operator, and counts commands, lines that
were written, lines that an author wrote, and seconds. Blank lines, comments and docstrings do not count.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tokenize
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent

TABLE = '        "aten.sigmoid.default": "SIGMOID",\n'
PYTHON = '    "SIGMOID": torch.sigmoid,\n'
CPP = """\
    {"SIGMOID", {1, 1, 1, [](const Arguments& v, const std::vector<Argument>&) {
       Value made = *v[0];
       for (float& one : made.data) {
         one = 1.f / (1.f + std::exp(-one));
       }
       return made;
     }}},
"""
"""What an author writes to add an operator."""

PLACES = (
    ("src/my_npu/backend.py", '        "aten.relu.default"', TABLE),
    ("src/my_npu/delegate.py", '    "RELU"', PYTHON),
    ("cpp/my_npu.cpp", '    {"RELU"', CPP),
    ("cpp/my_npu.cpp", "#include <functional>", "#include <cmath>\n"),
)

CHECK = """\
import ctypes, sys, torch, exir_lowering
for library in sys.argv[1:]:
    ctypes.CDLL(library)
x = torch.randn(3, 8)
program = torch.export.export(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Sigmoid()).eval(), (x,))
lowered = exir_lowering.lower(program, "my_npu")
assert not lowered.report.methods[0].host
(got,) = exir_lowering.load(lowered.emit().buffer).run("forward", x)
torch.testing.assert_close(got, program.module()(x))
"""

ELSEWHERE = {
    "ExecuTorch's demo of its page": {"python": None, "cpp": 168, "commit": "cff6f4dd"},
    "TVM's example NPU": {"python": 297, "cpp": 456, "commit": "5d4dc872"},
}
"""Lines of what others' pages show, counted as here, at these commits; None is counted in the installed wheel."""


def python_lines(text: str) -> int:
    """Return how many lines of Python have code."""
    kept: set[int] = set()
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            kept.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            kept.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(kept)


def cpp_lines(text: str) -> int:
    """Return how many lines of C++ have code."""
    bare = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    return len([line for line in bare.splitlines() if line.strip()])


def of_executorch() -> int:
    """Return the lines of Python of ExecuTorch's demo: its preprocess, and its partitioner of add and mm."""
    found = importlib.util.find_spec("executorch.exir.backend.test")
    folder = Path(*(found.submodule_search_locations or ())) if found is not None else Path()
    partitioners = (folder / "op_partitioner_demo.py").read_text()
    wanted = {"AddOperatorSupport", "MatmulOperatorSupport", "AddMulPartitionerDemo"}
    parts = [
        ast.get_source_segment(partitioners, node) or ""
        for node in ast.parse(partitioners).body
        if isinstance(node, (ast.Import, ast.ImportFrom)) or getattr(node, "name", "") in wanted
    ]
    whole = (folder / "backend_with_compiler_demo.py").read_text()
    return python_lines(whole) + sum(map(python_lines, parts))


def measure(cpp: bool) -> dict[str, Any]:
    """Write a package, run it, add an operator, run that; with the run time in C++ if asked for."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        path = os.pathsep.join([str(folder / "site"), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": path}
        commands: list[str] = []

        def run(shown: str, *words: object) -> None:
            commands.append(shown)
            done = subprocess.run([*map(str, words)], cwd=folder, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{shown}: {done.stdout}{done.stderr}")

        def install() -> None:  # in place, but for a target of its own, which an editable installation cannot have
            quiet = ["-q", "--no-deps", "--no-build-isolation", "--no-index", "--upgrade", "--target", "site"]
            run("pip install -e my_npu", sys.executable, "-m", "pip", "install", *quiet, "./my_npu")

        start = time.monotonic()
        option = ["--cpp"] if cpp else []
        words = [sys.executable, "-m", "exir_lowering", "new-backend", "my_npu", *option]
        run(" ".join(["exir-lower new-backend my_npu", *option]), *words)
        install()
        run("python my_npu/demo.py", sys.executable, "my_npu/demo.py")
        first = len(commands), time.monotonic() - start
        if cpp:
            found = importlib.util.find_spec("executorch")
            (package,) = (found.submodule_search_locations or ()) if found is not None else ()
            where = f"-DCMAKE_PREFIX_PATH={package}"
            run(
                "cmake -S my_npu/cpp -B build -DCMAKE_PREFIX_PATH=...",
                "cmake",
                "-S",
                "my_npu/cpp",
                "-B",
                "build",
                where,
            )
            run("cmake --build build", "cmake", "--build", "build")
            run("build/run demo.pte", "build/run", "demo.pte")
            first = len(commands), time.monotonic() - start
        files = [path for path in (folder / "my_npu").rglob("*") if path.is_file() and "tests" not in path.parts]
        written = {
            "python": sum(python_lines(one.read_text()) for one in files if one.suffix == ".py" and "src" in one.parts),
            "cpp": sum(cpp_lines(one.read_text()) for one in files if one.suffix in (".cpp", ".h")),
        }
        added = 0
        for name, before, text in PLACES:
            if cpp or not name.startswith("cpp"):
                source = folder / "my_npu" / name
                whole = source.read_text()
                assert whole.count(before) == 1, (name, before)
                source.write_text(whole.replace(before, text + before))
                added += cpp_lines(text)
        install()
        if cpp:
            run("cmake --build build", "cmake", "--build", "build")
        (folder / "check.py").write_text(CHECK)
        libraries = [*map(str, (folder / "build").glob("libmy_npu.*"))]
        run("python check.py", sys.executable, "check.py", *libraries)
        return {
            "commands": first[0], "seconds": round(first[1], 1), "written": written, "author": 0,
            "one operator more": added, "ran": commands,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    ours = {"Python": measure(cpp=False), "Python and C++": measure(cpp=True)}
    others = {name: {**lines} for name, lines in ELSEWHERE.items()}
    others["ExecuTorch's demo of its page"]["python"] = of_executorch()
    if as_json:
        print(json.dumps({"ours": ours, "others": others}, indent=2))
        return
    for name, found in ours.items():
        print(
            f"{name}: {found['commands']} commands, {found['seconds']} s to the first right result; the author wrote "
            f"{found['author']} lines, the command {found['written']}; one operator more: {found['one operator more']}"
        )
    for name, lines in others.items():
        print(f"{name}: {lines}")


if __name__ == "__main__":
    main()
