"""Python delegates for the backends of ExecuTorch's own tests, whose C++ halves are in no wheel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from exir_lowering import CompileSpec, Delegate, DelegateContext, LoadedProgram, load

INVALID_ARGUMENT, INCOMPATIBLE = 0x12, 0x30
LARGEST = 4
OPERATORS = {"sin.default": 1, "mm.default": 2, "add.Tensor": 2}
_INSTRUCTION = re.compile(r"op:demo::aten\.([\w.]+), numel:(\d+), dtype:torch\.(\w+)<debug_handle>(-?\d+)")


class DemoError(Exception):
    """What goes wrong in it, with the runtime's error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.executorch_error = code


class DemoDelegate(Delegate):
    """For `BackendWithCompilerDemo`: each operator takes the result of the one before, and then the next inputs."""

    delegate_id = "BackendWithCompilerDemo"

    def compile(self, processed: bytes, compile_specs: list[CompileSpec], context: DelegateContext) -> list[str]:
        head, *lines = processed.decode().split("#")
        count, _, version = head.partition("version:")
        if version != "0":
            raise DemoError(INCOMPATIBLE, f"version {version} of the payload, expected 0")
        operators = []
        for line in filter(None, lines):
            found = _INSTRUCTION.fullmatch(line)
            if found is None or found[1] not in OPERATORS:
                raise DemoError(INVALID_ARGUMENT, f"unknown instruction {line!r}")
            if int(found[2]) > LARGEST:
                raise DemoError(INVALID_ARGUMENT, f"{found[2]} elements, at most {LARGEST} are supported")
            operators.append(found[1])
        if len(operators) != int(count):
            raise DemoError(INVALID_ARGUMENT, f"{len(operators)} instructions, expected {count}")
        return operators

    def execute(self, handle: list[str], inputs: list[Any]) -> Sequence[Any]:
        wanted = OPERATORS[handle[0]] + sum(OPERATORS[name] - 1 for name in handle[1:])
        if len(inputs) != wanted:
            raise DemoError(INVALID_ARGUMENT, f"{len(inputs)} inputs, expected {wanted}")
        value, *rest = inputs
        for name in handle:
            if name == "sin.default":
                value = value - value**3 / 6  # as the C++ one: a Taylor polynomial
            else:
                value = (torch.mm if name == "mm.default" else torch.add)(value, rest.pop(0))
        return [value]


class ExecutorDelegate(Delegate):
    """For `ExecutorBackend`, whose payloads are `.pte` files: a program in a program."""

    delegate_id = "ExecutorBackend"

    def compile(self, processed: bytes, compile_specs: list[CompileSpec], context: DelegateContext) -> LoadedProgram:
        return load(processed, delegates=[DemoDelegate])

    def execute(self, handle: LoadedProgram, inputs: list[Any]) -> Sequence[Any]:
        return handle.run("forward", *inputs)
