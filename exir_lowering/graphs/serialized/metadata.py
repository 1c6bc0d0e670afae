"""The metadata of nodes: what is plain data, and the histories of nodes, which share most of what they consist of.

Kept exactly: values (`val`), stack traces, debug handles, tags, everything else that `ValueWriter` writes. As names:
classes in `nn_module_stack`, and what torch does not define in `source_fn_stack`. Histories (`from_node`) keep their
names, and number their graphs from 1; equal identifiers stay equal. Left out: `DROPPED`. Anything else makes a program
not serialisable.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from exir_lowering._upstream.serializing import NodeSource, make_source
from exir_lowering.graphs.serialized.arguments import ValueReader, ValueWriter, find_source, name_source
from exir_lowering.graphs.serialized.container import NotSerialisableError, pick

DROPPED = frozenset({"desc"})
"""The keys of node.meta that are left out: descriptions by AOTAutograd, which nothing reads after export."""

_DEEPEST_HISTORY = 200


class MetadataWriter:
    """Writes the metadata of nodes."""

    def __init__(self, values: ValueWriter, leave_out: Collection[str]) -> None:
        self._values = values
        self._left_out = DROPPED | frozenset(leave_out)
        self._stacks: dict[Any, int] = {}  # of modules, each once
        self._sources: dict[Any, int] = {}  # the parts of histories, each once, and after its parents
        self._seen: dict[int, tuple[Any, int]] = {}  # by id, with the object, which stays alive
        self._graphs: dict[int, int] = {}
        self._writers: dict[str, Callable[[Any], Any]] = {
            "nn_module_stack": self._stack,
            "from_node": self._history,
            "source_fn_stack": self._functions,
        }

    def write(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Write the metadata of a node; NotSerialisableError if an entry cannot be written."""
        written = {}
        for key, value in meta.items():
            if key not in self._left_out:
                if type(key) is not str:
                    raise NotSerialisableError(f"the metadata has the key {key!r}")
                writer = self._writers.get(key, self._values.write)
                try:
                    written[key] = writer(value)
                except NotSerialisableError as error:
                    error.args = (f"{error} (in meta[{key!r}])",)
                    raise
        return written

    def finish(self) -> dict[str, Any]:
        """Return the tables."""
        return {"stacks": list(self._stacks), "sources": list(self._sources)}

    def _stack(self, stack: Any) -> Any:
        known = self._seen.get(id(stack))
        if known is None:
            if not isinstance(stack, dict):
                return self._values.write(stack)
            entries = tuple((key, path, _class_name(kind)) for key, (path, kind) in stack.items())
            if not all(isinstance(part, str) for entry in entries for part in entry):
                raise NotSerialisableError("a stack of modules has something else than names")
            known = self._seen[id(stack)] = (stack, self._stacks.setdefault(entries, len(self._stacks)))
        return {"stack": known[1]}

    def _history(self, sources: Any) -> Any:
        if not isinstance(sources, list):
            return self._values.write(sources)
        return {"history": [self._source(source, 0) for source in sources]}

    def _source(self, source: Any, depth: int) -> int:
        known = self._seen.get(id(source))
        if known is None:
            if type(source) is not NodeSource or depth > _DEEPEST_HISTORY:
                raise NotSerialisableError("a history of a node that torch did not write")
            parents = tuple(self._source(parent, depth + 1) for parent in source.from_node)
            info = source.node_info
            fields = (None, "", 0) if info is None else (info.name, info.target, self._graph(info.graph_id))
            entry = (*fields, source.pass_name, tuple(action.value for action in source.action), parents)
            known = self._seen[id(source)] = (source, self._sources.setdefault(entry, len(self._sources)))
        return known[1]

    def _graph(self, identifier: int) -> int:
        return self._graphs.setdefault(identifier, len(self._graphs) + 1)

    def _functions(self, stack: Any) -> Any:
        if not isinstance(stack, (list, tuple)) or not all(isinstance(one, tuple) and len(one) == 2 for one in stack):
            return self._values.write(stack)
        return {
            "functions": [
                [self._values.write(name), function if isinstance(function, str) else [self._function(function)]]
                for name, function in stack
            ]
        }

    def _function(self, function: Any) -> Any:
        try:
            return self._values.target(function)
        except NotSerialisableError:
            return name_source(function)


def _class_name(kind: Any) -> Any:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else kind


class MetadataReader:
    """Reads the metadata of nodes, which share equal stacks of modules and parts of histories, as in torch."""

    def __init__(self, tree: Mapping[str, Any], values: ValueReader) -> None:
        self._values = values
        self._stacks = [{_text(key): (_text(path), _text(kind)) for key, path, kind in one} for one in tree["stacks"]]
        self._sources: list[NodeSource] = []
        depths: list[int] = []
        for name, target, graph, pass_name, actions, parents in tree["sources"]:
            if type(graph) is not int:
                raise ValueError("the graph in a history is a number")
            found = [pick(self._sources, parent) for parent in parents]
            depths.append(1 + max((depths[parent] for parent in parents), default=0))
            if depths[-1] > _DEEPEST_HISTORY + 1:
                raise ValueError("a history nests too deep")
            named = None if name is None else _text(name)
            self._sources.append(make_source(named, _text(target), graph, _text(pass_name), actions, found))

    def read(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Read the metadata of a node."""
        read = self._values.read
        found = {}
        for key, tree in meta.items():
            if type(tree) is dict and key in ("nn_module_stack", "from_node", "source_fn_stack"):
                found[key] = self._special(tree)
            else:
                found[key] = read(tree)
        return found

    def _special(self, tree: Mapping[str, Any]) -> Any:
        ((kind, content),) = tree.items()
        if kind == "stack":
            return pick(self._stacks, content)
        if kind == "history":
            return [pick(self._sources, number) for number in content]
        if kind == "functions":
            return [(self._values.read(name), self._function(function)) for name, function in content]
        return self._values.read(tree)

    def _function(self, function: Any) -> Any:
        if isinstance(function, str):
            return function
        (named,) = function
        return find_source(named) if isinstance(named, str) else self._values.target(named)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a name is a text, got {str(value)[:80]!r}")
    return value
