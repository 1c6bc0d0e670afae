"""The process that our own workers are forked from: it has imported what they need, has one thread, and runs nothing.

A fresh interpreter takes seconds to import torch and ExecuTorch, a forked one has them. The server and its workers end
when the process that started them closes its sockets, or ends in whatever way.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from exir_lowering.errors import let_through
from exir_lowering.plugins.processes.messages import Message, read_message, send_message

_MOST = 1 << 20


def main(file: int, module: str) -> None:
    """Fork workers, which call `work` of a module, and tell how they ended, as the socket of a descriptor requests."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGIO])
    control = socket.socket(fileno=file)
    work = importlib.import_module(module).work
    gc.freeze()
    while True:
        header, files, _, _ = socket.recv_fds(control, _MOST, 1)
        if not header:
            os._exit(0)
        request = json.loads(header)
        if "wait" in request:
            control.sendall(_wait(request["wait"]))
            continue
        _prepare(request)
        child = os.fork()
        if child == 0:
            control.close()
            _serve(socket.socket(fileno=files[0]), work)
        os.close(files[0])
        control.sendall(b"%d\n" % child)


def _prepare(request: dict[str, Any]) -> None:
    """Import what the next worker needs; what cannot be imported, the worker will say."""
    for pid in request["gone"]:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    sys.path[:] = request["path"]
    with suppress(OSError):  # it may be gone
        os.chdir(request["folder"])
    for name in request["modules"]:
        _import(name)
    gc.freeze()


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:
        let_through(error)


def _wait(pid: int) -> bytes:
    try:
        return b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return b"0\n"


def _serve(connection: socket.socket, work: Callable[[Message], Message]) -> None:
    """Do what comes, one after the other; end when the other end is gone, also in the middle of work."""
    try:
        while True:
            task = read_message(connection)
            _end_with(connection, True)
            try:
                reply = work(task)
            except OSError as error:  # not of the connection
                raise RuntimeError(f"the work failed: {error}") from error
            _end_with(connection, False)
            send_message(connection, reply)
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


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
