"""Which kernel on the host is wrong by itself: each operator of a program in a file of its own.

It is given what it is given in a call that went wrong. What is wrong in a file is in the operator's own one if both
call the same kernels: in one that is lowered here or, for files of others, in one that ExecuTorch makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.export import ExportedProgram, export
from torch.fx import Interpreter, Node
from torch.fx.node import map_arg

from exir_lowering import graphs
from exir_lowering._upstream import locks
from exir_lowering._upstream.operators import is_overload
from exir_lowering.errors import few, ignoring_errors
from exir_lowering.options import LoweringOptions
from exir_lowering.pipeline import lower_in
from exir_lowering.runtime.source import ProgramFile, read_file
from exir_lowering.steps.session import Session
from exir_lowering.verification.cases import MOVING

_MOST = 100  # how many operators are tried, of those that differ in more than the values that they are given


Judge: TypeAlias = Callable[[ExportedProgram, ProgramFile, list[Any]], bool]
"""Returns whether a file of one program is wrong for some inputs."""


class Trials(Interpreter):
    """Executes a program, and tries its operators alone until one is wrong."""

    def __init__(
        self, found: list[str], kernels: Sequence[str], options: LoweringOptions, is_wrong: Judge, module: Any
    ) -> None:
        """Take the kernels of the file in question; what is found is added to `found`."""
        super().__init__(module)
        self._found, self._kernels, self._options, self._is_wrong = found, frozenset(kernels), options, is_wrong
        self._made: dict[str, tuple[ExportedProgram, ProgramFile] | None] = {}

    def run_node(self, n: Node) -> Any:
        """Try an operator, and execute it."""
        if is_overload(n.target) and torch.Tag.nondeterministic_seeded not in n.target.tags and not self._found:
            with ignoring_errors():  # that it cannot be exported or lowered alone says nothing of its kernels
                self._try(n)
        return super().run_node(n)

    def _try(self, node: Node) -> None:
        values = {one: self.env[one] for one in node.all_input_nodes}
        inputs = {one: value.clone() for one, value in values.items() if isinstance(value, torch.Tensor)}

        def bind(given: Mapping[Node, Any]) -> Any:
            return map_arg((node.args, dict(node.kwargs)), {**values, **given}.__getitem__)

        class Alone(torch.nn.Module):
            def forward(self, *tensors: Any) -> Any:
                args, kwargs = bind(dict(zip(inputs, tensors, strict=True)))
                return node.target(*args, **kwargs)  # type: ignore[operator]

        layouts = {one: (value.dtype, value.shape, value.stride()) for one, value in inputs.items()}
        key = f"{node.target} {bind(layouts)}"
        if key not in self._made and len(self._made) < _MOST:
            self._made[key] = None
            self._made[key] = self._make(export(Alone(), tuple(inputs.values())))
        if (made := self._made.get(key)) is not None and self._is_wrong(*made, [*inputs.values()]):
            where = ", ".join(filter(None, (graphs.module_stack(node), graphs.source_line(node)))) or str(node)
            name, called = graphs.operator_name(node), few(_called(made[1]), 3)
            self._found.append(f"{name} is wrong by itself on the host ({called}): {where}")

    def _make(self, program: ExportedProgram) -> tuple[ExportedProgram, ProgramFile] | None:
        """Return a program with a file of it that calls kernels of the file in question only, if there is one."""
        from executorch.exir import to_edge

        with locks.conversion():
            for make in (
                lambda: lower_in(Session(self._options), program).emit(),
                lambda: to_edge(program).to_executorch(),
            ):
                if self._kernels.issuperset(_called(file := read_file(bytes(make().buffer), None, True))):
                    return program, file
        return None


def _called(file: ProgramFile) -> list[str]:
    """Return the kernels of a file, without those that only move: they may be views in another."""
    names = {one: one.partition("::")[2].partition(".")[0] for one in file.methods["forward"].operators}
    return [one for one, name in names.items() if name not in MOVING]
