"""The source lines of nodes, which torch replaces in graphs that it inlines."""

from __future__ import annotations

from torch.export import ExportedProgram

from exir_lowering import graphs


def recover_sources(program: ExportedProgram, converted: ExportedProgram) -> None:
    """Restore the source lines of nodes that the conversion replaced by lines of generated code.

    It replaces them in graphs that it inlines, such as those under torch.no_grad(); the generated line has the node's
    name in the program.
    """
    traces: dict[str, set[str]] = {}
    for _, module in graphs.walk(program.graph_module):
        for node in module.graph.nodes:
            if graphs.source_line(node):
                traces.setdefault(node.name, set()).add(node.meta["stack_trace"])
    for _, module in graphs.walk(converted.graph_module):
        for node in module.graph.nodes:
            found = traces.get(graphs.generated_name(node), ())
            if len(found) == 1:
                (node.meta["stack_trace"],) = found
