"""Which kernel on the host is wrong by itself: each operator of a program in a file of its own.

It is given what it is given in a call that went wrong. What is wrong in a file is in the operator's own one if both
call the same kernels: in one that is lowered here or, for files of others, in one that ExecuTorch makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram, export
from torch.fx import Interpreter, Node
from torch.fx.node import map_arg

from exir_lowering import graphs
from exir_lowering._upstream import locks
from exir_lowering._upstream.operators import is_overload
from exir_lowering.errors import few
from exir_lowering.options import LoweringOptions
from exir_lowering.pipeline import lower_in
from exir_lowering.runtime.program import open_file
from exir_lowering.runtime.source import ProgramFile
from exir_lowering.steps.session import Session
from exir_lowering.verification.cases import MOVING
from exir_lowering.verification.checking import Comparison, read
from exir_lowering.verification.eager import Eager, copied, find_sharing
from exir_lowering.verification.subjects import match

_MOST = 100
"""How many operators are tried, of those that differ in more than the values that they are given."""


def find_kernels(comparison: Comparison, options: LoweringOptions) -> None:
    """Note, in what a comparison found, the first operator of each method that is wrong by itself."""
    programs = {name: subject.program for name, subject in comparison.subjects.items()}
    for name, tally in comparison.tallies.items():
        calls, kernels = tally.replay or tally.failed, frozenset(tally.subject.spec.operators)
        if calls and kernels:
            eager = Eager(programs, find_sharing(comparison.file))
            for call in calls[:-1]:
                eager.run(call.method, call.inputs)
            found: list[str] = []
            eager.run(name, calls[-1].inputs, partial(_Trials, found, kernels, options))
            tally.kernel = "".join(found)


class _Trials(Interpreter):
    """Executes a program, and tries its operators alone until one is wrong."""

    def __init__(self, found: list[str], kernels: frozenset[str], options: LoweringOptions, module: Any) -> None:
        super().__init__(module)
        self._found, self._kernels, self._options = found, kernels, options
        self._made: dict[str, tuple[ExportedProgram, ProgramFile] | None] = {}

    def run_node(self, n: Node) -> Any:
        """Try an operator that is given tensors, and execute it."""
        if is_overload(n.target) and torch.Tag.nondeterministic_seeded not in n.target.tags and not self._found:
            operands = [one for one in n.all_input_nodes if isinstance(self.env[one], torch.Tensor)]
            try:
                self._try(n, operands, copied(self.env[one] for one in operands))
            except MemoryError:
                raise
            except Exception:  # it cannot be exported or lowered alone, which says nothing of its kernels
                pass
        return super().run_node(n)

    def _try(self, node: Node, operands: Sequence[Node], inputs: list[Any]) -> None:
        others = {one: self.env[one] for one in node.all_input_nodes}

        class Alone(torch.nn.Module):
            def forward(self, *tensors: Any) -> Any:
                given = {**others, **dict(zip(operands, tensors, strict=True))}
                args, kwargs = map_arg((node.args, dict(node.kwargs)), given.__getitem__)
                return node.target(*args, **kwargs)

        values = {
            one: f"{value.dtype} {value.shape} {value.stride()}" for one, value in zip(operands, inputs, strict=True)
        }
        key = str((node.target, map_arg((node.args, dict(node.kwargs)), {**others, **values}.__getitem__)))
        if key not in self._made and len(self._made) < _MOST:
            self._made[key] = None
            self._made[key] = self._make(export(Alone(), tuple(inputs)))
        if (made := self._made.get(key)) is None:
            return
        program, file = made
        comparison = Comparison(file, match(program, file), partial(open_file, file, {}), None)
        comparison.run({"forward": [inputs]})
        if comparison.is_off:
            where = ", ".join(filter(None, (graphs.module_stack(node), graphs.source_line(node))))
            kernels = few(_called(file), 3)
            self._found.append(
                f"{graphs.operator_name(node)} is wrong by itself on the host ({kernels}): {where or node}"
            )

    def _make(self, program: ExportedProgram) -> tuple[ExportedProgram, ProgramFile] | None:
        """Return a program with a file of it that calls kernels of the file in question only, if there is one."""
        for lower in (self._lower, _lower_upstream):
            file = read(lower(program), None)
            if self._kernels.issuperset(_called(file)):
                return program, file
        return None

    def _lower(self, program: ExportedProgram) -> Any:
        return lower_in(Session(self._options), program).emit()


def _called(file: ProgramFile) -> list[str]:
    """Return the kernels of a file, without those that only move: they may be views in another."""
    names = {one: one.partition("::")[2].partition(".")[0] for one in file.methods["forward"].operators}
    return [one for one, name in names.items() if name not in MOVING]


def _lower_upstream(program: ExportedProgram) -> bytes:
    from executorch.exir import to_edge

    with locks.conversion():
        return bytes(to_edge(program).to_executorch().buffer)
