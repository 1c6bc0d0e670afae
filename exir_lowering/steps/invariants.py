"""What must hold after each step, checked right after it. What upstream has verified is not verified again."""

from __future__ import annotations

from typing import Any

from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule

from exir_lowering.errors import InvariantError
from exir_lowering.graphs import DELEGATION_TAG, LIFTED_ORDER, attribute, every_node, qualified_name, walk
from exir_lowering.model import ExtractedMethod, Partition

Fingerprint = tuple[tuple[str, str, Any, str, str], ...]


def fingerprint(graph_module: GraphModule) -> Fingerprint:
    """Describe a graph and its nested graphs, without metadata: equal graphs have equal fingerprints."""
    return tuple(
        (qualified_name(path, node), node.op, node.target, repr(node.args), repr(node.kwargs))
        for path, node in every_node(graph_module)
    )


def check_extracted(method: ExtractedMethod) -> None:
    """Check the owner and the partitions that an extraction made; raise InvariantError if something does not fit."""
    check_program(f"method {method.name}", method.program)
    for partition in method.partitions:
        check_program(f"partition {partition.id}", partition.program)
        _delegate_contract(partition)


def check_program(what: str, program: ExportedProgram) -> None:
    """Check that a program's signature and tables fit its graph, and that no tag or unresolved attribute is left."""
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
                raise InvariantError(f"{what}: node {qualified_name(path, node)} still has its tag.")
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
