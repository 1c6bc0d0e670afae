"""Step tag: let a partitioner claim nodes of a private copy of the method, and check that it only tagged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from executorch.exir.backend.partitioner import DelegationSpec, Partitioner
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from exir_lowering import graphs
from exir_lowering._upstream.programs import fix_signature
from exir_lowering.errors import PartitionerContractError, PluginLoadError, UnknownPluginError
from exir_lowering.graphs import DELEGATION_TAG, LIFTED_ORDER, measures
from exir_lowering.model import Rejection, TaggedMethod
from exir_lowering.plugins import asking, registry
from exir_lowering.plugins.backend import ExecutorchBackend
from exir_lowering.steps import invariants

Treatment = Callable[[str, str, str], str | int | None]
"""Takes a method, a backend and an operator: returns why the backend does not get it, or in which piece; None for as it
is."""


def tag(
    method: str, program: ExportedProgram, partitioner: Partitioner, state: asking.FakeState, *, strict: bool = False
) -> TaggedMethod:
    """Run a partitioner on a private copy of a method, with fake parameters and buffers; return what it tagged.

    If strict, a check of a node that raises is an error; otherwise it is the reason why the node stays on the host.
    """
    who = f"Partitioner {type(partitioner).__name__} on method {method!r}"
    view = asking.view_of(program, state)
    graphs.strip_tags(view.graph_module)
    fix_signature(view)  # partitioners only tag
    graph = invariants.fingerprint(program.graph_module)
    metadata = [dict(node.meta) for _, node in graphs.every_node(program.graph_module)]
    specs = [*program.graph_signature.input_specs], [*program.graph_signature.output_specs]
    answer = asking.ask(who, partitioner, view, strict)
    if (found := _find_change(graph, metadata, specs, answer.tagged)) is not None:
        name, change = found
        raise PartitionerContractError(
            f"{who} {change}. A partitioner may only set node.meta[{DELEGATION_TAG!r}]; run passes that rewrite the "
            "graph before lowering.",
            violation="graph_modified",
            details={"partitioner": partitioner, **({"node": name} if name else {})},
        )
    _check_tags(who, answer.tagged, answer.destinations)
    return TaggedMethod(
        name=method,
        program=graphs.copy_program(program, answer.tagged.graph_module),
        destinations=answer.destinations,
        rejections=tuple(replace(rejection, method=method) for rejection in answer.rejections()),
        adjustments=tuple(replace(adjustment, method=method) for adjustment in answer.adjustments),
    )


def _find_change(
    before: Sequence[Any], metadata: Sequence[Any], specs: tuple[list[Any], list[Any]], tagged: ExportedProgram
) -> tuple[str, str] | None:
    """Return where, and how a partitioner has changed more than tags and new metadata; None if it has not."""
    after = invariants.fingerprint(tagged.graph_module)
    if before != after:
        name, *_ = next((b or a for b, a in zip(before, after, strict=False) if b != a), (*before, *after)[-1])
        counts = f"({len(before)} nodes before, {len(after)} after)"
        return name, f"changed the graph, first at node {name} {counts}"
    for (name, *_), (_, node), given in zip(before, graphs.every_node(tagged.graph_module), metadata, strict=True):
        if lost := given.keys() - node.meta.keys():
            return name, f"removed meta[{min(lost)!r}] of node {name}"
        value, seen = given.get("val"), node.meta.get("val")
        if value is not seen and (types := [_type_of(one) for one in (value, seen)])[0] != types[1]:
            return name, f"changed meta['val'] of node {name} from {types[0]} to {types[1]}"
    now = tagged.graph_signature.input_specs, tagged.graph_signature.output_specs
    for what, old, new in zip(("inputs", "outputs"), specs, now, strict=True):
        if old != new:
            return "", f"changed the signature, which has {len(new)} {what}, expected the {len(old)} it was given"
    return None


def _type_of(value: Any) -> str:
    found = [f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in measures.tensors(value)]
    return ", ".join(found) or f"a {type(value).__name__}"


def known_failures(tagged: TaggedMethod, backends: Mapping[str, Any] | None) -> Treatment | None:
    """Return how to leave what the backends are known to fail on; None if nothing is."""
    checks: dict[str, Callable[[Any], str | None]] = {}
    for backend_id in {spec.backend_id for spec in tagged.destinations.values()}:
        with suppress(UnknownPluginError, PluginLoadError):  # a plan needs no backend
            backend = registry.find_backend(backend_id, backends)
            if isinstance(backend, ExecutorchBackend) and type(backend).refuse is not ExecutorchBackend.refuse:
                checks[backend_id] = backend.refuse
    found: dict[str, str] = {}
    for path, node in graphs.every_node(tagged.program.graph_module) if checks else ():
        own = node.meta.get(DELEGATION_TAG) if node.op == "call_function" else None
        check = None if own is None else checks.get(tagged.destinations[own].backend_id)
        if check is not None and (why := check(node.args[0] if graphs.is_getitem(node) else node)) is not None:
            found[graphs.qualified_name(path, node)] = why
    return (lambda method, backend_id, name: found.get(name)) if found else None


def retag(tagged: TaggedMethod, treatment: Treatment) -> TaggedMethod:
    """Return a tagged method, whose tags are changed in place, without what a backend does not get, and in pieces."""
    destinations, rejections = dict(tagged.destinations), list(tagged.rejections)
    for path, node in graphs.every_node(tagged.program.graph_module):
        own = node.meta.get(DELEGATION_TAG) if node.op == "call_function" else None
        if own is None:
            continue
        name, spec = graphs.qualified_name(path, node), destinations[own]
        found = treatment(tagged.name, spec.backend_id, name)
        if isinstance(found, str):
            del node.meta[DELEGATION_TAG]
            about = (tagged.name, name, graphs.operator_name(node), found)
            rejections.append(Rejection(*about, spec.backend_id, "backend_failed"))
        elif found is not None:
            part = f"{own}-{found}"
            while part in tagged.destinations:  # a partitioner may call its own tags so
                part += "-"
            node.meta[DELEGATION_TAG], destinations[part] = part, spec
    for node in tagged.program.graph.find_nodes(op="placeholder"):  # a constant without copies follows its readers
        if node.meta.get("no_copy") and node.meta.pop(DELEGATION_TAG, None) is not None:
            tags = {user.meta.get(DELEGATION_TAG) for user in node.users}
            if len(tags) == 1 and None not in tags:
                (node.meta[DELEGATION_TAG],) = tags
    return replace(tagged, destinations=destinations, rejections=tuple(rejections))


def _check_tags(who: str, tagged: ExportedProgram, destinations: Mapping[str, DelegationSpec]) -> None:
    specs = graphs.placeholders(tagged)
    for path, node in graphs.staying_nodes(tagged.graph_module):
        name = node.meta.get(DELEGATION_TAG)
        if name is None:
            continue
        if node.op == "output":
            violation = "output_tagged"
            problem = f"the output node {node.name} with {name!r}. Tag the operators, not what they return."
        elif node in specs and specs[node].kind not in LIFTED_ORDER:
            violation, kind = "input_tagged", specs[node].kind
            what = "a user input" if kind is InputKind.USER_INPUT else kind.name.lower().replace("_", " ")
            problem = (
                f"{node.name} with {name!r}, an input of the model ({what}). Expected tags on operators, parameters, "
                "buffers and lifted constants only."
            )
        elif not isinstance(name, str) or name not in destinations:
            violation = "tag_without_destination"
            problem = (
                f"{'.'.join((*path, node.name))} with {name!r}, but partition_tags has no destination for it (it has: "
                f"{', '.join(map(repr, destinations)) or 'none'}). Add it with a DelegationSpec."
            )
        else:
            continue
        details = {"node": node.name, "tag": name}
        raise PartitionerContractError(f"{who} tagged {problem}", violation=violation, details=details)
