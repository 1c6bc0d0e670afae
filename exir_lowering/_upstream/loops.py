"""`while_loop` in files: ExecuTorch has the instructions for it, but neither plans its memory nor emits it."""

from __future__ import annotations

from typing import Any

import torch
from executorch.exir import memory_planning
from executorch.exir.emit import _emitter as et_emitter  # has the instructions of a method, and no way to add a kind
from executorch.exir.schema import Bool, EValue, Instruction, JumpFalseCall, KernelCall, Null

from exir_lowering._upstream import pins

_WHILE = torch.ops.higher_order.while_loop


def emitting_loops() -> list[tuple[Any, str, Any]]:
    """Return what ExecuTorch is made to do otherwise: plan the graphs of `while_loop`, and emit it."""
    if not pins.is_on("loops in files"):
        return []
    emit, find = et_emitter._Emitter._emit_control_flow, memory_planning.get_while_nodes

    def emitted(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        return _emit_while(self, *args) if target is _WHILE else emit(self, target, args, kwargs)

    def found(graph_module: Any) -> Any:
        yield from find(graph_module)
        yield from graph_module.graph.find_nodes(op="call_function", target=_WHILE)

    return [(et_emitter._Emitter, "_emit_control_flow", emitted), (memory_planning, "get_while_nodes", found)]


def _emit_while(emitter: Any, condition: Any, body: Any, given: Any, others: Any) -> Any:
    """Emit `while condition: carried = body`; what is carried has memory of its own, into which it is copied."""
    carried = tuple(emitter._emit_spec(spec) for spec in emitter.node.meta["spec"])
    instructions, start = emitter.chain.instructions, emitter.instruction_start_offset

    def copy(values: Any) -> None:
        number, _ = emitter._get_operator(name="aten::clone", overload="out")
        nothing = emitter._emit_evalue(EValue(Null())).id
        for value, place in zip(values, carried, strict=True):
            instructions.append(Instruction(KernelCall(number, [value.id, nothing, place.id, place.id])))

    def call(graph: Any) -> Any:
        inner = et_emitter._Emitter(
            graph,
            emitter.emitter_state,
            emitter.program_state,
            instruction_start_offset=start + len(instructions),
            binding_input_values=[*carried, *others],
            binding_output_values=None,
        )
        inner.run()
        emitter._merge_chain(inner.chain)
        return inner.concrete_output_ids

    copy(given)
    again = start + len(instructions)
    (holds,) = call(condition)
    leave = JumpFalseCall(holds.id, 0)
    instructions.append(Instruction(leave))
    copy(call(body))
    instructions.append(Instruction(JumpFalseCall(emitter._emit_evalue(EValue(Bool(False))).id, again)))
    leave.destination_instruction = start + len(instructions)
    return carried
