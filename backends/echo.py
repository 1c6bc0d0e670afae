"""A backend whose payload describes, as text, what it received: for tests, and for seeing what a backend gets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind

from exir_lowering import Backend, BackendContext, CompileSpec, PreprocessResult

_KINDS = {InputKind.CONSTANT_TENSOR: "constant", InputKind.USER_INPUT: "input"}


class EchoBackend(Backend):
    """Records what it receives: counts, compile specs, constants by name, inputs, operators, mutations, results.

    Equal input gives equal bytes. The payload cannot be executed.
    """

    backend_id = "echo"
    version = "1"

    def preprocess(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        """Describe one partition that is lowered by itself."""
        return self.preprocess_all({"forward": [program]}, {"forward": [compile_specs]})["forward"][0]

    def preprocess_all(
        self,
        edge_programs: dict[str, list[ExportedProgram]],
        compile_specs: dict[str, list[list[CompileSpec]]],
        *,
        context: BackendContext | None = None,
    ) -> dict[str, list[PreprocessResult]]:
        """Describe every partition, with the size of the whole group."""
        partitions = sum(len(programs) for programs in edge_programs.values())
        group = f"group: {len(edge_programs)} methods, {partitions} partitions"
        found: dict[str, list[PreprocessResult]] = {}
        for method, programs in edge_programs.items():
            found[method] = []
            for i, (program, specs) in enumerate(zip(programs, compile_specs[method], strict=True), start=1):
                outputs = program.graph_signature.output_specs
                lines = [
                    *("echo 1", group, f"method {method}: partition {i} of {len(programs)}"),
                    *(f"spec {spec.key} = {spec.value!r}" for spec in specs),
                    *_graph_lines(program.graph_module, program.graph_signature.input_specs, ""),
                    *(f"writes {o.target} <- {o.arg.name}" for o in outputs if o.kind is OutputKind.BUFFER_MUTATION),
                    f"return {', '.join(o.arg.name for o in outputs if o.kind is OutputKind.USER_OUTPUT)}",
                ]
                found[method].append(PreprocessResult("\n".join(lines).encode()))
        return found


def _graph_lines(module: torch.fx.GraphModule, specs: list[InputSpec], indent: str) -> Iterator[str]:
    known = {spec.arg.name: spec for spec in specs if hasattr(spec.arg, "name")}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            spec = known.get(node.name)
            kind = _KINDS.get(spec.kind, spec.kind.name.lower()) if spec is not None else "input"
            target = f" = {spec.target}" if spec is not None and spec.target is not None else ""
            yield f"{indent}{kind} {node.name}{target}: {_type(node.meta.get('val'))}"
        elif node.op == "get_attr":
            attribute = getattr(module, str(node.target))
            if isinstance(attribute, torch.fx.GraphModule):
                yield f"{indent}graph {node.name}:"
                yield from _graph_lines(attribute, [], indent + "  ")
        elif node.op == "call_function":
            arguments = [_format(a) for a in node.args] + [f"{k}={_format(v)}" for k, v in node.kwargs.items()]
            operator = getattr(node.target, "__name__", node.target)
            yield f"{indent}{node.name} = {operator}({', '.join(arguments)}): {_type(node.meta.get('val'))}"
        elif indent:
            yield f"{indent}return {_format(node.args[0])}"


def _format(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_format, value))}]"
    return str(value)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_type, value))})"
    return str(value)


__all__ = ["EchoBackend"]
