"""A process of our own that runs one file, and what travels: JSON and bytes, which are read, never executed."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from exir_lowering.plugins.worker_errors import WorkerDiedError

Message: TypeAlias = tuple[dict[str, Any], Sequence[Any]]
"""A header of what JSON has, and its parts: bytes, or on their way out something else with a buffer of bytes."""

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 20

# With -P nothing is imported from the current folder, whatever lies there.
_START = "import sys; sys.path[:] = sys.argv[3:]; from exir_lowering.runtime.child import main; main(*sys.argv[1:3])"
_FLAGS = {
    **{"isolated": "-I", "ignore_environment": "-E", "no_user_site": "-s", "no_site": "-S"},
    "dont_write_bytecode": "-B",
}
"""Options of Python that the process gets if this one has them, by the name in `sys.flags`."""


class TooLateError(Exception):
    """A message was not there in time."""


class Process:
    """A process that works for this one, on one thing at a time."""

    def __init__(self, modules: Sequence[str] = (), forked_from: Process | None = None) -> None:
        """Start it with some modules imported, or as a copy of another one, and wait until it is ready.

        A copy takes milliseconds, where a start takes seconds. What it is a copy of must not have worked yet, and has
        to be there for as long as its copies. OSError if there can be none.
        """
        self._owner = os.getpid()
        self._connection, theirs = socket.socketpair()
        try:
            with theirs:
                start = self._popen if forked_from is None else forked_from.fork
                self._process: subprocess.Popen[bytes] | _Copy = start(theirs, modules)
            self.pid = self._process.pid
        except BaseException:
            self._connection.close()
            raise
        try:
            read_message(self._connection)
        except BaseException as error:
            self.abandon()
            if isinstance(error, (OSError, EOFError)):
                raise OSError(f"it {self._status()} before it was ready") from error
            raise

    @staticmethod
    def _popen(theirs: socket.socket, modules: Sequence[str]) -> subprocess.Popen[bytes]:
        flags = ["-O"] * sys.flags.optimize + [f"-W{option}" for option in sys.warnoptions]
        given = getattr(sys, "_xoptions", {})  # of CPython
        flags += [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in given.items()]
        flags += [option for name, option in _FLAGS.items() if getattr(sys.flags, name)]
        here = current_folder()
        path = [os.path.normpath(os.path.join(here, entry)) for entry in sys.path if here or os.path.isabs(entry)]
        command = [sys.executable, "-P", *flags, "-c", _START, str(theirs.fileno()), ",".join(modules), *path]
        return subprocess.Popen(
            command,
            cwd=here or os.sep,  # MKL, which torch loads, ends a process in a folder that is gone
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the keyboard is this process's affair
        )

    def fork(self, theirs: socket.socket, modules: Sequence[str]) -> _Copy:
        """Make a copy of this process, which works for the other end of a socket; OSError if this one has ended."""
        send_message(self._connection, ({"do": "fork"}, ()))
        socket.send_fds(self._connection, [b"f"], [theirs.fileno()])
        try:
            return _Copy(read_message(self._connection)[0]["pid"], self)
        except EOFError as error:
            raise OSError("what it is a copy of has ended") from error

    def call(self, message: Message, seconds: float | None = None) -> Message:
        """Return the reply to a task; WorkerDiedError if the process ended, TooLateError if it is still at work."""
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            send_message(self._connection, message, deadline)
            return read_message(self._connection, deadline)
        except (OSError, EOFError) as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self.abandon()
            raise WorkerDiedError(f"the worker process {self.pid} {self._status()}") from error

    def abandon(self) -> None:
        """End the process now; in a process that was forked from its owner, leave it to that one."""
        self._connection.close()
        if os.getpid() == self._owner:
            self._process.kill()
            self._process.wait()

    def _status(self) -> str:
        status = self._process.returncode
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


class _Copy:
    """A process that was forked from a `Process`, as `Popen` has it: only what forked it learns how it ended."""

    def __init__(self, pid: int, forked_from: Process) -> None:
        self.pid, self._forked_from, self.returncode = pid, forked_from, 0
        self._ended = False

    def kill(self) -> None:
        """End it."""
        if not self._ended:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        if not self._ended:
            header, _ = self._forked_from.call(({"do": "wait", "pid": self.pid}, ()), timeout)
            self.returncode, self._ended = header["status"], True


def send_message(connection: socket.socket, message: Message, deadline: float | None = None) -> None:
    """Send a message; raise OSError if the other end is gone, TooLateError if it has not taken it by the deadline."""
    header, parts = message
    first = json.dumps([header, [len(part) for part in parts]]).encode()
    for part in (_LENGTH.pack(len(first)) + first, *parts):
        with _until(connection, deadline):
            connection.sendall(part)


def read_message(connection: socket.socket, deadline: float | None = None) -> Message:
    """Read a message; raise EOFError or OSError if the other end is gone, TooLateError after a `time.monotonic`."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size, deadline))
    header, lengths = json.loads(_read(connection, length, deadline))
    return header, [_read(connection, length, deadline) for length in lengths]


def _read(connection: socket.socket, length: int, deadline: float | None) -> bytes:
    parts, left = [], length
    while left:
        with _until(connection, deadline):
            part = connection.recv(min(left, _CHUNK))
        if not part:
            raise EOFError("the other end is gone")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


@contextmanager
def _until(connection: socket.socket, deadline: float | None) -> Iterator[None]:
    """Let a call on a socket wait until a time; raise TooLateError then."""
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        raise TooLateError
    connection.settimeout(left)
    try:
        yield
    except TimeoutError:
        raise TooLateError from None


def current_folder() -> str:
    """Return the folder that relative paths begin at, "" if it is gone."""
    try:
        return os.getcwd()
    except OSError:
        return ""
