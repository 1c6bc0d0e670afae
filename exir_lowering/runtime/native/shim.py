"""Compile the shim that lets Python implement backends of the runtime, and keep it for the next process.

The executorch wheel has the runtime as a library, with its headers. What is compiled needs no Python headers and is
the same for all versions of Python.

The library is written beside its place in the cache and moved there, so that it is there as a whole or not at all. The
cache folder is this user's, and trusted as much as the user's programs.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import warnings
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from exir_lowering._upstream.runtime import executorch_runtime
from exir_lowering.errors import BackendUnavailableError
from exir_lowering.pte.saving import TemporaryFolder, copy_of, replace_file

SOURCE = Path(__file__).with_name("shim.cpp")
COMPILERS = ("c++", "g++", "clang++")
KNOWN = ("1.5",)
"""The versions of executorch whose headers the source is written for."""
SECONDS = 300
# The two definitions are those that the wheel's runtime was built with: they change the layout of its classes.
FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-DC10_USING_CUSTOM_GENERATED_MACROS", "-DET_EVENT_TRACER_ENABLED"),
)


def library() -> ctypes.CDLL:
    """Return the shim, compiled if it is not in the cache; a BackendUnavailableError says why that is not possible."""
    release = version("executorch")
    package = _package(release)
    # The runtime's library is found by its name, as it is loaded already.
    executorch_runtime()
    key = hashlib.sha256("\0".join((*FLAGS, sys.platform, SOURCE.read_text())).encode()).hexdigest()[:16]
    kept = folder() / f"shim-{release}-{platform.machine()}-{key}.so"
    with suppress(OSError):  # there is none; or it is damaged, or of another system, such as with an older C library
        return ctypes.CDLL(str(kept))
    try:
        # Nobody else can open the folder, and change what is made before it is read.
        with TemporaryFolder() as temporary:
            made = temporary / kept.name
            _compile(package, made)
            try:
                kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                replace_file(kept, copy_of(made))
            except OSError as error:
                warnings.warn(
                    f"Compiled code for Python delegates is not kept in {kept.parent}: {error}. It is compiled "
                    "again in each process.",
                    RuntimeWarning,
                    stacklevel=3,
                )
            return ctypes.CDLL(str(made))
    except OSError as error:
        raise BackendUnavailableError(
            f"Python delegates cannot be used: the compiled library cannot be loaded: {error}. Does CXX compile for "
            f"this machine ({platform.machine()})? Is there space in the temporary folder (TMPDIR)?"
        ) from error


def _package(release: str) -> Path:
    """Return the folder of the executorch package, which has the runtime's library and headers."""
    if not any(release == known or release.startswith(f"{known}.") for known in KNOWN):
        raise BackendUnavailableError(
            f"Python delegates do not work with executorch {release}: they are made for executorch "
            f"{' and '.join(f'{known}.x' for known in KNOWN)}. Install one of these, or a newer exir-lowering."
        )
    spec = importlib.util.find_spec("executorch")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in map(Path, folders or ()):
        if (folder / "include").is_dir() and any((folder / "lib").glob("libexecutorch.*")):
            return folder
    raise BackendUnavailableError(
        f"Python delegates need the runtime's library and headers, and the executorch {release} that is installed here "
        f"has no lib/libexecutorch.so or no include folder (in {', '.join(folders or ()) or 'no folder'}). Install "
        "executorch from its wheel for Linux or macOS; its Windows wheel comes without them."
    )


def folder() -> Path:
    """Return the folder where compiled shims are kept; whether it is usable shows when it is used."""
    import platformdirs  # only where a delegate is used

    return platformdirs.user_cache_path("exir-lowering", appauthor=False)


def compiler() -> list[str]:
    """Return the command of the C++ compiler."""
    chosen = os.environ.get("CXX", "").strip()
    if chosen and shutil.which(chosen.split()[0]) is None:
        raise BackendUnavailableError(
            f"Python delegates need a C++ compiler, and the environment variable CXX names {chosen!r}, which does not "
            "exist. Correct it, or unset it."
        )
    found = chosen or next(filter(shutil.which, COMPILERS), "")
    if not found:
        raise BackendUnavailableError(
            f"Python delegates need a C++ compiler once, and none of {', '.join(COMPILERS)} is on the PATH. Install "
            "one (Debian and Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install; "
            "conda: conda install cxx-compiler), or name one with the environment variable CXX."
        )
    return found.split()


def _compile(package: Path, target: Path) -> None:
    include = package / "include"
    includes = (f"-I{include}", f"-I{include / 'executorch/runtime/core/portable_type/c10'}")
    libraries = (f"-L{package / 'lib'}", "-lexecutorch")
    command = [*compiler(), *FLAGS, *includes, str(SOURCE), *libraries, "-o", str(target)]
    shown = shlex.join(command)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, stdin=subprocess.DEVNULL
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        raise BackendUnavailableError(
            f"Python delegates cannot be used: the C++ compiler cannot be started, or did not finish within {SECONDS} "
            f"seconds: {error}. The command was: {shown}"
        ) from error
    if done.returncode != 0:
        output = f"{done.stdout}{done.stderr}".strip() or "nothing"
        raise BackendUnavailableError(
            f"Python delegates cannot be used: the C++ compiler failed with exit code {done.returncode}. The command "
            f"was: {shown}\nIt said:\n{output}\nA compiler for C++17 is needed; the environment variable CXX chooses "
            "one."
        )
