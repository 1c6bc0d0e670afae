"""The contracts of backends and partitioners, and how ExecuTorch's own classes fit in.

A partitioner is ExecuTorch's `Partitioner`. A backend is a `Backend`; an ExecuTorch `BackendDetails` class is adapted.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering._upstream.compiler import (
    BackendDetails,
    CompileSpec as CompileSpec,
    DelegationSpec as DelegationSpec,
    Partitioner as Partitioner,
    PartitionResult as PartitionResult,
    PreprocessResult as PreprocessResult,
)
from exir_lowering._upstream.locks import conversion
from exir_lowering.errors import BackendContractError
from exir_lowering.graphs.weights import WeightStore
from exir_lowering.model import Adjustment, Rejection

conversion_lock = conversion  # a plug-in takes it around tracing of its own


class TagsNodes(Protocol):
    """The form of an ExecuTorch `Partitioner`, for type checkers, which do not see ExecuTorch's types."""

    def partition(self, exported_program: ExportedProgram, /) -> Any:
        """Tag the nodes that go to a backend."""


PartitionersOfMethod = TagsNodes | str | Sequence[TagsNodes | str] | None
"""A partitioner, the name of an installed one, several of these in priority order, or none."""

PartitionerLike = PartitionersOfMethod | Mapping[str, PartitionersOfMethod]
"""What `lower` takes as partitioners: for all methods, or by method name."""


@dataclass
class ExplainedResult(PartitionResult):  # type: ignore[misc]
    """ExecuTorch's `PartitionResult`, with the reasons of a partitioner that explains itself.

    Attributes:
        rejections: Why, for each operator that it left on the host. `method` may be "": it is filled in.
        adjustments: Why, for each partition that it dropped or cut. `method` may be "".
    """

    rejections: Sequence[Rejection] = ()
    adjustments: Sequence[Adjustment] = ()


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What a backend may use while it lowers; one context for all partitions of a call.

    Attributes:
        weights: Refers to tensors by their content, so that all partitions of all methods, and all backends, keep one
            copy in the file. `weights.named_data(refs)` is what `PreprocessResult.data_store_output` takes.
    """

    weights: WeightStore


PARALLEL = ("none", "thread", "process")
"""The values of `Backend.parallel`."""

NAMES = "names"
"""In `unread`: the names of nodes, inputs and weights, also those in `node.meta`."""

PROVENANCE = frozenset(
    {
        NAMES, "desc", "from_node", "nn_module_stack", "original_aten", "seq_nr", "source_fn_stack", "stack_trace",
        "torch_fn",
    }
)  # fmt: skip
"""For `unread`: the names, and what says which code of the model a node comes from."""


class Backend(ABC):
    """Lowers partitions ahead of time.

    A `preprocess` or `preprocess_all` with a parameter `context` gets a `BackendContext`, by keyword. The parameter
    must have that name: `**options` alone gets nothing.

    Attributes:
        backend_id: The id that is written to the file and looked up by the runtime.
        version: The version of the code that makes the payloads; after a change, equal programs may give other bytes.
        parallel: Whether `preprocess` may run for several partitions at once, and in what; one of `PARALLEL`. With
            "none" it runs while no other thread converts, and must not wait for a thread that converts: the two would
            deadlock. Otherwise it runs concurrently with conversions, and must hold
            `exir_lowering.plugins.conversion_lock()` around calls that let torch or ExecuTorch work on graphs. With
            `LoweringOptions(jobs=N)`, partitions are lowered at once by threads that share this object, or by processes
            that each create an object of its class; with `executor=`, by the executor's workers. Threads are used if a
            process could not import the class. Each call of `preprocess` then gets a separate context. An overridden
            `preprocess_all` is called once, with everything, unless it is `independent`.
        independent: Whether an overridden `preprocess_all` lowers each partition independently of the others, as the
            default one does. Then the cache keeps lowered partitions one by one, and only those whose content changed
            are passed to it; and it may be called for several partitions at once.
        unread: What `preprocess` does not read of a program, so that the cache may ignore it: `NAMES`, and keys of
            `node.meta`; often `PROVENANCE`.
        cache_key: What identifies the settings of the object for the cache, in place of its attributes; for one that
            holds what cannot be compared by content, such as a loaded library. None stands for the attributes.
    """

    backend_id: ClassVar[str]
    version: ClassVar[str] = "0"
    parallel: ClassVar[Literal["none", "thread", "process"]] = "none"
    independent: ClassVar[bool] = False
    unread: ClassVar[frozenset[str]] = frozenset()
    cache_key: str | None = None

    @abstractmethod
    def preprocess(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        """Lower one partition.

        Args:
            program: The partition in Edge dialect, yours to change. Its tensors belong to the user and are read-only.
                Placeholders are ordered parameters, buffers, constants, user inputs.
            compile_specs: The partitioner's options for the backend.

        Returns:
            The payload (`processed_bytes`), and optionally a debug handle map and named data.
        """

    def preprocess_all(
        self,
        edge_programs: dict[str, list[ExportedProgram]],
        compile_specs: dict[str, list[list[CompileSpec]]],
        *,
        context: BackendContext | None = None,
    ) -> dict[str, list[PreprocessResult]]:
        """Return the results for every partition of every method, in the same shape; by default one by one.

        An override that does not use the context may omit the parameter. If it calls this method for a `preprocess`
        with a context, it passes it on: `super().preprocess_all(programs, specs, context=context)`.

        Args:
            edge_programs: The partitions of each method, in call order.
            compile_specs: The compile specs of each partition, in the same shape.
            context: What `preprocess` gets, if it has a parameter of that name.

        Raises:
            BackendContractError: `preprocess` needs a context, and none was passed.
        """
        also = context_argument(self.preprocess, context)
        return {
            method: [
                self.preprocess(program, specs, **also)
                for program, specs in zip(programs, compile_specs[method], strict=True)
            ]
            for method, programs in edge_programs.items()
        }

    @property
    def one_by_one(self) -> bool:
        """Whether `preprocess_all` is the default, so that a failure can be attributed to one partition."""
        return type(self).preprocess_all is Backend.preprocess_all

    @property
    def in_processes(self) -> bool:
        """Whether other processes may lower partitions, each with a separate object of the backend's class."""
        return self.parallel != "none"

    def copy_program(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> ExportedProgram | None:
        """Return a copy of a partition that `preprocess` may change; None, the default, for one that shares weights."""
        return None


class ExecutorchBackend(Backend):
    """An ExecuTorch `BackendDetails` class as a `Backend`: its `preprocess_multimethod` is `preprocess_all`."""

    def __init__(self, details: type[BackendDetails]) -> None:
        self.details = details
        self.backend_id = details.__name__  # type: ignore[misc]

    def preprocess(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        """Lower one partition with the class."""
        return self.details.preprocess(program, compile_specs)

    def preprocess_all(
        self,
        edge_programs: dict[str, list[ExportedProgram]],
        compile_specs: dict[str, list[list[CompileSpec]]],
        *,
        context: BackendContext | None = None,
    ) -> dict[str, list[PreprocessResult]]:
        """Lower all partitions with the class, which takes no context."""
        results: dict[str, list[PreprocessResult]] = self.details.preprocess_multimethod(edge_programs, compile_specs)
        return results

    @property
    def one_by_one(self) -> bool:
        """Whether the class inherits ExecuTorch's `preprocess_multimethod`."""
        return _is_inherited(self.details, "preprocess_multimethod")

    @property
    def in_processes(self) -> bool:
        """Whether each partition is lowered by itself: a class has no objects, and its passes need a process."""
        return self.one_by_one

    def copy_program(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> ExportedProgram | None:
        """Return the copy of a class that overrides `copy_exported_program_for_preprocess`, None for other classes."""
        if _is_inherited(self.details, "copy_exported_program_for_preprocess"):
            return None
        own: ExportedProgram = self.details.copy_exported_program_for_preprocess(program, compile_specs)
        return own

    def prepare(self, program: ExportedProgram) -> None:
        """Change a copy of a partition, in place, that the class would lower wrong; its tensors are read-only."""
        return  # as it is

    def refuse(self, node: Node) -> str | None:
        """Return why the class fails on an operator of an Edge program, which then stays on the host; None if not."""
        return None


def takes_context(method: Callable[..., Any]) -> bool:
    """Return whether a backend's method has a parameter for the context."""
    return "context" in inspect.signature(method).parameters


def context_argument(method: Callable[..., Any], context: BackendContext | None) -> dict[str, BackendContext]:
    """Return the keyword arguments for a backend's method: the context, if it has a parameter of that name."""
    parameters, empty = inspect.signature(method).parameters, inspect.Parameter.empty
    parameter = parameters.get("context")
    more = [one for one in [*parameters.values()][2:] if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    if left := [one.name for one in more if one.default is empty and one is not parameter]:
        raise BackendContractError(
            f"{getattr(method, '__qualname__', method)} has the parameter {left[0]!r}, for which nothing is passed: "
            "the context is passed as 'context'. Rename it, or give it a default."
        )
    if parameter is None or (context is None and parameter.default is not empty):
        return {}
    if context is None:
        raise BackendContractError(
            f"{getattr(method, '__qualname__', method)} takes a context, and the default preprocess_all was called "
            "without one. Give preprocess_all a parameter named context too, and pass it on: "
            "super().preprocess_all(edge_programs, compile_specs, context=context)."
        )
    return {"context": context}


def _is_inherited(details: type[BackendDetails], name: str) -> bool:
    own, theirs = (getattr(kind, name) for kind in (details, BackendDetails))
    return bool(getattr(own, "__func__", own) is getattr(theirs, "__func__", theirs))
