"""Children of the tests: scripts in processes of their own, and actions that may end the process that does them.

`run` sends a script to a fork server (fork_server.py). With EXIR_LOWERING_FRESH=1, as in the nightly set, each child is
a fresh interpreter instead, which finds what only works because something is imported already.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fork_server

SECONDS = 120
ADDRESS = "EXIR_LOWERING_FORK_SERVER"
"""The environment variable that tells the workers of a run where the one fork server listens."""


def run(
    code: str | Path,
    *arguments: object,
    cwd: Path | str | None = None,
    env: dict[str, str] | None = None,
    timeout: float = 300,
    quiet: bool = True,
    fresh: bool = False,
    flags: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run Python code, or a script, in a child that has torch, ExecuTorch and this package imported.

    Args:
        code: The code, or the path of a script.
        arguments: The arguments that it finds in `sys.argv`.
        cwd: The folder that it runs in.
        env: Variables that its environment has beside those of this process.
        timeout: The seconds after which it is killed.
        quiet: Whether warnings are ignored.
        fresh: Whether it needs an interpreter that has imported nothing; so do the flags.
        flags: Options of the interpreter, such as -O.

    Returns:
        What `subprocess.run` returns: the exit code, -N for the signal N, and the text of both streams.

    Raises:
        subprocess.TimeoutExpired: It was killed.
    """
    words = [str(argument) for argument in arguments]
    environment = {**os.environ, **(env or {})}
    if fresh or flags or "EXIR_LOWERING_FRESH" in os.environ or not hasattr(os, "fork"):
        command = [sys.executable, *flags, *(["-W", "ignore"] if quiet else [])]
        command += [str(code)] if isinstance(code, Path) else ["-c", code]
        return subprocess.run(
            [*command, *words], capture_output=True, text=True, errors="replace", cwd=cwd, env=environment,
            timeout=timeout,
        )  # fmt: skip
    request = {
        "script": str(code) if isinstance(code, Path) else "",
        "code": code.read_text() if isinstance(code, Path) else code,
        "arguments": words,
        "folder": str(cwd or os.getcwd()),
        "environment": environment,
        "quiet": quiet,
    }
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, _connected() as connection:
        fork_server.send(connection, request, [out.fileno(), err.fileno()])
        with connection.makefile("r") as told:
            child = int(told.readline())
            status = _status(connection, told, child, timeout)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    if status is None:
        raise subprocess.TimeoutExpired([str(code), *words], timeout, *texts)
    return subprocess.CompletedProcess([str(code), *words], status, *texts)


def _status(connection: socket.socket, told: Any, child: int, timeout: float) -> int | None:
    """Return how a child ends, or None when it had to be killed."""
    connection.settimeout(timeout)
    try:
        return int(told.readline())
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        return None


def _connected() -> socket.socket:
    address = os.environ.get(ADDRESS) or serve()
    for _ in range(1200):
        connection = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            connection.connect(address)
            return connection
        connection.close()
        time.sleep(0.05)
    raise TimeoutError(f"No fork server listens at {address}.")


def serve() -> str:
    """Start the fork server, which ends with this process, and return its address."""
    folder = tempfile.mkdtemp(prefix="fork-server-")
    address = os.environ[ADDRESS] = str(Path(folder) / "socket")
    server = subprocess.Popen(
        [sys.executable, str(Path(fork_server.__file__)), address],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    starter = os.getpid()

    def stop() -> None:
        if os.getpid() == starter and server.stdin is not None:
            server.stdin.close()
            server.wait(10)
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)
    return address


def outcome(action: Callable[[], Any]) -> str:
    """Return what an action in a child ends with: "refused: ..." with a message of ours, "done: ..." or how it died."""
    from exir_lowering import LoweringError

    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        try:
            signal.alarm(SECONDS)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            text = f"done: {action()}"
        except LoweringError as error:
            text = f"refused: {error}"
        except BaseException as error:
            text = f"foreign: {type(error).__name__}: {error}"
        os.write(writes, text.encode()[:60_000])
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return text if code == 0 else f"died: {code}"


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(done: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)
