"""A fresh virtual environment that sees the dependencies, but not the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

_DEPENDENCIES = ("torch", "executorch", "jinja2", "networkx", "platformdirs", "rich", "xxhash", "pytest")


def copy_tracked(folder: Path, target: Path) -> Path:
    """Copy what git tracks, or would track, in a folder of the tree, so that nothing left over in it can help."""
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=folder, capture_output=True, text=True, check=True
    )
    for name in filter(None, files.stdout.split("\n")):
        if os.path.lexists(folder / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(folder / name, target / name, follow_symlinks=False)
    return target


def build_wheel(source: Path, target: Path) -> Path:
    """Build a wheel; with the setuptools that is here, when it is new enough, so that nothing is downloaded."""
    try:
        here = int(metadata.version("setuptools").partition(".")[0]) >= 77
    except metadata.PackageNotFoundError:
        here = False
    offline = ["--no-build-isolation", "--no-index"] if here else []
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "-q", "-w", str(target), *offline]
    subprocess.run(command, check=True, timeout=300)
    (built,) = target.glob("*.whl")
    return built


def build_sdist(source: Path, target: Path) -> Path:
    """Build an sdist with the setuptools that is here; pip has no command for it."""
    script = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", script, str(target)], cwd=source, check=True, timeout=300, stdout=subprocess.DEVNULL
    )
    (built,) = target.glob("*.tar.gz")
    return built


class FreshEnvironment:
    """A virtual environment.

    Args:
        folder: Where it is made.
        first: A wheel that is installed before the dependencies can be seen, whatever is installed beside them.
    """

    def __init__(self, folder: Path, first: Path) -> None:
        # Without pip: the setuptools that comes with it may be too old for torch, and would hide the one that is here.
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.bin = folder / "bin"
        self.python = self.bin / "python"
        shown = self.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        self.site = Path(shown.stdout.strip())
        self.install(first, "--no-deps")
        # A path in a .pth file is added without its own .pth files, so an editable install of the tree is not seen.
        self.site.joinpath("dependencies.pth").write_text("".join(f"{path}\n" for path in _places()))

    def install(self, wheel: Path, *options: str) -> None:
        """Install a wheel, and nothing that would have to be downloaded."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.python)]
        command = [*pip, "install", "-q", "--no-index", *options, str(wheel)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]

    def run(self, command: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment, outside of the tree."""
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        variables["PATH"] = f"{self.bin}{os.pathsep}{variables.get('PATH', '')}"
        return subprocess.run(
            [str(self.bin / command), *arguments],
            cwd=cwd or self.bin.parent,
            env=variables,
            capture_output=True,
            text=True,
            timeout=600,
        )


def _places() -> list[Path]:
    """Return the folders that the dependencies are imported from."""
    found = []
    for name in _DEPENDENCIES:
        spec = util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            found.append(Path(next(iter(spec.submodule_search_locations))).parent)
    return list(dict.fromkeys(found))
