"""State that the methods of a file share: the runtime shares the buffers that it holds, not those of delegates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering.errors import InputError

_KEEPS = (
    "keeps it, and the runtime shares only what it holds itself. Leave state on the host: own_state=False for the "
    "partitioners of this package, no tag_mutated_buffer in one of ExecuTorch."
)


def check(programs: Mapping[str, ExportedProgram], planning: Any) -> None:
    """Check that no delegate owns a buffer that its method is to share with another one.

    Args:
        programs: The lowered methods.
        planning: ExecuTorch's memory planning pass, or one per method.

    Raises:
        InputError: The pass shares buffers, and a delegate writes into one that another method also has, or reads one
            that another method writes into.
    """
    passes = planning.values() if isinstance(planning, Mapping) else (planning,)
    if len(programs) < 2 or not any(getattr(each, "share_mutable_buffers", False) for each in passes):
        return
    parts = {method: list(_list_delegated(program)) for method, program in programs.items()}
    whole = {method: [program, *(part for _, part in parts[method])] for method, program in programs.items()}
    has = {method: {name for part in every for name in _buffers(part)} for method, every in whole.items()}
    writes = {method: {name for part in every for name in _list_written(part)} for method, every in whole.items()}
    for method, delegates in parts.items():
        for backend, part in delegates:
            own = set(_list_written(part))
            for buffer in _buffers(part):
                users = has if buffer in own else writes
                other = next((name for name in programs if name != method and buffer in users[name]), None)
                if other is not None:
                    problem = _KEEPS if buffer in own else _reads(method, other)
                    raise InputError(
                        f"The buffer {buffer!r} is state of the methods {method!r} and {other!r}, which "
                        f"share_mutable_buffers=True asks to share, but in {method!r} a delegate of {backend!r} "
                        f"{problem}"
                    )


def _reads(method: str, other: str) -> str:
    return (
        f"reads it: it is a constant there, with the value that it had at export, whatever {other!r} writes. Leave the "
        f"operators of {method!r} that read it on the host: a RuledPartitioner with deny(...) for them, or no "
        "partitioner for the method."
    )


def _list_delegated(program: ExportedProgram) -> Iterator[tuple[str, ExportedProgram]]:
    """Yield the delegates of a method: backend id and original program."""
    for _, module, attribute in graphs.delegates(program.graph_module):
        lowered: Any = getattr(module, attribute)
        yield lowered.backend_id, lowered.original_module


def _buffers(program: ExportedProgram) -> Iterator[str]:
    yield from program.graph_signature.inputs_to_buffers.values()


def _list_written(program: ExportedProgram) -> Iterator[str]:
    yield from program.graph_signature.buffers_to_mutate.values()
