"""The process in which a program with limits runs: it opens one file, and runs its methods.

It serves a process that it trusts: it imports the delegates that this process names. The file is data.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import resource
import select
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from exir_lowering._upstream import installed
from exir_lowering.errors import InputError, LimitError, LoweringError, exception_text
from exir_lowering.plugins.addresses import load_class
from exir_lowering.plugins.worker_errors import describe_error
from exir_lowering.runtime.engine import Engine, open_engine
from exir_lowering.runtime.inputs import prepare
from exir_lowering.runtime.isolated import transfer
from exir_lowering.runtime.isolated.process import Message, read_message, send_message
from exir_lowering.runtime.source import read_file

_engine: Engine | None = None  # the file that this process has open
_memory: int | None = None


def main(file: str, modules: str) -> None:
    """Do what comes over a socket, one after the other; end when the other end is gone, also in the middle of work."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGIO])
    connection = socket.socket(fileno=int(file))
    installed.runtime_failure()  # imports the runtime
    importlib.import_module("sympy")  # torch does that when it computes shapes: it is no part of opening a file
    with suppress(ImportError):  # opening the file will say so
        for name in filter(None, modules.split(",")):
            importlib.import_module(name)
    try:
        send_message(connection, ({}, ()))
        while True:
            task = read_message(connection)
            if task[0]["do"] == "fork":
                connection = _fork(connection)
                continue
            _end_with(connection, True)
            try:
                reply = _work(task)
            except OSError as error:  # not of the connection
                raise RuntimeError(f"the work failed: {error}") from error
            _end_with(connection, False)
            send_message(connection, reply)
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def _fork(connection: socket.socket) -> socket.socket:
    """Make a copy of this process, which has not worked yet; return the socket over which each of the two goes on."""
    _, (file,), _, _ = socket.recv_fds(connection, 1, 1)
    pid = os.fork()
    if pid:
        os.close(file)
        send_message(connection, ({"pid": pid}, ()))
        return connection
    connection.close()
    connection = socket.socket(fileno=file)
    send_message(connection, ({}, ()))
    return connection


def _wait(header: Any, contents: Sequence[bytes]) -> Message:
    """Wait for the end of a copy."""
    return {"status": os.waitstatus_to_exitcode(os.waitpid(header["pid"], 0)[1])}, ()


def _end_with(connection: socket.socket, ends: bool) -> None:
    """Let the system end this process when the other end is gone, or no longer."""
    # A thread that waits for it would not get to run while native code keeps Python's lock. The other end sends nothing
    # while it waits for a reply: whatever happens on the socket then, SIGIO, is its end.
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC if ends else flags & ~os.O_ASYNC)
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    if ends and waiting.poll(0):
        os._exit(0)


def _work(message: Message) -> Message:
    """Do what a message says; return what came of it, with the warnings."""
    header, given = message
    contents: Sequence[Any] = ()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            reply, contents = _TASKS[header["do"]](header, given)
        except (LoweringError, MemoryError) as error:
            reply = describe_error(_over_memory(header["where"], error) or error, error)
    warned = [(one.category.__name__, str(one.message)) for one in caught]
    return {"kind": "done", **reply, "warnings": warned}, contents


def _open(header: Any, contents: Sequence[bytes]) -> Message:
    """Open the file; what sent this has checked its digests."""
    global _engine
    _engine = None  # of a file that is opened again, the memory is free for it
    with suppress(OSError):  # it may be gone, and is needed for relative paths only
        os.chdir(header["folder"])
    torch.set_num_threads(header["threads"])
    try:
        for library in header["operators"]:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise InputError(f"{header['where']}: the library of operators {library!r} is gone: {error}") from error
    installed.load_libraries("load", header["libraries"])
    delegates = {backend: load_class(address) for backend, address in header["delegates"].items()}
    _bound(header["memory"])
    rest = iter(contents)
    source, *data = (next(rest) if path is None else path for path in header["sources"])
    file = read_file(source, data or None, False)
    _engine = open_engine(file, delegates, header["unavailable"])
    return {"missing": {backend: astuple(one) for backend, one in _engine.missing.items()}}, ()


def _run(header: Any, contents: Sequence[bytes]) -> Message:
    """Run a method, or record runs of it; what sent this has checked the inputs."""
    if _engine is None:
        raise InputError("run: no file is open in this process.")
    method = _engine.file.methods[header["method"]]
    inputs = prepare(_engine.file.where(method.name), method, transfer.read(header["values"], contents))
    with _engine.lock:
        if header["do"] == "record":
            events = _engine.record(method, inputs, header["runs"])
            return {"events": [astuple(event) for event in events]}, ()
        outputs = _engine.run(method, inputs)
    described, made = transfer.write(outputs)
    return {"values": described}, made


_TASKS = {"open": _open, "run": _run, "record": _run, "wait": _wait}


def _bound(memory: int | None) -> None:
    """Bound by how much the memory of this process may grow from now on: what it can write to, and shares with none."""
    global _memory
    if memory is None or _memory is not None:  # what bounds a file that is opened again
        return
    _memory = memory
    found = re.search(r"^VmData:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise InputError(f"limits: memory={memory}: this system does not report how much memory a process uses.")
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = int(found[1]) * 1024 + memory
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


_NO_MEMORY = ("can't allocate memory", "std::bad_alloc", "cannot allocate memory", "0x21")
"""What torch, C++, the system and ExecuTorch's runtime (as an error of its own) say when there is no memory left."""


def _over_memory(where: str, error: BaseException) -> LoweringError | None:
    """Return the error that says that the memory was not enough, or may not have been; None when it was."""
    if _memory is None:
        return None
    limit = f"the {_memory:,} bytes of limits.memory"
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if any(isinstance(one, MemoryError) or any(text in str(one).lower() for text in _NO_MEMORY) for one in causes):
        return LimitError(
            f"{where} was ended: it takes more memory than {limit} ({exception_text(error)}). What its methods "
            "had written into their buffers is lost: the next run begins in a new process. Raise the limit if it needs "
            "more.",
            limit="memory",
        )
    if type(error) is InputError and error.__cause__ is not None:  # from an engine, which may not say why it failed
        return InputError(f"{error} An allocation beyond {limit} may have failed.")
    return None
