"""One table of a backend's operators: its partitioner, the reasons and its compiler read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node

from exir_lowering import BackendContext, BackendFailure, CompileSpec, InputError, graphs
from exir_lowering.graphs.serialized.plain import PlainWriter
from exir_lowering.partitioners.by_support import SupportPartitioner
from exir_lowering.partitioners.supports.predicates import everything, ops
from exir_lowering.partitioners.supports.support import SupportLike, make_check, scopes
from exir_lowering.plugins import Instruction, Instructions


class OperatorTable:
    """What a backend takes, with the names that the machine has for it.

    Args:
        backend_id: The backend.
        operators: For each Edge operator, such as "aten.add.Tensor", its opcode, or a pair of the opcode and a support
            that says what the operator has to be like, such as `("ADD", argument_values(alpha=1))`.
        check: What every operator has to be like, such as `dtypes(torch.float32)`.
    """

    def __init__(
        self,
        backend_id: str,
        operators: Mapping[str, str | tuple[str, SupportLike]],
        check: SupportLike | None = None,
    ) -> None:
        if not isinstance(operators, Mapping) or not operators:
            raise InputError(f"OperatorTable: got {operators!r}, expected a mapping from operators to opcodes.")
        if wrong := [name for name in operators if str(name).count(".") != 2]:
            raise InputError(f"OperatorTable: got {wrong[0]!r}, expected a name with an overload: 'aten.add.Tensor'.")
        pairs = {name: (one, everything()) if isinstance(one, str) else one for name, one in operators.items()}
        for name, pair in pairs.items():
            if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
                raise InputError(f"OperatorTable: {name} has {pair!r}, expected an opcode, or (opcode, support).")
        self.backend_id, self.opcodes = backend_id, {name: opcode for name, (opcode, _) in pairs.items()}
        each = [ops(name) & own for name, (_, own) in pairs.items()]
        self.support = ops(*pairs) & (everything() if check is None else check) & reduce(or_, each)

    def partitioner(self, compile_specs: Sequence[CompileSpec] = (), **options: Any) -> SupportPartitioner:
        """Return a partitioner that takes what the table has, and keeps it whole if PyTorch would decompose it.

        Args:
            compile_specs: The options for the backend.
            options: More arguments of `SupportPartitioner`.
        """
        aten = [name.split(".") for name in self.opcodes if name.startswith("aten.")]
        found = [getattr(getattr(torch.ops.aten, name), overload) for _, name, overload in aten]
        whole = [operator for operator in found if torch.Tag.core not in operator.tags]
        given = {"compile_specs": {self.backend_id: compile_specs or ()}, "keep_whole": whole, **options}
        return SupportPartitioner({self.backend_id: self.support}, **given)

    def compile(self, program: ExportedProgram, context: BackendContext) -> Instructions:
        """Return a partition as instructions; BackendFailure for an operator that the table does not take."""
        inputs, lifted = graphs.user_inputs(program), graphs.lifted_inputs(program)
        weights = [context.weights.ref(graphs.lifted_value(program, spec.target)) for spec in lifted.values()]
        numbers = {node: number for number, node in enumerate([*inputs, *lifted])}
        writer = PlainWriter()
        writer.writers[Node] = lambda node, depth: {"value": numbers[node]}
        check, code, count = make_check(self.support, next(scopes(program))), [], len(numbers)
        for node in program.graph.nodes:
            if graphs.is_getitem(node):
                numbers[node] = numbers[node.args[0]] + node.args[1]
            elif node.op == "call_function":
                name, handle, made = graphs.operator_name(node), node.meta.get("debug_handle"), node.meta["val"]
                if no := check(node):
                    raise BackendFailure(f"{self.backend_id} does not take {name}: {no.text}.", debug_handle=handle)
                results = len(made) if isinstance(made, (tuple, list)) else 1
                code.append(Instruction(self.opcodes[name], writer.write(graphs.arguments(node)), results, handle))
                numbers[node], count = count, count + results
        buffers = {spec.target: numbers[node] for node, spec in lifted.items()}
        returned = [*zip(program.graph_signature.output_specs, program.graph.output_node().args[0], strict=True)]
        states = [(buffers[spec.target], numbers[node]) for spec, node in returned if spec.target in buffers]
        outputs = [numbers[node] for spec, node in returned if spec.kind is OutputKind.USER_OUTPUT]
        return Instructions(len(inputs), weights, states, code, outputs)
