"""Repros of an error or failure, without the rest of the model: a partition, its inputs, and a script."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.operators import wrapped_operator
from exir_lowering.errors import InputError, let_through
from exir_lowering.graphs import debug_handles
from exir_lowering.lowered import LoweredMethods
from exir_lowering.lowered_module import convention
from exir_lowering.model import Partition, RefusedPartition
from exir_lowering.plugins import registry
from exir_lowering.plugins.addresses import NoAddressError, find_address, find_delegate_address
from exir_lowering.verification.cases import Call
from exir_lowering.verification.checking import Comparison
from exir_lowering.verification.eager import Eager, find_sharing
from exir_lowering.verification.results import Suspect

_SCRIPT = '''\
"""Lowers, runs, times and compares {operators} in {backend_id}."""

import time
from pathlib import Path

import torch
from exir_lowering import CompileSpec, LoweringOptions, load, lower, verify
from exir_lowering.partitioners import SupportPartitioner, everything
{imports}
folder, specs, backends, delegates = Path(__file__).parent, {specs}, {backends}, {delegates}
program, calls = torch.export.load(folder / "partition.pt2"), torch.load(folder / "inputs.pt", weights_only=True)
partitioner = SupportPartitioner({{{backend_id!r}: everything()}}, compile_specs=specs, own_state=True)
artifact = lower(program, partitioner, backends=backends, options=LoweringOptions(rewrites="none")).emit()
loaded, begun = load(artifact.buffer, delegates=delegates), time.perf_counter()
outputs = [loaded.run("forward", *call) for call in calls]
print(f"{{(time.perf_counter() - begun) / max(len(calls), 1) * 1e3:.3f}} ms for a call, of {{len(calls)}}")
found = verify(artifact, program, calls or None, delegates=delegates)
print(found)
raise SystemExit(0 if found.ok else 2)
'''


@dataclass(frozen=True, slots=True, eq=False)
class Repro:
    """A lowering that shows an error, and in which calls."""

    lowered: LoweredMethods
    edge: Mapping[str, ExportedProgram]
    comparison: Comparison | None
    calls: Sequence[Call]
    backends: Mapping[str, Any] | None
    delegates: Mapping[str, Any]

    def save(self, folder: Path, suspects: Sequence[Suspect]) -> Path:
        """Write the files; InputError if that is impossible."""
        node, module = self._find(suspects[0])
        with torch.random.fork_rng(devices=()):
            inputs = self._list_inputs(suspects[0].method, node)
        operators = [one.node.operator for one in suspects]
        script = _make_script(module, operators, self.backends, self.delegates)
        return _write(folder, module.original_module, inputs, script)

    def _find(self, suspect: Suspect) -> tuple[Node, Any]:
        """Return the call of the delegate that has an operator, and the delegate."""
        owner = self.lowered.programs[suspect.method].graph_module
        for node in filter(graphs.is_delegate_call, owner.graph.nodes):
            module = graphs.attribute(owner, str(node.args[0].target))
            if any(
                graphs.is_operator(one) and one.name == suspect.node.name for one in module.original_module.graph.nodes
            ):
                return node, module
        raise InputError(f"Culprit.save: {suspect.node.name} is in a branch or loop, which cannot be saved alone.")

    def _list_inputs(self, method: str, node: Node) -> list[tuple[Any, ...]]:
        """Return what the delegate is given in each call, by PyTorch."""
        if self.comparison is None:
            return []
        eager = Eager({name: self.edge[name] for name in self.comparison.subjects}, find_sharing(self.comparison.file))
        wanted = [argument for argument in node.args[1:] if isinstance(argument, Node)]
        found = _watch(eager, [(call.method, call.inputs) for call in self.calls], method, wanted)
        if found is None:
            raise InputError("Culprit.save: the delegate reads what another one writes; it cannot be saved alone.")
        return found


def save_repro(
    lowered: LoweredMethods,
    refused: RefusedPartition,
    folder: str | os.PathLike[str],
    *,
    backends: Mapping[str, Any] | None = None,
) -> Path:
    """Write a repro of a backend's failure, without the rest of the model: `partition.pt2`, `inputs.pt`, `repro.py`.

    The inputs are what PyTorch gives the partition for the example inputs of the export, none if that is not known.

    Args:
        lowered: What `lower` returned with `LoweringOptions(on_backend_error="fallback")` or `"split"`.
        refused: The failure, one of `lowered.report.refused`.
        folder: Where to write; created if missing.
        backends: As for `lower`.

    Returns:
        The path of the script, which lowers, runs, times and compares.

    Raises:
        InputError: `refused` is not a failure of this lowering, torch cannot save it, or nothing can be written there.
        UnknownPluginError: `backends` lacks a backend that `lower` was given.
    """
    if refused not in lowered.report.refused:
        raise InputError(f"save_repro: got {refused!r}, expected one of `lowered.report.refused`.")
    partition = lowered.failed[lowered.report.refused.index(refused)]
    operators = map(graphs.operator_name, filter(graphs.is_operator, partition.program.graph.nodes))
    script = _make_script(partition, operators, backends, {})
    inputs = _find_inputs(lowered.edge_programs[partition.method], partition)
    return _write(Path(folder), partition.program, inputs, script)


def _find_inputs(program: ExportedProgram, partition: Partition) -> list[tuple[Any, ...]]:
    """Return what a partition is given for the example inputs of its method; [] if that cannot be computed."""
    names = set(partition.program.graph_signature.user_inputs)
    method, wanted = partition.method, [node for node in partition.program.graph.nodes if node.name in names]
    if program.example_inputs is None or partition.site.graph_path:  # in a branch or loop
        return []
    try:
        inputs = convention.of_program(method, program).bind(*program.example_inputs)
        with torch.random.fork_rng(devices=()):
            return _watch(Eager({method: program}, {}), [(method, inputs)], method, wanted) or []
    except Exception as error:  # such as an operator that only the backend has
        let_through(error)
        return []


def _watch(
    eager: Eager, calls: Iterable[tuple[str, Sequence[Any]]], method: str, wanted: Sequence[Node]
) -> list[tuple[Any, ...]] | None:
    """Return what nodes of a method are in each of its calls, by PyTorch; None if it does not compute all of them."""
    found: list[tuple[Any, ...]] = []
    values: dict[str, Any] = {}
    # What another delegate makes may have the name of something else.
    handles = {node.name: debug_handles.handle(node) for node in wanted}

    def keep(seen: Node, value: Any) -> None:
        if seen.name in handles and debug_handles.handle(seen) in (None, handles[seen.name]):
            values[seen.name] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    for name, inputs in calls:
        eager.run(name, inputs, keep if name == method else None)
        if name == method:
            if values.keys() != handles.keys():
                return None
            found.append(tuple(map(values.__getitem__, handles)))
    return found


def _make_script(
    made: Any, operators: Iterable[str], backends: Mapping[str, Any] | None, delegates: Mapping[str, Any]
) -> str:
    """Return the script for a partition; what no other process can import is left to the reader, with the reason."""
    backend_id = made.backend_id
    specs = ", ".join(f"CompileSpec({spec.key!r}, {bytes(spec.value)!r})" for spec in made.compile_specs)
    imports, names = "", []
    given = {**registry.registered(registry.DELEGATES), **delegates}.get(backend_id)
    for plugin, find in ((registry.find_backend(backend_id, backends), find_address), (given, find_delegate_address)):
        line, name = ("", "None") if plugin is None else _import(plugin, find)
        imports += line
        names.append(name if name == "None" else f"{{{backend_id!r}: {name}}}")
    return _SCRIPT.format(
        operators=", ".join(dict.fromkeys(operators)),
        backend_id=backend_id,
        imports=imports,
        specs=f"{{{backend_id!r}: [{specs}]}}",
        backends=names[0],
        delegates=names[1],
    )


def _write(folder: Path, program: ExportedProgram, inputs: Sequence[tuple[Any, ...]], script: str) -> Path:
    """Write the files; InputError if that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.export.save(_as_aten(program), folder / "partition.pt2")
        torch.save(inputs, folder / "inputs.pt")
        (folder / "repro.py").write_text(script, encoding="utf-8")
    except Exception as error:  # torch raises a RuntimeError where it cannot write
        let_through(error)
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]  # torch adds tracebacks
        raise InputError(f"Cannot write to {str(folder)!r}: {reason}.") from error
    return folder / "repro.py"


def _import(plugin: Any, find: Callable[[Any], str]) -> tuple[str, str]:
    """Return a line that imports a plug-in, and its name."""
    try:
        module, _, name = find(plugin).partition(":")
    except NoAddressError as error:
        return f"# To do: {error}.\n", "None"
    return f"from {module} import {name.partition('.')[0]}\n", name


def _as_aten(program: ExportedProgram) -> ExportedProgram:
    """Return an Edge program as one that can be saved: Edge operators wrap those of ATen."""
    copied = graphs.copy_graph_module(program.graph_module)
    for _, module in graphs.walk(copied):
        for node in module.graph.nodes:
            node.target = wrapped_operator(node.target) if node.op == "call_function" else node.target
        module.recompile()
    own = (program.state_dict, program.range_constraints, program.module_call_graph)
    return ExportedProgram(copied, copied.graph, graphs.copy_signature(program), *own, constants=program.constants)
