"""What `load` says where nothing can run a file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import runtime_children


def output(code, content, **environment):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pte"
        path.write_bytes(content)
        done = runtime_children.run(code, path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_without_a_compiler(adds, tmp_path):
    code = (
        "import sys, torch\nfrom scripted import ScriptDelegate\n"
        "from exir_lowering import BackendUnavailableError, load\n"
        "try:\n    load(sys.argv[1], delegates=[ScriptDelegate])\n"
        "except BackendUnavailableError as error:\n    print(error)\n"
    )
    said = output(code, adds, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert "need a C++ compiler once" in said
    assert "apt-get install g++" in said
    assert not (tmp_path / "cache").exists() or not [*(tmp_path / "cache").rglob("*.so")]


WITHOUT_THE_RUNTIME = """
import sys
for name in ("executorch.runtime", "executorch.extension.pybindings._C"):
    sys.modules[name] = None
from exir_lowering import BackendUnavailableError, load
try:
    load(sys.argv[1])
except BackendUnavailableError as error:
    print(error)
"""


def test_without_the_runtime(fixed):
    said = output(WITHOUT_THE_RUNTIME, fixed)
    assert "the ExecuTorch runtime cannot be imported here" in said
    assert "Install executorch again" in said
