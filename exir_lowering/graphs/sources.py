"""Where in the model a node came from: source lines, modules and functions; and how messages list lines."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch.fx import Node

from exir_lowering.graphs.operators.names import operator_name

LISTED = 6
"""How many source lines a message lists before it gives the number of the others."""

_GENERATED = re.compile(r'File "<[^"]+", line \d+, in \S+\s+(\w+) = ')
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_SHARED = ("executorch", "exir_lowering")  # packages that hold several plug-ins, and what calls them
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack trace."""

    file: str  # as the trace names it
    line: int
    function: str
    code: str  # "" if the trace does not have it

    def __str__(self) -> str:
        code = f": {self.code}" if self.code else ""
        return f'File "{self.file}", line {self.line}, in {self.function}{code}'


@lru_cache(maxsize=4096)  # many nodes come from one line
def parse_frames(trace: str) -> tuple[Frame, ...]:
    """Read a stack trace, outermost line first, without lines of generated code."""
    found = list(_FRAME.finditer(trace))
    read = []
    for number, frame in enumerate(found, start=1):
        end = found[number].start() if number < len(found) else len(trace)
        if not frame[1].startswith("<"):
            code = trace[frame.end() : end].strip().splitlines()
            read.append(Frame(frame[1], int(frame[2]), frame[3], code[0].strip() if code else ""))
    return tuple(read)


def find_innermost(stack: Sequence[Frame]) -> int | None:
    """Return the index of the innermost line of a stack outside torch, if there is one; None for an empty stack."""
    own = [number for number, frame in enumerate(stack) if not frame.file.startswith(_TORCH)]
    return own[-1] if own else (len(stack) - 1 if stack else None)


def raised_at(error: BaseException, plugin: type, before: str = "\n  raised at ") -> str:
    """Return the innermost line in a plug-in's package, file or folder, or else outside torch, to end a message with.

    What is `before` it is added; "" where there is no such line.
    """
    frames = [
        Frame(one.filename, one.lineno or 0, one.name, one.line or "")
        for one in traceback.extract_tb(error.__traceback__)
    ]
    module = sys.modules.get(plugin.__module__)
    members = (getattr(member, "__func__", member) for member in vars(plugin).values())
    codes = (getattr(member, "__code__", None) for member in members)
    files = {code.co_filename for code in codes if code is not None} | {getattr(module, "__file__", None) or ""}
    package = plugin.__module__.partition(".")[0]
    if package in _SHARED:
        folders = [os.path.dirname(file) for file in files]
    else:
        folders = list(getattr(sys.modules.get(package), "__path__", ()))
    inside = tuple(f"{folder}{os.sep}" for folder in folders if folder)
    own = [frame for frame in frames if frame.file in files or frame.file.startswith(inside)]
    if not own and (innermost := find_innermost(frames)) is not None:
        own = [frames[innermost]]
    return f"{before}{own[-1]}" if own else ""


def format_lines(lines: Sequence[str]) -> str:
    """Return source lines as the end of a message, "" if there are none."""
    if len(lines) < 2:
        return "".join(f"Source code: {line}" for line in lines)
    return "\n".join(["Source code:", *list_lines(lines)])


def list_lines(lines: Sequence[str]) -> list[str]:
    """Return the first source lines, indented, and the number of the others."""
    more = [f"    and {len(lines) - LISTED} more lines of the model"] if len(lines) > LISTED else []
    return [f"    {line}" for line in lines[:LISTED]] + more


# -- of a node --------------------------------------------------------------------------------------------------------


def stack(node: Node) -> tuple[Frame, ...]:
    """Return the lines of the model from which a node came, outermost first."""
    return parse_frames(node.meta.get("stack_trace") or "")


def source_line(node: Node) -> str:
    """Return the innermost line of the model, rather than of torch, from which a node came, "" if it is not known."""
    frames = stack(node)
    number = find_innermost(frames)
    return "" if number is None else str(frames[number])


def lines_of(nodes: Iterable[Node]) -> list[str]:
    """Return the innermost lines of the model from which nodes came, each once."""
    return list(dict.fromkeys(filter(None, map(source_line, nodes))))


def source_code(node: Node) -> str:
    """Return a node's source line as the end of a message, or the node's name if the line is not known."""
    line = source_line(node)
    return format_lines([line]) if line else f"Node {node.name}; its source line is not known."


def generated_name(node: Node) -> str:
    """Return the name in generated code from which a node came, if nothing else is known of its source, or ""."""
    found = list(_GENERATED.finditer(node.meta.get("stack_trace") or ""))
    return found[-1][1] if found and not stack(node) else ""


def module_stack(node: Node) -> str:
    """Return the path of the module from which a node came, "" if it is not known."""
    stack = modules(node)
    return stack[-1][0] if stack else ""


def modules(node: Node) -> list[tuple[str, str]]:
    """Return the path and the full class name of the modules from which a node came, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    found = []
    for entry in stack.values():
        if isinstance(entry, tuple) and len(entry) == 2:
            path, kind = entry
            found.append((str(path), f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)))
    return found


_LINEAR = (torch.nn.Linear, torch.nn.functional.linear)
_WHOLE = "aten.linear.default"


def is_part_of_linear(node: Node) -> bool:
    """Return whether a node is one of several that a linear layer was decomposed into.

    ExecuTorch's backends recognise such a layer by the function that its operators came from, and replace all at once.
    """
    if node.op != "call_function" or operator_name(node) == _WHOLE:
        return False
    functions, function = node.meta.get("source_fn_stack"), node.meta.get("torch_fn")
    if functions:
        return functions[-1][1] in _LINEAR
    if function and str(function[1]).rpartition(".")[2] == "linear":
        return True
    around = modules(node)
    return bool(around) and around[-1][1] == "torch.nn.modules.linear.Linear"
