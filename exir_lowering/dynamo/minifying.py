"""The minifier's part between AOTAutograd and this backend: TORCHDYNAMO_REPRO_AFTER="aot"."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from exir_lowering._upstream import repros
from exir_lowering._upstream.dynamo import boxed, outside_tracing
from exir_lowering.dynamo.capture import NotLowered
from exir_lowering.dynamo.compiled import Boxed
from exir_lowering.errors import LoweringError
from exir_lowering.errors.interrupts import let_through

Compile = Callable[[GraphModule, Sequence[Any]], Boxed]

_NAMES = ("exir_lowering", "exir_lowering_debug")


def warn_of_options(options: Any) -> None:
    """Warn if the minifier is on, and its scripts would call the backend without its options."""
    if options and repros.repro_after() is not None and repros.backend_name() in _NAMES:
        warnings.warn(
            f"TORCHDYNAMO_REPRO_AFTER={repros.repro_after()!r}: the minifier's scripts call the backend "
            f"{repros.backend_name()!r} by name, without these options. To keep them, register a function that calls "
            "exir_lowering.dynamo.backend with them, and compile with its name.",
            stacklevel=4,
        )


def watched(compile_graph: Compile, *, raises: bool) -> Compile:
    """Return a compiler of AOTAutograd's graphs that writes a script when one fails, if the minifier is on."""
    if repros.repro_after() != "aot":
        return compile_graph
    backend = repros.backend_name()

    def compile_watched(module: GraphModule, inputs: Sequence[Any]) -> Boxed:
        try:
            compiled = compile_graph(module, inputs)
        except Exception as error:
            let_through(error)
            # Unless an error of ours is raised to the user, another backend takes the graph.
            if raises or not isinstance(error, (NotLowered, LoweringError)):
                with outside_tracing():
                    _write(module, inputs, backend)
            raise
        return boxed(_Watched(module, compiled, backend))

    return compile_watched


class _Watched:
    """A compiled graph of AOTAutograd's."""

    def __init__(self, module: GraphModule, compiled: Boxed, backend: str | None) -> None:
        self._module, self._compiled, self._backend = module, compiled, backend

    def __call__(self, inputs: list[Any]) -> Any:
        if repros.repro_after() != "aot":
            return self._compiled(inputs)
        with repros.without_repro():
            return self._call(inputs)

    def _call(self, inputs: list[Any]) -> Any:
        level = repros.repro_level()
        if level == 3:  # before a call that may end the process
            repros.write_launcher(self._module, inputs, self._backend)
        if level == 4:
            if not repros.same_results(self._module, self._compiled, inputs):
                repros.write_launcher(self._module, inputs, self._backend, accuracy=True)
                raise repros.AccuracyError("Bad accuracy detected")
            return self._compiled(inputs)
        kept = list(inputs)  # the call empties the list
        try:
            return self._compiled(inputs)
        except Exception as error:
            let_through(error)
            _write(self._module, kept, self._backend)
            raise


def _write(module: GraphModule, inputs: Sequence[Any], backend: str | None) -> None:
    if repros.repro_level() == 1:
        repros.write_repro(module, inputs, backend)
    else:
        repros.write_launcher(module, inputs, backend)
