"""The process that our own workers are forked from: it has imported what they need, has one thread, and runs nothing.

A fresh interpreter takes seconds to import torch and ExecuTorch, a forked one has them. The server and its workers end
when the process that started them closes its sockets, or ends in whatever way.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import queue
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

from exir_lowering.errors.interrupts import let_through
from exir_lowering.steps.parallel import frames

_MOST = 1 << 20


def main(file: int) -> None:
    """Serve: fork workers, and tell how they ended; requests come on the socket with this descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=file)
    importlib.import_module("exir_lowering.steps.parallel.work")
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
            _serve(socket.socket(fileno=files[0]))
        os.close(files[0])
        control.sendall(b"%d\n" % child)


def _prepare(request: dict[str, Any]) -> None:
    """Import what the next worker needs; what cannot be imported, the worker will say."""
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


def _serve(connection: socket.socket) -> None:
    """Do what comes, one after the other; end when the other end is gone, also in the middle of work."""
    from exir_lowering.steps.parallel.work import work

    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def receive() -> None:
        stream = connection.makefile("rb")
        try:
            while True:
                tasks.put(frames.read_message(stream))
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    try:
        while True:
            frames.send_message(connection, work(tasks.get()))
    except OSError:
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
