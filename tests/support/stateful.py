"""Runs models with state lowered in one of many ways, and compares each call with eager PyTorch, bit by bit."""

from __future__ import annotations

import copy
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from executorch.exir import to_edge
from torch.export import ExportedProgram, export
from torch.export.graph_signature import OutputKind
from torch.fx import Node
from torch.utils import _pytree as pytree

import exir_lowering
from exir_lowering import LoweredMethods, LoweringOptions
from exir_lowering.backends.reference import reference_partitioner
from exir_lowering.partitioners import SupportPartitioner

Call = Sequence[torch.Tensor]
Model = torch.nn.Module


@dataclass(frozen=True)
class Way:
    """How a model is lowered and run.

    Attributes:
        partitioner: "none", "xnnpack", "reference" (state stays on the host), "own" (state moves into delegates), or
            "some" and "some own": the reference backend with a random half of the operators, which `seed` chooses.
        rewrites: As in LoweringOptions.
        edge: "fast" or "executorch", as `fast` of LoweringOptions says; or "to_backend": ExecuTorch's `to_edge`, then
            `to_backend`.
        seed: Which half.
    """

    partitioner: str = "none"
    rewrites: str = "safe"
    edge: str = "fast"
    seed: int = 0

    def __str__(self) -> str:
        return " ".join(map(str, (self.partitioner, self.rewrites, self.edge, self.seed))).replace(
            "some own", "some-own"
        )

    def make_partitioner(self) -> Any:
        if self.partitioner.startswith("some"):
            return SupportPartitioner({"reference": self._takes}, own_state="own" in self.partitioner)
        kinds = {"none": None, "xnnpack": "xnnpack"}
        if self.partitioner in kinds:
            return kinds[self.partitioner]
        return reference_partitioner(own_state=self.partitioner == "own")

    def _takes(self, node: Node) -> bool:
        return zlib.crc32(f"{self.seed} {node.target} {node.name}".encode()) % 2 == 0


PARTITIONERS = ("none", "xnnpack", "reference", "own", "some", "some own")


def exported(models: Mapping[str, Model], inputs: Mapping[str, Call]) -> dict[str, ExportedProgram]:
    """Export copies of models, whose state is shared as that of the models."""
    copied = copy.deepcopy(dict(models))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            name: export(copied[name], tuple(value.clone() for value in call), strict=False)
            for name, call in inputs.items()
        }


def lowered(programs: Mapping[str, ExportedProgram], way: Way, cache: str | bool = False) -> LoweredMethods:
    """Lower programs in a way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way.edge == "to_backend":
            edges = {name: to_edge(program).exported_program() for name, program in programs.items()}
            options = LoweringOptions(rewrites=way.rewrites)  # type: ignore[arg-type]
            return exir_lowering.to_backend(edges, way.make_partitioner(), options=options)
        options = LoweringOptions(rewrites=way.rewrites, fast=way.edge == "fast", cache=cache)  # type: ignore[arg-type]
        return exir_lowering.lower(programs, way.make_partitioner(), options=options)


def eager(models: Mapping[str, Model], calls: Sequence[tuple[str, Call]]) -> list[list[torch.Tensor]]:
    """Return what each call of a method returns, and after that its inputs, into which it may have written.

    The models are copied together: what they share stays shared.
    """
    copied = copy.deepcopy(dict(models))
    return [_one_call(copied[name], call) for name, call in calls]


def _one_call(function: Callable[..., Any], call: Call) -> list[torch.Tensor]:
    given = [value.clone() for value in call]
    with torch.no_grad():
        results = [value.clone() for value in _tensors(function(*given))]
    return [*results, *given]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


def run(
    programs: Mapping[str, ExportedProgram], calls: Sequence[tuple[str, Call]], way: Way, cache: str | bool = False
) -> list[list[torch.Tensor]]:
    """Lower programs in a way; return what each call returns, as `eager` does."""
    low = lowered(programs, way, cache)
    share: Any = "auto" if way.edge != "to_backend" or len(programs) == 1 else True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_file(low.emit(share_state=share).buffer, low.programs, calls)


def run_file(
    file: bytes, programs: Mapping[str, ExportedProgram], calls: Sequence[tuple[str, Call]]
) -> list[list[torch.Tensor]]:
    """Run a file that was made of lowered programs; return what each call returns, as `eager` does.

    Raises:
        AssertionError: A later call changed what an earlier one had returned.
    """
    loaded = exir_lowering.load(file)
    results, copies = [], []
    for name, call in calls:
        signature = programs[name].graph_signature
        written = [one.target for one in signature.output_specs if one.kind is OutputKind.USER_INPUT_MUTATION]
        given = [value.clone() for value in call]
        found = _tensors(loaded.run(name, *given))
        for target, value in zip(written, found, strict=False):
            given[signature.user_inputs.index(str(target))] = value
        results.append([*found[len(written) :], *given])
        copies.append([value.clone() for value in results[-1]])
    if differences(results, copies):
        raise AssertionError("a later call changed what an earlier one had returned")
    return results


def differences(got: Sequence[Sequence[torch.Tensor]], expected: Sequence[Sequence[torch.Tensor]]) -> list[str]:
    """Return what differs in the results of calls, in value, shape or type."""
    found = []
    for number, (values, wanted) in enumerate(zip(got, expected, strict=True)):
        if len(values) != len(wanted):
            found.append(f"call {number}: {len(values)} results, expected {len(wanted)}")
            continue
        for place, (value, want) in enumerate(zip(values, wanted, strict=True)):
            if value.dtype is not want.dtype or value.shape != want.shape or not torch.equal(value, want):
                found.append(f"call {number} result {place}: got {value.tolist()}, expected {want.tolist()}")
    return found
