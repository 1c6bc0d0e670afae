"""`exir-lower new-backend`: a package with a backend that works, to be changed: the example tinyvec by another name."""

from __future__ import annotations

import argparse
import keyword
import re
import tempfile
from importlib.util import find_spec
from pathlib import Path

from exir_lowering.cli.output import OK, say
from exir_lowering.errors import InputError

EXAMPLES = "example:\n  exir-lower new-backend my_npu --cpp\n"

_PLACES = Path(__file__).with_name("template"), Path(__file__).parents[2] / "docs" / "examples" / "tinyvec"
"""Where the example is: in the wheel, and in a clone."""
_FILES = "README.md pyproject.toml demo.py src/tinyvec/__init__.py src/tinyvec/backend.py src/tinyvec/delegate.py"
_CPP = "cpp/CMakeLists.txt cpp/instructions.h cpp/tinyvec.cpp cpp/run.cpp tests/test_cpp.py"
_RESERVED = ("all", "clean", "cpp", "demo", "help", "install", "package", "run", "src", "test", "tests")  # by the build


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("backend", metavar="NAME", help="the name of the folder, the package, and the backend's id")
    parser.add_argument("--cpp", action="store_true", help="add the run time in C++, for devices")


def execute(arguments: argparse.Namespace) -> int:
    """Write the package; InputError if its name cannot be one or is taken, or if it cannot be written."""
    name, cpp = arguments.backend, arguments.cpp
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or name in _RESERVED:
        raise InputError(f"Got the name {name!r}, expected one of a Python package in lower case, such as 'my_npu'.")
    from exir_lowering.plugins import registry  # which imports PyTorch

    users = [f"the plug-in of {one.provider}" for one in registry.list_installed(check=False) if one.id == name]
    users += ["what this folder has, which stays as it is"] if Path(name).exists() else []
    users += ["a Python module, which would be hidden"] if find_spec(name) is not None else []
    if users:
        raise InputError(f"The name {name!r} is taken, by {users[0]}. Choose another one.")
    words = {"tinyvec": name, "Tinyvec": name.title().replace("_", ""), "TINYVEC": name.upper()[:8]}
    template = next(filter(Path.is_dir, _PLACES))
    try:
        with tempfile.TemporaryDirectory(prefix=".new-backend-", dir=".") as folder:
            for file in f"{_FILES} tests/test_tinyvec.py {_CPP if cpp else ''}".split():
                lines = (template / file).read_text(encoding="utf-8").splitlines(keepends=True)
                texts = [file, "".join(line for line in lines if cpp or "cpp" not in line)]
                for word, other in words.items():
                    texts = [text.replace(word, other) for text in texts]
                path = Path(folder, name, texts[0])
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(texts[1], encoding="utf-8")
            Path(folder, name).rename(name)
    except OSError as error:
        raise InputError(f"Cannot write {name!r}: {error.strerror or error}. Nothing was changed.") from error
    say(f"Wrote {name}: six operators, and a README.md that says what to change. Next:")
    say(f"  pip install -e '{name}[test]'\n  python {name}/demo.py\n  pytest {name}")
    return OK
