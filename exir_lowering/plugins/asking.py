"""Run a partitioner, record why it leaves nodes on the host, and check the form of its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner
from torch.export import ExportedProgram

from exir_lowering.errors import InputError, PartitionerContractError, exception_text
from exir_lowering.graphs import sources
from exir_lowering.model import Adjustment, Rejection
from exir_lowering.plugins import refusals
from exir_lowering.plugins.refusals import Refusals

_Said = TypeVar("_Said", Rejection, Adjustment)


def asked_of_forms(partitioner: Partitioner) -> Partitioner:
    """Return who says whether a few operators would be taken: one that weighs whole partitions names another one."""
    asked: Partitioner = getattr(partitioner, "asked_of_forms", partitioner)
    return asked


@dataclass(frozen=True, slots=True)
class Answer:
    """What a partitioner returned."""

    tagged: ExportedProgram  # the one that it was given, or a copy
    destinations: dict[str, DelegationSpec]  # by tag
    given: Mapping[str, Rejection]  # the rejections that it returned, by node
    adjustments: tuple[Adjustment, ...]
    reported: Refusals  # what it reported about nodes in ExecuTorch's ways


def ask(who: str, partitioner: Partitioner, program: ExportedProgram) -> Answer:
    """Run a partitioner, which errors call `who`.

    Raises InputError if it refuses its user's arguments, PartitionerContractError if it raised, or returned something
    other than a PartitionResult.
    """
    with refusals.listen() as reported:
        result = _run(who, partitioner, program)
    given = _read_remarks(who, result, "rejections", Rejection)
    return Answer(
        tagged=result.tagged_exported_program,
        destinations=_destinations(who, partitioner, result),
        given={rejection.node: rejection for rejection in given},
        adjustments=_read_remarks(who, result, "adjustments", Adjustment),
        reported=reported,
    )


def _run(who: str, partitioner: Partitioner, view: ExportedProgram) -> Any:
    try:
        result = partitioner(view)
    except InputError as error:  # from a partitioner of this package: the user's mistake, not the partitioner's
        raise InputError(f"{who}: {error}") from error
    except PartitionerContractError as error:
        raise PartitionerContractError(f"{who}: {error}", violation=error.violation, details=error.details) from error
    except MemoryError:
        raise
    except Exception as error:
        raised = sources.find_raised_at(error, type(partitioner))
        at = "" if raised is None else f"\n  raised at {raised}"
        message = f"{who} raised {exception_text(error)}{at}"
        raise PartitionerContractError(message, violation="raised") from error
    if not isinstance(getattr(result, "tagged_exported_program", None), ExportedProgram):
        raise PartitionerContractError(
            f"{who} returned {type(result).__name__}, expected a PartitionResult with the tagged ExportedProgram.",
            violation="result_type",
        )
    return result


def _destinations(who: str, partitioner: Partitioner, result: Any) -> dict[str, DelegationSpec]:
    tags = getattr(result, "partition_tags", None)
    wrong: Any = {"violation": "destinations", "details": {"partitioner": partitioner}}
    if not isinstance(tags, Mapping):
        raise PartitionerContractError(
            f"{who} returned partition_tags={tags!r}, expected a mapping from each tag to a DelegationSpec.", **wrong
        )
    for name, spec in tags.items():
        specs = getattr(spec, "compile_specs", None)
        well_formed = isinstance(specs, (list, tuple)) and all(isinstance(item, CompileSpec) for item in specs)
        if not isinstance(getattr(spec, "backend_id", None), str) or not well_formed:
            raise PartitionerContractError(
                f"{who} sends tag {name!r} to {spec!r}, expected DelegationSpec(backend_id, [CompileSpec, ...]).",
                **wrong,
            )
    return dict(tags)


def _read_remarks(who: str, result: Any, name: str, kind: type[_Said]) -> tuple[_Said, ...]:
    """Return what a partitioner returned in addition to its tags."""
    given = getattr(result, name, None) or ()
    if not isinstance(given, (list, tuple)) or not all(isinstance(item, kind) for item in given):
        raise PartitionerContractError(
            f"{who} returned {name}={given!r}, expected a list of exir_lowering.{kind.__name__}.",
            violation="result_type",
        )
    return tuple(given)
