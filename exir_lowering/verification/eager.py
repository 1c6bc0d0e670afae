"""The programs in eager PyTorch, node by node, with state of their own that methods share as in the file."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Interpreter, Node

from exir_lowering import graphs
from exir_lowering._upstream.ambient import neutral
from exir_lowering._upstream.operators import is_composite, is_overload, list_arguments
from exir_lowering._upstream.tensors import version
from exir_lowering.graphs.copies import memory_key
from exir_lowering.graphs.walking import writes
from exir_lowering.lowered_module.bundled import copied
from exir_lowering.pte.format import program_signatures
from exir_lowering.runtime.source import ProgramFile

_STATE = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)


Sharing = Mapping[str, Mapping[str, bool]]
"""By each method of a file that shares state: whether other methods have a state, by what the model calls it."""


def find_sharing(file: ProgramFile) -> Sharing:
    """Return what is shared in a file."""
    found = program_signatures(file.methods)
    return {name: {state.name: bool(state.shared_with) for state in found[name].state} for name in file.sharing}


@dataclass(slots=True, eq=False)
class Method:
    """A program with its state."""

    program: ExportedProgram
    lifted: dict[Node, Any]  # what its placeholders for weights and state hold
    own: dict[Node, torch.Tensor]  # the state among it: copies
    stateful: bool = False  # whether a call has written any of it


@dataclass(slots=True, eq=False)
class Eager:
    """Programs that are run in eager PyTorch; what the caller holds is only read."""

    programs: Mapping[str, ExportedProgram]
    sharing: Sharing
    _methods: dict[str, Method] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Give the programs their initial state."""
        keys = _state_keys(self.programs, self.sharing)
        copies: dict[Hashable, torch.Tensor] = {}
        known = {name: method.stateful for name, method in self._methods.items()}
        for name, program in self.programs.items():
            lifted = _lifted(program)
            own = {}
            for node, value in lifted.items():
                key = keys.get((name, node.name))
                if key is not None:
                    if key not in copies:
                        with neutral():
                            (copies[key],) = copied([value])
                    own[node] = lifted[node] = copies[key]
            self._methods[name] = Method(program, lifted, own, known.get(name, False))

    def is_stateful(self, *names: str) -> bool:
        """Return whether calls so far, of some methods or of any, have written state."""
        return any(self._methods[name].stateful for name in names or self._methods)

    def snapshot(self, name: str) -> list[torch.Tensor]:
        """Return the state of a method, for `restore`."""
        return [tensor.clone() for tensor in self._methods[name].own.values()]

    def restore(self, name: str, state: Sequence[torch.Tensor]) -> None:
        """Give a method a state that it had before."""
        for tensor, value in zip(self._methods[name].own.values(), state, strict=True):
            tensor.copy_(value)

    def run(self, name: str, inputs: Sequence[Any], by: Callable[..., Interpreter] = Interpreter) -> list[Any]:
        """Run a method; return what a file returns: new values of inputs that it writes, then its outputs.

        An interpreter of torch executes it, or one of another kind.
        """
        method = self._methods[name]
        written = [*map(version, method.own.values())]
        with neutral():
            given = copied(inputs)
            before = [*map(_version, given)]
            left, placeholders = iter(given), method.program.graph.find_nodes(op="placeholder")
            ordered = [method.lifted[node] if node in method.lifted else next(left) for node in placeholders]
            interpreter = by(method.program.graph_module)
            interpreter.extra_traceback = False
            results = interpreter.run(*ordered, enable_io_processing=False)
            outputs = self._write_state(method, results)
            touched = [value for value, count in zip(given, before, strict=True) if _version(value) != count]
            method.stateful |= written != [*map(version, method.own.values())]
            return copied([*touched, *outputs])

    def _write_state(self, method: Method, results: Sequence[Any]) -> list[Any]:
        """Write the new state, all at once, and return what is left: the outputs."""
        specs = method.program.graph_signature.output_specs
        targets = {str(spec.target): node for node, spec in graphs.lifted_inputs(method.program).items()}
        outputs, new = [], []
        for spec, result in zip(specs, results, strict=True):
            if spec.kind in _STATE:
                new.append((method.own[targets[str(spec.target)]], result.clone()))
            elif spec.kind in (OutputKind.USER_INPUT_MUTATION, OutputKind.USER_OUTPUT):
                outputs.append(result)
        for state, value in new:
            state.copy_(value)
        return outputs


def _version(value: Any) -> int:
    return version(value) if isinstance(value, torch.Tensor) else 0


def _lifted(program: ExportedProgram) -> dict[Node, Any]:
    specs = graphs.placeholders(program).items()
    return {
        node: graphs.lifted_value(program, spec.target) for node, spec in specs if spec.kind is not InputKind.USER_INPUT
    }


def _state_keys(programs: Mapping[str, ExportedProgram], sharing: Sharing) -> dict[tuple[str, str], Hashable]:
    """Return what is equal for lifted inputs, by method and name of the node, that are one state in the file.

    Methods that share state in the file share what was one memory at export, and what has one name if the file says
    that it is shared. Where it has no names and nothing was one memory, as the programs come from several files, they
    share all that has one name.
    """
    tensors = {
        name: {node: value for node, value in _lifted(program).items() if isinstance(value, torch.Tensor)}
        for name, program in programs.items()
    }
    written = {name: _may_write(program) & tensors[name].keys() for name, program in programs.items()}
    memories = {name: set(map(memory_key, own.values())) for name, own in tensors.items()}
    shared = [name for name in programs if name in sharing]

    def is_in_others(name: str, tensor: torch.Tensor) -> bool:
        return any(memory_key(tensor) in memories[other] for other in shared if other != name)

    by_name = len(shared) > 1 and not any(
        is_in_others(name, tensors[name][node]) for name in shared for node in written[name]
    )
    keys: dict[tuple[str, str], Hashable] = {}
    state: set[Hashable] = set()
    for name, program in programs.items():
        for node, spec in graphs.lifted_inputs(program).items():
            tensor = tensors[name].get(node)
            if tensor is not None:
                known = sharing.get(name, {}).get(str(spec.target))  # None if the file does not say it
                one = name in sharing if known is None else known
                named = one and (by_name or (known is not None and not is_in_others(name, tensor)))
                own = (str(spec.target), tensor.dtype, tuple(tensor.shape)) if named else memory_key(tensor)
                keys[name, node.name] = key = ("" if one else name, own)
                if node in written[name]:
                    state.add(key)
    return {place: key for place, key in keys.items() if key in state}


def list_apart(programs: Mapping[str, ExportedProgram], sharing: Sharing) -> dict[str, tuple[str, ...]]:
    """Return the state that is one in eager PyTorch and not in the file, by name, with the methods that use it.

    That is what was one memory at export. Of programs that come from several files, it is what has one name if all
    weights of one name are the same.
    """
    eager, own = _state_keys(programs, {name: {} for name in programs}), _state_keys(programs, sharing)
    groups: dict[Hashable, dict[tuple[str, str], tuple[str, Any]]] = {}
    weights: dict[str, dict[str, torch.Tensor]] = {}
    for name, program in programs.items():
        for node, spec in graphs.lifted_inputs(program).items():
            place, target, value = (name, node.name), str(spec.target), graphs.lifted_value(program, spec.target)
            if place in eager and node.users:
                groups.setdefault(eager[place], {})[place] = target, memory_key(value)
            elif isinstance(value, torch.Tensor):
                weights.setdefault(name, {})[target] = value
    found = {}
    for group in groups.values():
        methods, (target, _) = [*dict.fromkeys(name for name, _ in group)], next(iter(group.values()))
        one = len({memory for _, memory in group.values()}) == 1 or all(
            _are_copies(weights.get(methods[0], {}), weights.get(name, {})) for name in methods[1:]
        )
        if one and len({own.get(place, place) for place in group}) > 1:
            found[target] = tuple(methods)
    return found


def _are_copies(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Return whether weights are those of one model, read from two files."""
    pairs = [(one[name], other[name]) for name in one.keys() & other.keys()]
    apart = set(map(memory_key, one.values())).isdisjoint(map(memory_key, other.values()))
    return apart and bool(pairs) and all(torch.equal(*pair) for pair in pairs)


def _may_write(program: ExportedProgram) -> set[Node]:
    """Return the lifted inputs that a program may write: by its signature, and where operators work in place."""
    names, lifted = graphs.written_state(program), graphs.lifted_inputs(program)
    weights = {node for node, spec in lifted.items() if spec.kind is InputKind.PARAMETER}
    pending = [
        operand
        for node in program.graph.nodes
        if graphs.is_mutating(node)
        or any(writes(nested.module) for nested in graphs.nested_graphs(program.graph_module, node))
        for operand in _aliased(node)
    ]
    seen: set[Node] = set()
    while pending:
        node = pending.pop()
        if node not in seen and node.op == "call_function":
            # What operators return undeclared may be state; that it is a weight would take a copy of most weights.
            declared = is_overload(node.target) and not is_composite(node.target)
            pending += [one for one in _aliased(node) if declared or one not in weights]
        seen.add(node)
    return {node for node, spec in lifted.items() if spec.target in names or node in seen}


def _aliased(node: Node) -> Iterator[Node]:
    """Yield the operands that a node writes, or whose memory its result may be in."""
    if not is_overload(node.target) or (is_composite(node.target) and not graphs.is_mutating(node)):
        yield from node.all_input_nodes
        return
    for index, argument in enumerate(list_arguments(node.target)):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        for entry in value if isinstance(value, (list, tuple)) else (value,):
            if argument.aliased and isinstance(entry, Node):
                yield entry
