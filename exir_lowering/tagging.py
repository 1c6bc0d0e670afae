"""Step tag: let a partitioner claim nodes of a private copy of the method, and check that it only tagged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from exir_lowering import _upstream, checks, graphs, refusals
from exir_lowering.errors import InputError, PartitionerContractError
from exir_lowering.graphs import DELEGATION_TAG, LIFTED_ORDER
from exir_lowering.model import Adjustment, Rejection, TaggedMethod

FakeState = dict[str, Any]
_Said = TypeVar("_Said", Rejection, Adjustment)


def fake_state(program: ExportedProgram) -> FakeState:
    """Return fake tensors for a program's parameters and buffers: partitioners look at shapes, not at values.

    A program without any fake tensor lends its own (nothing is copied).
    """
    mode = _upstream.fake_mode_of(program.graph_module)
    if mode is None:
        return dict(program.state_dict)
    return {name: mode.from_tensor(tensor, static_shapes=True) for name, tensor in program.state_dict.items()}


def tag(method: str, program: ExportedProgram, partitioner: Partitioner, state: FakeState) -> TaggedMethod:
    """Run one partitioner on one method.

    Args:
        method: The method's name.
        program: The method in Edge dialect. It is not changed.
        partitioner: The partitioner; it sees the graph, fake parameters and buffers, and the real constants.
        state: The fake parameters and buffers, see `fake_state`.

    Returns:
        A copy of the program with tags.

    Raises:
        PartitionerContractError: The partitioner raised, returned something else, changed the graph, tagged an input
            or the output, or used a tag without saying where it goes.
    """
    who = f"Partitioner {type(partitioner).__name__} on method {method!r}"
    view = graphs.copy_program(program)
    view.state_dict.clear()
    view.state_dict.update({name: state[name] for name in program.state_dict})
    graphs.strip_tags(view.graph_module)
    with refusals.heard() as heard:
        result = _run(who, partitioner, view)
    tagged = result.tagged_exported_program
    _check_graph(who, partitioner, program, tagged)
    destinations = _destinations(who, partitioner, result)
    _check_tags(who, tagged, destinations)
    given = {rejection.node: rejection for rejection in _said(who, method, result, "rejections", Rejection)}
    return TaggedMethod(
        name=method,
        program=graphs.copy_program(program, tagged.graph_module),
        destinations=destinations,
        rejections=refusals.rejections(method, tagged, partitioner, given, heard),
        adjustments=_said(who, method, result, "adjustments", Adjustment),
    )


def _run(who: str, partitioner: Partitioner, view: ExportedProgram) -> Any:
    try:
        result = partitioner(view)
    except InputError as error:  # of a partitioner of this package: the user's mistake, not the partitioner's
        raise InputError(f"{who}: {error}") from error
    except PartitionerContractError as error:
        raise PartitionerContractError(f"{who}: {error}", violation=error.violation, details=error.details) from error
    except Exception as error:
        raise PartitionerContractError(f"{who} raised {type(error).__name__}: {error}", violation="raised") from error
    if not isinstance(getattr(result, "tagged_exported_program", None), ExportedProgram):
        raise PartitionerContractError(
            f"{who} returned {type(result).__name__}, expected a PartitionResult with the tagged ExportedProgram.",
            violation="result_type",
        )
    return result


def _check_graph(who: str, partitioner: Partitioner, program: ExportedProgram, tagged: ExportedProgram) -> None:
    before, after = checks.fingerprint(program.graph_module), checks.fingerprint(tagged.graph_module)
    if before == after:
        return
    first = next((b or a for b, a in zip(before, after, strict=False) if b != a), (before + after)[-1])
    raise PartitionerContractError(
        f"{who} changed the graph, first at node {first[0]} ({len(before)} nodes before, {len(after)} after). A "
        f"partitioner may only set node.meta[{DELEGATION_TAG!r}]; run passes that rewrite the graph before lowering.",
        violation="graph_modified",
        details={"partitioner": partitioner, "node": first[0]},
    )


def _destinations(who: str, partitioner: Partitioner, result: Any) -> dict[str, DelegationSpec]:
    tags = getattr(result, "partition_tags", None)
    if not isinstance(tags, Mapping):
        raise PartitionerContractError(
            f"{who} returned partition_tags={tags!r}, expected a mapping from each tag to a DelegationSpec.",
            violation="destinations",
            details={"partitioner": partitioner},
        )
    for name, spec in tags.items():
        specs = getattr(spec, "compile_specs", None)
        well_formed = isinstance(specs, (list, tuple)) and all(isinstance(item, CompileSpec) for item in specs)
        if not isinstance(getattr(spec, "backend_id", None), str) or not well_formed:
            raise PartitionerContractError(
                f"{who} sends tag {name!r} to {spec!r}, expected DelegationSpec(backend_id, [CompileSpec, ...]).",
                violation="destinations",
                details={"partitioner": partitioner},
            )
    return dict(tags)


def _check_tags(who: str, tagged: ExportedProgram, destinations: Mapping[str, DelegationSpec]) -> None:
    specs = dict(
        zip(
            (node for node in tagged.graph.nodes if node.op == "placeholder"),
            tagged.graph_signature.input_specs,
            strict=True,
        )
    )
    for path, node in graphs.staying_nodes(tagged.graph_module):
        name = node.meta.get(DELEGATION_TAG)
        if name is None:
            continue
        if node.op == "output":
            raise PartitionerContractError(
                f"{who} tagged the output node {node.name} with {name!r}. Tag the operators, not what they return.",
                violation="output_tagged",
                details={"node": node.name, "tag": name},
            )
        if node in specs and specs[node].kind not in LIFTED_ORDER:
            raise PartitionerContractError(
                f"{who} tagged {node.name} with {name!r}, an input of the model ({_kind(specs[node])}). Expected "
                f"tags on operators, parameters, buffers and lifted constants only.",
                violation="input_tagged",
                details={"node": node.name, "tag": name},
            )
        if not isinstance(name, str) or name not in destinations:
            raise PartitionerContractError(
                f"{who} tagged {'.'.join((*path, node.name))} with {name!r}, but partition_tags has no destination "
                f"for it (it has: {', '.join(map(repr, destinations)) or 'none'}). Add it with a DelegationSpec.",
                violation="tag_without_destination",
                details={"node": node.name, "tag": name},
            )


def _kind(spec: Any) -> str:
    return "a user input" if spec.kind is InputKind.USER_INPUT else spec.kind.name.lower().replace("_", " ")


def _said(who: str, method: str, result: Any, name: str, kind: type[_Said]) -> tuple[_Said, ...]:
    """Return what a partitioner says beside its tags, for this method."""
    given = getattr(result, name, None) or ()
    if not isinstance(given, (list, tuple)) or not all(isinstance(item, kind) for item in given):
        raise PartitionerContractError(
            f"{who} returned {name}={given!r}, expected a list of exir_lowering.{kind.__name__}.",
            violation="result_type",
        )
    return tuple(replace(item, method=method) for item in given)


__all__ = ["FakeState", "fake_state", "tag"]
