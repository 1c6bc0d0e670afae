"""Processes of our own: kept for later calls, ended with this process."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from exir_lowering.plugins.processes.messages import Message, read_message, send_message

MOST_IDLE = 8
"""How many idle workers are kept; each takes about 50 MB of its own."""

# Nothing is imported before the path is that of this process: Python puts the current folder first.
_START = """
import sys
sys.path[:] = sys.argv[3:]
from exir_lowering.plugins.processes.server import main
main(int(sys.argv[1]), sys.argv[2])
"""

_FLAGS = {
    "isolated": "-I",
    "ignore_environment": "-E",
    "no_user_site": "-s",
    "no_site": "-S",
    "dont_write_bytecode": "-B",
}
"""Options of Python that workers get if this process has them, by the name in `sys.flags`."""


class WorkerDiedError(Exception):
    """The process that worked for this one ended; the message says how."""


class Worker:
    """A process that works for this one, on one thing at a time."""

    def __init__(self, server: _Server, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._server, self._connection = server, connection
        self._lock = threading.RLock()
        self._ended = False

    def call(self, message: Message, seconds: float | None = None) -> Message:
        """Return the reply to a task; WorkerDiedError if the process ended, TooLateError if it is still at work."""
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            send_message(self._connection, message, deadline)
            return read_message(self._connection, deadline)
        except (OSError, EOFError) as error:
            self.kill()  # if it is there still, nobody waits for it
            raise WorkerDiedError(f"the worker process {self.pid} {_describe(self.end())}") from error

    @property
    def is_alive(self) -> bool:
        """Whether a worker that has nothing to do is still there: it sends nothing, so only its end can be read."""
        return not self._poll(select.POLLIN)

    def _poll(self, events: int) -> list[tuple[int, int]]:
        waiting = select.poll()  # select.select refuses a descriptor from 1,024 on
        waiting.register(self._connection, events)
        return waiting.poll(0)

    def kill(self) -> None:
        """End the process now; a thread that waits for its reply gets an error."""
        with self._lock:
            if self._ended:  # then the number may be that of another process
                return
            gone = bool(self._poll(0))  # the process has ended by itself
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            if not gone:
                os.kill(self.pid, signal.SIGKILL)

    def end(self) -> int | None:
        """Let the process end, and return its status; None if that is not known."""
        with self._lock:
            self.disown()
        return self._server.wait(self.pid)

    def abandon(self) -> None:
        """End the process now, and wait for nothing; for finalizers, which may run inside any call."""
        if not self._ended:
            self.kill()
            self.disown()
            self._server.abandoned.append(self.pid)

    def disown(self) -> None:
        """Leave the process to the one that this one was forked from: it ends when that one ends."""
        self._ended = True
        self._connection.close()


def _describe(status: int | None) -> str:
    if status is None:
        return "ended"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"


class _Server:
    """The process that workers are forked from."""

    def __init__(self, work: str) -> None:
        self._control, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self.abandoned: deque[int] = deque()  # workers that ended, and that nobody waits for
        flags = ["-O"] * sys.flags.optimize + [f"-W{option}" for option in sys.warnoptions]
        given = getattr(sys, "_xoptions", {})  # of CPython
        flags += [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in given.items()]
        flags += [option for name, option in _FLAGS.items() if getattr(sys.flags, name)]
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", _START, str(theirs.fileno()), work, *_search_path()],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the keyboard is this process's affair
        )
        theirs.close()

    def fork(self, modules: Sequence[str]) -> Worker:
        ours, theirs = socket.socketpair()
        gone = [self.abandoned.popleft() for _ in range(len(self.abandoned))]
        request = {"modules": list(modules), "path": _search_path(), "folder": current_folder(), "gone": gone}
        try:
            return Worker(self, self._ask(request, [theirs.fileno()]), ours)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def wait(self, pid: int) -> int | None:
        try:
            return self._ask({"wait": pid}, [])
        except OSError:
            return None

    def _ask(self, request: Any, files: list[int]) -> int:
        with self._lock:
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], files)
                answer = b""
                while not answer.endswith(b"\n"):
                    received = self._control.recv(64)
                    if not received:
                        raise ConnectionError("the process that workers are forked from has ended")
                    answer += received
            except BaseException:
                self._control.close()  # an answer that was not read would be taken for that to the next request
                raise
        return int(answer)

    def close(self) -> None:
        self._control.close()
        self._process.wait()


class Workers:
    """The workers of this process for work of one kind; threads may share them."""

    def __init__(self, work: str) -> None:
        """Take the module whose function `work` takes a message and returns the reply; it is imported once."""
        self._work = work
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._idle: list[Worker] = []
        self._all: weakref.WeakSet[Worker] = weakref.WeakSet()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)

    def take(self, modules: Sequence[str]) -> Worker:
        """Return an idle worker, or a new one with some modules imported; OSError if no process can be started."""
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    return worker
                worker.end()
        return self.start(modules)

    def start(self, modules: Sequence[str] = ()) -> Worker:
        """Return a new worker with some modules imported; OSError if no process can be started."""
        server = self._find_server()
        try:
            worker = server.fork(modules)
        except OSError:
            with self._lock:
                if self._server is server:
                    self._server = None  # it may have been killed; the next one is not
            worker = self._find_server().fork(modules)
        self._all.add(worker)
        return worker

    def _find_server(self) -> _Server:
        with self._lock:
            if self._server is None:
                self._server = _Server(self._work)
            return self._server

    def give(self, worker: Worker) -> None:
        """Take back a worker that has nothing to do."""
        with self._lock:
            if len(self._idle) < MOST_IDLE:
                self._idle.append(worker)
                return
        worker.end()

    def close(self) -> None:
        """End all idle workers, and the process that they were forked from."""
        with self._lock:
            idle, server = self._idle, self._server
            self._idle, self._server = [], None
        for worker in idle:
            worker.end()
        if server is not None:
            server.close()

    def forget(self) -> None:
        """Leave the workers to the process that this one was forked from."""
        self._lock, self._server, self._idle = threading.Lock(), None, []
        for worker in list(self._all):
            worker.disown()
        self._all.clear()


def _search_path() -> list[str]:
    here = current_folder()
    return [os.path.normpath(os.path.join(here, entry)) for entry in sys.path if here or os.path.isabs(entry)]


def current_folder() -> str:
    """Return the folder that relative paths begin at, "" if it is gone."""
    try:
        return os.getcwd()
    except OSError:
        return ""


SUPPORTED = hasattr(os, "fork") and hasattr(socket, "send_fds")
"""Whether this system can fork workers."""
