"""What must hold after each step, checked right after it. What upstream has verified is not verified again."""

from __future__ import annotations

from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule

from exir_lowering.errors import InvariantError
from exir_lowering.graphs import DELEGATION_TAG, LIFTED_ORDER, attribute, every_node, qualified_name, walk
from exir_lowering.model import ExtractedMethod


def fingerprint(graph_module: GraphModule) -> tuple[tuple[str, str, Any, str, str], ...]:
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


def check_program(what: str, program: ExportedProgram) -> None:
    """Check that a program's signature and tables fit its graph, and that no tag or unresolved attribute is left."""
    signature, output = program.graph_signature, program.graph.output_node()
    placeholders = [node.name for node in program.graph.find_nodes(op="placeholder")]
    _require(what, "placeholders", placeholders, [getattr(s.arg, "name", "") for s in signature.input_specs])
    values = [getattr(value, "name", value) for value in output.args[0]]
    _require(what, "outputs", values, [getattr(s.arg, "value", s.arg.name) for s in signature.output_specs])
    lifted = [s.target for s in signature.input_specs if s.kind in LIFTED_ORDER]
    lost = [name for name in lifted if name not in program.state_dict and name not in program.constants]
    _require(what, "names without a tensor", lost, [])
    for path, module in walk(program.graph_module):
        for node in module.graph.nodes:
            if DELEGATION_TAG in node.meta:
                _require(what, "tags that are left", qualified_name(path, node), "none")
            if node.op == "get_attr":
                attribute(module, str(node.target))


def _require(what: str, which: str, got: Any, expected: Any) -> None:
    if got != expected:
        raise InvariantError(f"{what}: {which}: got {got}, expected {expected}. Please report this program.")
