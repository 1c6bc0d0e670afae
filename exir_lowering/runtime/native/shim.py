"""Compile the shim that lets Python implement backends of the runtime, and keep it for the next process.

The executorch wheel has the runtime as a library, with its headers. What is compiled needs no Python headers and is
the same for all versions of Python.

A file of the cache is the library, a mark, and the digest of the library: one file, so that it is there as a whole or
not at all. It is used when the folder and the file are this user's, nobody else may write to them, neither is a
symbolic link, and the digest is right. What was read and compared is what is loaded: from memory where the system has
files in memory (Linux), else from a copy in a folder that only this user can open. So a file that is cut off or
replaced meanwhile cannot end the process. Whoever may write as this user can of course replace anything.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from exir_lowering._upstream.runtime import executorch_runtime
from exir_lowering.errors import BackendUnavailableError, let_through
from exir_lowering.pte.saving import TemporaryFolder
from exir_lowering.runtime.native import abi

_MARK = b"\0exir-lowering sha256\0"
_TRAILER = len(_MARK) + hashlib.sha256().digest_size
_LARGEST = 64 << 20
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_warned: set[str] = set()


def read_library(folder: Path, name: str) -> bytes | None:
    """Return a library from the cache's folder; None when it has none of that name that can be trusted."""
    try:
        with _open_folder(folder) as directory:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=directory)
            try:
                content = _content(file)
            finally:
                os.close(file)
    except (OSError, _Untrusted):
        return None  # `write_library` replaces it, or says why nothing is kept here
    library, trailer = content[:-_TRAILER], content[-_TRAILER:]
    return library if trailer == _MARK + hashlib.sha256(library).digest() else None  # made again


def write_library(folder: Path, name: str, library: bytes) -> None:
    """Keep a library, where that is possible; the folder is made, and a file of that name is replaced."""
    try:
        _check_absolute(folder)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _open_folder(folder) as directory:
            _write(directory, name, library + _MARK + hashlib.sha256(library).digest())
    except (OSError, _Untrusted) as error:
        _warn(folder, error)


def load_library(library: bytes, symbols: Iterable[str]) -> ctypes.CDLL:
    """Load a library from its bytes; raise an OSError when it cannot be loaded, or lacks one of these functions."""
    loaded = _from_memory(library)
    if loaded is None:
        with TemporaryFolder() as folder:
            path = folder / "shim.so"
            path.write_bytes(library)
            loaded = ctypes.CDLL(str(path))
    missing = [symbol for symbol in symbols if not hasattr(loaded, symbol)]
    if missing:
        raise OSError(f"it has no function {', '.join(missing)}")
    return loaded


class _Untrusted(Exception):
    """Somebody else may write to a file or folder."""


@contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    """Open the folder, so that it stays the one that was checked."""
    _check_absolute(folder)
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check(os.fstat(directory), "it")
        yield directory
    finally:
        os.close(directory)


def _check_absolute(folder: Path) -> None:
    if not folder.is_absolute():
        raise _Untrusted("its path is relative, so it would be another folder each time. Set HOME to an absolute one")


def _check(found: os.stat_result, what: str) -> None:
    if found.st_uid != os.geteuid():
        raise _Untrusted(f"{what} belongs to user {found.st_uid}, expected this user, {os.geteuid()}")
    if found.st_mode & _OTHERS_WRITE:
        raise _Untrusted(f"others may write to {what} (mode {stat.S_IMODE(found.st_mode):o}); chmod go-w")


def _content(file: int) -> bytes:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
        raise _Untrusted("the file is not a library")
    _check(found, "the library in it")
    with open(file, "rb", closefd=False) as opened:
        return opened.read(_LARGEST)


def _write(directory: int, name: str, content: bytes) -> None:
    """Write a temporary file, and rename it once it is on the disk: at any moment there is all or nothing."""
    temporary = f".{name}.{os.getpid()}.{os.urandom(4).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        with open(file, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        os.fsync(directory)
    finally:
        with suppress(OSError):  # usually it was already moved
            os.unlink(temporary, dir_fd=directory)


def _from_memory(library: bytes) -> ctypes.CDLL | None:
    """Load a library from a file in memory, None where the system has none or executes nothing there."""
    create = getattr(os, "memfd_create", None)
    if create is None:
        return None
    try:
        file: int = create("exir-lowering-shim")
    except OSError:
        return None
    try:
        with open(file, "wb", closefd=False) as opened:
            opened.write(library)
        # Left open: the loader knows libraries by their paths, so that no other file may get this number.
        return ctypes.CDLL(f"/proc/self/fd/{file}")
    except OSError:
        os.close(file)
        return None


def _warn(folder: Path, reason: Exception) -> None:
    """Say once why the cache is not used."""
    text = (
        f"Compiled code for Python delegates is not kept in {folder}: {reason}. It is compiled again in each process."
    )
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=5)


SOURCE = Path(__file__).with_name("shim.cpp")
COMPILERS = ("c++", "g++", "clang++")
KNOWN = ("1.5",)
"""The versions of executorch whose headers the source is written for."""
SECONDS = 300
# The two definitions are those that the wheel's runtime was built with: they change the layout of its classes.
FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-DC10_USING_CUSTOM_GENERATED_MACROS",
    "-DET_EVENT_TRACER_ENABLED",
)


def library() -> ctypes.CDLL:
    """Return the shim, compiled if it is not in the cache; a BackendUnavailableError says why that is not possible."""
    release = version("executorch")
    package = _package(release)
    # The runtime's library is found by its name, as it is loaded already.
    executorch_runtime()
    source = _source()
    key = hashlib.sha256("\0".join((*FLAGS, sys.platform, source)).encode()).hexdigest()[:16]
    name = f"shim-{release}-{platform.machine()}-{key}.so"
    cached = read_library(folder(), name)
    if cached is not None:
        try:
            return load_library(cached, abi.FUNCTIONS)
        except OSError:
            pass  # left by another system, such as one with an older C library: made again
    built = _build(package)
    loaded = _load(built)
    write_library(folder(), name, built)
    return loaded


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


def _source() -> str:
    try:
        return SOURCE.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        let_through(error)
        raise BackendUnavailableError(
            f"Python delegates cannot be used: {SOURCE} cannot be read: {error}. Install exir-lowering again."
        ) from error


def folder() -> Path:
    """Return the folder where compiled shims are kept; whether it is usable shows when it is used."""
    import platformdirs  # only where a delegate is used

    return platformdirs.user_cache_path("exir-lowering", appauthor=False)


def compiler() -> list[str]:
    """Return the command of the C++ compiler."""
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        try:
            command = shlex.split(chosen)
        except ValueError as error:
            raise BackendUnavailableError(
                f"Python delegates need a C++ compiler, and the environment variable CXX, {chosen!r}, is not a "
                f"command: {error}. Correct it, or unset it."
            ) from error
        if shutil.which(command[0]) is None:
            raise BackendUnavailableError(
                f"Python delegates need a C++ compiler, and the environment variable CXX names {chosen!r}, which "
                "does not exist. Correct it, or unset it."
            )
        return command
    for name in COMPILERS:
        if shutil.which(name) is not None:
            return [name]
    raise BackendUnavailableError(
        f"Python delegates need a C++ compiler once, and none of {', '.join(COMPILERS)} is on the PATH. Install one "
        "(Debian and Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install; "
        "conda: conda install cxx-compiler), or name one with the environment variable CXX."
    )


def _build(package: Path) -> bytes:
    """Compile in a folder that only this user can open, so that nobody changes what is made before it is read."""
    command = compiler()
    include = package / "include"
    includes = (f"-I{include}", f"-I{include / 'executorch/runtime/core/portable_type/c10'}")
    libraries = (f"-L{package / 'lib'}", "-lexecutorch")
    try:
        with TemporaryFolder() as folder:
            target = folder / "shim.so"
            _compile([*command, *FLAGS, *includes, str(SOURCE), *libraries, "-o", str(target)])
            return target.read_bytes()
    except OSError as error:
        raise BackendUnavailableError(
            f"Python delegates cannot be used: the library that they need cannot be compiled: {error}. Free space in "
            "the temporary folder, or choose another one with the environment variable TMPDIR."
        ) from error


def _compile(command: list[str]) -> None:
    shown = shlex.join(command)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise BackendUnavailableError(
            f"Python delegates cannot be used: the C++ compiler did not finish within {SECONDS} seconds: {shown}"
        ) from error
    except OSError as error:
        let_through(error)
        raise BackendUnavailableError(
            f"Python delegates cannot be used: the C++ compiler cannot be started: {error}. The command was: {shown}"
        ) from error
    if done.returncode != 0:
        output = f"{done.stdout}{done.stderr}".strip() or "nothing"
        raise BackendUnavailableError(
            f"Python delegates cannot be used: the C++ compiler failed with exit code {done.returncode}. The command "
            f"was: {shown}\nIt said:\n{output}\nA compiler for C++17 is needed; the environment variable CXX chooses "
            "one."
        )


def _load(library: bytes) -> ctypes.CDLL:
    try:
        return load_library(library, abi.FUNCTIONS)
    except OSError as error:
        let_through(error)
        raise BackendUnavailableError(
            f"Python delegates cannot be used: the compiled library cannot be loaded: {error}. Does CXX compile "
            f"for this machine ({platform.machine()})?"
        ) from error
