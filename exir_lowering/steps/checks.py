"""What must hold after each step, checked right after it. What upstream verified already is not verified again."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule

from exir_lowering.errors import CoverageError, InvariantError
from exir_lowering.graphs import DELEGATION_TAG, LIFTED_ORDER, attribute, walk
from exir_lowering.model import ExtractedMethod, Partition
from exir_lowering.options import LoweringOptions
from exir_lowering.plans.lowering_plan import HostNode, LoweringPlan

Fingerprint = tuple[tuple[str, str, Any, str, str], ...]


def fingerprint(graph_module: GraphModule) -> Fingerprint:
    """Describe a graph and its nested graphs, without metadata: equal graphs have equal fingerprints."""
    return tuple(
        (".".join((*path, node.name)), node.op, node.target, repr(node.args), repr(node.kwargs))
        for path, module in walk(graph_module)
        for node in module.graph.nodes
    )


def extracted(method: ExtractedMethod) -> None:
    """Check the owner and the partitions that an extraction made.

    Raises:
        InvariantError: A signature does not match its graph, or a tag or an unresolved attribute is left.
    """
    _program(f"method {method.name}", method.program)
    for partition in method.partitions:
        _program(f"partition {partition.id}", partition.program)
        _delegate_contract(partition)


def coverage(plan: LoweringPlan, options: LoweringOptions) -> None:
    """Check that as much is delegated as the options require.

    Raises:
        CoverageError: A method falls short; the message lists what stays on the host.
    """
    required = 1.0 if options.require_full else options.require_coverage
    short = [method for method in plan.methods if method.coverage < required]
    if not short:
        return
    lines = []
    for method in short:
        lines.append(
            f"Method {method.name!r}: {method.delegated} of {len(method.nodes)} operators are delegated "
            f"({method.coverage:.1%}), required: {required:.1%}. On the host:"
        )
        groups: dict[tuple[str, str], list[HostNode]] = {}
        for node in method.host:
            groups.setdefault((node.operator, node.reason), []).append(node)
        for (operator, reason), nodes in list(groups.items())[:_LISTED]:
            source = next((f" at {node.source}" for node in nodes if node.source), "")
            lines.append(f"  {len(nodes)} x {operator}: {reason}{source}")
        if len(groups) > _LISTED:
            lines.append(f"  ... and {len(groups) - _LISTED} more kinds; the error's `plan` has all of them.")
        lines += [f"  {advice}" for advice in method.advice[:3]]
    option = "require_full" if options.require_full else "require_coverage"
    lines.append(f"Let a partitioner take them, or relax LoweringOptions({option}=...).")
    raise CoverageError("\n".join(lines), plan=plan)


_LISTED = 12
"""How many kinds of host operators an error lists for each method."""


def _program(what: str, program: ExportedProgram) -> None:
    nodes = list(program.graph.nodes)
    placeholders = [node.name for node in nodes if node.op == "placeholder"]
    signature = program.graph_signature
    _require(what, "placeholders", placeholders, [getattr(s.arg, "name", "") for s in signature.input_specs])
    values = [getattr(value, "name", value) for value in nodes[-1].args[0]]
    outputs = [getattr(s.arg, "value", s.arg.name) for s in signature.output_specs]
    _require(what, "outputs", values, outputs)
    for spec in signature.input_specs:
        if spec.kind in LIFTED_ORDER and spec.target not in program.state_dict and spec.target not in program.constants:
            raise InvariantError(f"{what}: no tensor for {spec.kind.name} {spec.target!r}. Please report this program.")
    for path, module in walk(program.graph_module):
        for node in module.graph.nodes:
            if DELEGATION_TAG in node.meta:
                raise InvariantError(f"{what}: node {'.'.join((*path, node.name))} still has its tag.")
            if node.op == "get_attr":
                attribute(module, str(node.target))


def _delegate_contract(partition: Partition) -> None:
    program, what = partition.program, f"partition {partition.id}"
    kinds = [spec.kind for spec in program.graph_signature.input_specs]
    ranks = [[*LIFTED_ORDER, InputKind.USER_INPUT].index(kind) for kind in kinds]
    _require(what, "order of the placeholders", ranks, sorted(ranks))
    results = [s.arg.name for s in program.graph_signature.output_specs if s.kind is OutputKind.USER_OUTPUT]
    _require(what, "outputs without duplicates", results, list(dict.fromkeys(results)))
    for node in program.graph.nodes:
        if node.op == "placeholder" and (not node.users or node.name in results):
            raise InvariantError(f"{what}: input {node.name} is unused or passed through. Please report this program.")


def _require(what: str, which: str, got: Any, expected: Any) -> None:
    if got != expected:
        raise InvariantError(f"{what}: {which}: got {got}, expected {expected}. Please report this program.")


def weight_digests(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Digest the memory of tensors, each storage once, without copying it.

    Args:
        tensors: Tensors by name.

    Returns:
        For each name what identifies its content; nothing for tensors without memory to read (fake, meta, sparse).
    """
    storages: dict[int, tuple[int, ...]] = {}
    digests: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        if not _readable(tensor):
            continue
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in storages:
            storages[key] = (key, storage.nbytes(), _checksum(storage))
        digests[name] = storages[key]
    return digests


def _readable(tensor: Any) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)  # subclasses may have no memory of their own
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
    )


_BLOCK = 512


def _checksum(storage: torch.UntypedStorage) -> int:
    """Add up blocks of 64-bit words at memory speed, each word times its place, then run a CRC over the sums.

    The factors are odd, so that no change of one word and hardly any exchange of two is lost.
    """
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    words = memory[: memory.numel() // 8 * 8].view(torch.int64) if storage.data_ptr() % 8 == 0 else memory[:0]
    blocks = words[: words.numel() // _BLOCK * _BLOCK].view(-1, _BLOCK) @ torch.arange(1, 2 * _BLOCK, 2)
    rest = memory[blocks.numel() * _BLOCK * 8 :] if words.numel() else memory
    return zlib.crc32(rest.numpy().data, zlib.crc32(blocks.numpy().data))


def changed(before: Mapping[str, tuple[int, ...]], after: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
    """Return the names whose digest changed."""
    return [name for name, digest in before.items() if after.get(name) != digest]
