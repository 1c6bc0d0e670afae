"""What the debug handles of a `.pte` file stand for: kept beside it as `model.debug.json`, tied to it by its digest."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from exir_lowering.errors import InputError, exception_text, find_named_handle
from exir_lowering.graphs.sources import Frame, format_lines
from exir_lowering.pte import digests
from exir_lowering.pte.files import MappedFile

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

    def lines_at(self, instruction: int) -> list[str]:
        """Return the model's lines that an instruction is from, each once."""
        called = {one.instruction: one.handles for one in self.delegates}
        return self.lines(called.get(instruction) or self.kernels.get(instruction, ()))


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
            nodes = [[handle, *node(one)] for handle in sorted(method.nodes) for one in method.nodes[handle]]
            calls = [[d.backend_id, d.instruction, d.handles, [*d.handle_map.items()]] for d in method.delegates]
            methods[name] = {"nodes": nodes, "delegates": calls, "kernels": sorted(method.kernels.items())}
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


def _all(kind: type, values: Any) -> Any:
    """Return values of a type; TypeError if one is of another."""
    if wrong := [value for value in values if type(value) is not kind]:
        raise TypeError(f"got {wrong[0]!r}, expected a value of type {kind.__name__}")
    return values


_TABLES = ("operators", "modules", "files", "functions", "stacks", "traces", "frames")


def _read(tree: Any) -> DebugInfo:
    operators, modules, files, functions = (_all(str, tree[name]) for name in _TABLES[:4])
    frames = [Frame(files[file], line, functions[function], code) for file, line, function, code in tree["frames"]]
    stacks = [tuple(modules[number] for number in stack) for stack in tree["stacks"]]
    traces: list[tuple[int | None, tuple[Frame, ...]]] = []
    for line, *numbers in tree["traces"]:
        found = tuple(frames[number] for number in numbers)
        if line != -1:
            found[line]  # which has to be there
        traces.append((None if line == -1 else line, found))

    def whole(entries: Any) -> dict[Any, tuple[int, ...]]:
        return {key: tuple(_all(int, handles)) for key, handles in entries}

    def method(part: Any) -> MethodDebug:
        nodes: dict[int, list[DebugNode]] = {}
        for handle, name, operator, stack, trace in part["nodes"]:
            line, lines = traces[trace]
            nodes.setdefault(handle, []).append(DebugNode(name, operators[operator], stacks[stack], lines, line))
        delegates = tuple(
            DebugDelegate(backend, instruction, tuple(_all(int, handles)), whole(entries))
            for backend, instruction, handles, entries, *_ in part["delegates"]
        )
        return MethodDebug({handle: tuple(found) for handle, found in nodes.items()}, delegates, whole(part["kernels"]))

    (digest,) = _all(str, [tree["digest"]])
    return DebugInfo(VERSION, digest, {name: method(part) for name, part in tree["methods"].items()})


Lines: TypeAlias = Callable[[int, BaseException], str]
"""Takes the number of a method's delegate and what it raised; returns the model's lines, as the end of a message."""


def no_lines(number: int, error: BaseException) -> str:
    """Return no lines: nothing is known about the model."""
    return ""


@dataclass(eq=False)
class DebugFile:
    """The debug information of a `.pte` file: of one in memory as known, else beside it, read when it is needed."""

    file: MappedFile
    known: Mapping[str, MethodDebug] | None = None

    @cached_property
    def methods(self) -> Mapping[str, MethodDebug]:
        """What is known about the methods, by name; what cannot be used is ignored with a warning."""
        if self.known is not None:
            return self.known
        source = self.file.source
        path = Path(source).with_suffix(SUFFIX) if isinstance(source, str) and Path(source).name else None
        if path is None or not path.is_file():
            return {}
        try:
            info, digest = DebugInfo.from_json(path.read_bytes()), digests.identity(self.file.content)
            if info.digest != digest:
                raise InputError(
                    "it belongs to another .pte file, or to this one before it was made again (digest "
                    f"{info.digest[:12]}..., the file has {digest[:12]}...)"
                )
        except (InputError, OSError, ValueError, TypeError) as error:
            warnings.warn(
                f"The debug information {str(path)!r} cannot be used: {error}. Save the artifact again: it writes "
                "both. It is not used.",
                stacklevel=3,
            )
            return {}
        return info.methods

    def lines(self, method: str) -> Lines:
        """Return a function that returns the model's lines for a failure of a method's delegates."""

        def lines_of(number: int, error: BaseException) -> str:
            try:
                known = self.methods.get(method)
                if known is None or number >= len(known.delegates):
                    return ""
                handle = find_named_handle(error)
                found = known.lines((handle,)) if handle is not None else []
                return format_lines(found or known.lines(known.delegates[number].handles))
            except MemoryError:
                raise
            except Exception as problem:  # a warning that is an error here, say: it must not hide the failure
                return exception_text(problem)

        return lines_of
