"""A process that has torch, ExecuTorch and this package imported, and forks a child for each script it is sent.

A fresh interpreter spends seven seconds of CPU on these imports, and one on what both look up when they lower the first
program; a forked one none. The server has one thread and executes nothing, so its children are as good as fresh ones:
each has its own `__main__`, arguments, folder, environment and standard streams, and ends as an interpreter ends. It
lives as long as the pipe to its standard input is open.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import linecache
import os
import selectors
import signal
import socket
import sys
import types
import warnings
from typing import Any
from unittest.mock import patch

WARM = (
    "torch.export",
    "executorch.exir",
    "executorch.backends.xnnpack.partition.xnnpack_partitioner",
    "exir_lowering.pipeline",
    "exir_lowering.runtime",
)
_HEADER = 8


def warm_up() -> None:
    """Import what children need, and lower a program: without tqdm's thread and random numbers, nor numbered graphs."""
    for name in WARM:
        importlib.import_module(name)
    import torch
    from torch.fx import graph_module
    from tqdm import tqdm

    import exir_lowering
    from exir_lowering._upstream import runtime
    from exir_lowering.plugins import registry

    model = torch.nn.Sequential(torch.nn.utils.skip_init(torch.nn.Linear, 2, 2), torch.nn.ReLU())
    graphs = patch.object(graph_module, "_loader", graph_module._EvalCacheLoader())
    with patch.object(tqdm, "monitor_interval", 0), graphs, patch.dict(linecache.cache):
        for partitioner in ("xnnpack", "reference"):
            exir_lowering.lower(torch.export.export(model, (torch.ones(2, 2),)), partitioner).emit()
    registry._entries.cache_clear()  # a child may have plug-ins of its own, and no runtime
    runtime.executorch_runtime.cache_clear()


def send(connection: socket.socket, request: dict[str, Any], files: list[int]) -> None:
    """Send a request with the files that are the child's standard output and standard error."""
    text = json.dumps(request).encode()
    socket.send_fds(connection, [len(text).to_bytes(_HEADER, "big")], files)
    connection.sendall(text)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    header, files, _, _ = socket.recv_fds(connection, _HEADER, 2)
    with connection.makefile("rb") as stream:
        return json.loads(stream.read(int.from_bytes(header, "big"))), files


class Server:
    """Forks children and tells their clients the pid and, when they have ended, the status.

    Args:
        address: The path of the socket that it listens on.
    """

    def __init__(self, address: str) -> None:
        self._children: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen()
        self._woken, self._wakes = os.pipe()
        for end in (self._woken, self._wakes):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        for source in (self._listener, self._woken, 0):
            self._selector.register(source, selectors.EVENT_READ)

    def serve(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return a request in each child that is forked for one, and nothing at the end of the server."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == 0:
                    return self._kill()
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    request, files = _receive(connection)
                    child = os.fork()
                    if child == 0:
                        self._let_go(connection)
                        return request, files
                    for file in files:
                        os.close(file)
                    self._children[child] = connection
                    connection.sendall(f"{child}\n".encode())
                else:
                    os.read(self._woken, 4096)
            self._reap()

    def _reap(self) -> None:
        for child in list(self._children):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                # A client that has killed its child does not listen any more.
                with self._children.pop(child) as connection, contextlib.suppress(OSError):
                    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())

    def _kill(self) -> None:
        for child in self._children:
            os.kill(child, signal.SIGKILL)

    def _let_go(self, connection: socket.socket) -> None:
        """Close in a child what is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for held in (self._listener, connection, *self._children.values()):
            held.close()
        os.close(self._woken)
        os.close(self._wakes)


def become(request: dict[str, Any], files: list[int], own: list[str]) -> tuple[types.CodeType, dict[str, Any]]:
    """Make this process the one that a request describes; return the code that is left to run, and its names."""
    for stream, file in enumerate([os.open(os.devnull, os.O_RDONLY), *files]):
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    script, given = request["script"], os.environ.get("PYTHONPATH", "")
    added = [os.path.abspath(path) for path in given.split(os.pathsep) if path]
    sys.path[:] = [os.path.dirname(script) if script else "", *added, *own]
    sys.argv = [script or "-c", *request["arguments"]]
    importlib.invalidate_caches()
    if request["quiet"]:
        warnings.simplefilter("ignore")
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if script:
        main.__file__ = script
    return compile(request["code"], script or "<string>", "exec"), main.__dict__


if __name__ == "__main__":
    inherited = {os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}
    own = [path for path in sys.path[1:] if path not in inherited]
    server = Server(sys.argv[1])  # it listens first: a client that comes during the imports waits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warm_up()
    gc.freeze()
    todo = server.serve()
    if todo is not None:
        del server
        code, names = become(*todo, own)
        exec(code, names)
