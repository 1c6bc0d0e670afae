"""What the debug handles of a `.pte` file stand for: kept beside it as `model.debug.json`, tied to it by its digest."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from exir_lowering.errors import InputError
from exir_lowering.graphs.sources import Frame

VERSION = 2
"""Incremented when a field of the JSON changes its meaning or is removed."""

SUFFIX = ".debug.json"


@dataclass(frozen=True, slots=True)
class DebugNode:
    """An operator of a lowered method."""

    name: str  # the node's name in its method or partition, with the path of the nested graph that holds it
    operator: str  # such as "aten.add.Tensor"
    modules: tuple[str, ...]  # the modules that it came from, the outermost first, each as "path: Class"
    frames: tuple[Frame, ...]  # the lines of the model that it came from, the outermost first
    line: int | None  # which of the frames is the innermost one of the model itself; None when there are no frames

    @property
    def source(self) -> str:
        """The model's line, "" when it is not known."""
        return "" if self.line is None else str(self.frames[self.line])


@dataclass(frozen=True, slots=True)
class DebugDelegate:
    """A call of a backend; its index in `MethodDebug.delegates` is that in the file's execution plan."""

    backend_id: str
    instruction: int  # the number of the instruction that calls it
    handles: tuple[int, ...]  # the debug handles of its operators, in their order
    # For each identifier of the backend's profile events the debug handles that it stands for.
    handle_map: Mapping[int | str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class MethodDebug:
    """One method of the file."""

    nodes: Mapping[int, tuple[DebugNode, ...]]  # for each debug handle its operators: several if one was decomposed
    delegates: tuple[DebugDelegate, ...]
    kernels: Mapping[int, tuple[int, ...]]  # for each instruction that calls a kernel its operator's debug handles

    def lines(self, handles: Iterable[int]) -> list[str]:
        """Return the model's lines that some debug handles stand for, each once."""
        nodes = (node for handle in handles for node in self.nodes.get(handle, ()))
        return list(dict.fromkeys(node.source for node in nodes if node.source))


@dataclass(frozen=True, slots=True)
class DebugInfo:
    """The debug handles of a `.pte` file."""

    version: int  # of the JSON format
    digest: str  # what identifies the `.pte` file, in hexadecimal: see `digests.identity`
    methods: Mapping[str, MethodDebug]  # by name

    def to_json(self) -> str:
        """Return it as compact JSON, the same for the same file. Tables hold repeated values, referred to by number.

        Returns:
            `{"version", "digest", "operators": [name], "modules": ["path: Class"], "stacks": [[module]],
            "files": [path], "functions": [name], "frames": [[file, line, function, code]],
            "traces": [[line, frame, ...]], "methods": {name: {"nodes": [[handle, name, operator, stack, trace]],
            "delegates": [[backend, instruction, [handle], [[identifier, [handle]]]]],
            "kernels": [[instruction, [handle]]]}}}`
        """
        tables: dict[str, dict[Hashable, int]] = {name: {} for name in _TABLES}

        def number(table: str, value: Hashable) -> int:
            return tables[table].setdefault(value, len(tables[table]))

        def node(one: DebugNode) -> list[Any]:
            stack = number("stacks", tuple(number("modules", module) for module in one.modules))
            frames = []
            for frame in one.frames:
                file, function = number("files", frame.file), number("functions", frame.function)
                frames.append(number("frames", (file, frame.line, function, frame.code)))
            trace = number("traces", (-1 if one.line is None else one.line, *frames))
            return [one.name, number("operators", one.operator), stack, trace]

        methods = {}
        for name, method in sorted(self.methods.items()):
            delegates = [
                [one.backend_id, one.instruction, one.handles, list(one.handle_map.items())] for one in method.delegates
            ]
            methods[name] = {
                "nodes": [[handle, *node(one)] for handle in sorted(method.nodes) for one in method.nodes[handle]],
                "delegates": delegates,
                "kernels": sorted(method.kernels.items()),
            }
        tree = {"version": self.version, "digest": self.digest, "methods": methods}
        return json.dumps(
            {**tree, **{name: list(found) for name, found in tables.items()}}, separators=(",", ":"), sort_keys=True
        )

    @staticmethod
    def from_json(text: str | bytes) -> DebugInfo:
        """Read what `to_json` wrote; an InputError for something else, another version, or what is damaged."""
        try:
            tree = json.loads(text)
            version = tree["version"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(f"this is not debug information ({type(error).__name__}: {error})") from None
        if version != VERSION:
            raise InputError(f"its version is {version!r}, but this exir-lowering reads version {VERSION}")
        try:
            return _read(tree)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise InputError(f"it is damaged ({type(error).__name__}: {error})") from None


_TABLES = ("operators", "modules", "files", "functions", "stacks", "traces", "frames")


def _read(tree: Any) -> DebugInfo:
    texts = ([*map(_text, tree[name])] for name in ("operators", "modules", "files", "functions"))
    operators, modules, files, functions = texts
    frames = [
        Frame(files[_number(file)], _number(line), functions[_number(function)], _text(code))
        for file, line, function, code in tree["frames"]
    ]
    stacks = [tuple(modules[_number(number)] for number in stack) for stack in tree["stacks"]]
    traces: list[tuple[int | None, tuple[Frame, ...]]] = []
    for line, *numbers in tree["traces"]:
        found = tuple(frames[_number(number)] for number in numbers)
        if line != -1 and _number(line) >= len(found):
            raise IndexError(f"line {line} of {len(found)}")
        traces.append((None if line == -1 else line, found))

    def method(part: Any) -> MethodDebug:
        nodes: dict[int, list[DebugNode]] = {}
        for handle, name, operator, stack, trace in part["nodes"]:
            line, lines = traces[_number(trace)]
            node = DebugNode(_text(name), operators[_number(operator)], stacks[_number(stack)], lines, line)
            nodes.setdefault(_number(handle), []).append(node)
        delegates = tuple(
            DebugDelegate(
                _text(backend),
                _number(instruction),
                _numbers(handles),
                {key if isinstance(key, str) else _number(key): _numbers(values) for key, values in entries},
            )
            for backend, instruction, handles, entries, *_ in part["delegates"]
        )
        kernels = {_number(instruction): _numbers(handles) for instruction, handles in part["kernels"]}
        return MethodDebug({handle: tuple(found) for handle, found in nodes.items()}, delegates, kernels)

    methods = {_text(name): method(part) for name, part in tree["methods"].items()}
    return DebugInfo(VERSION, _text(tree["digest"]), methods)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a str")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(_number(value) for value in values)


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is not a number")
    return value
