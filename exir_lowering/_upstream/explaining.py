"""Run a function through Dynamo once, and leave nothing behind."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _get_cache_entries_for_region, _get_total_cache_entry_count, reset_code
from torch._dynamo import config
from torch._dynamo.convert_frame import compile_lock, register_bytecode_hook
from torch._dynamo.eval_frame import OptimizedModule, innermost_fn
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.output_graph import GraphCompileReason as GraphCompileReason
from torch._dynamo.pgo import CodeId, CodeState, get_code_state
from torch._dynamo.utils import graph_break_reasons
from torch.fx import GraphModule


def ending(module: GraphModule) -> GraphCompileReason | None:
    """Return why a graph of Dynamo's ends where it does."""
    return getattr(module, "compile_subgraph_reason", None)


def call_compiled(
    function: Callable[..., Any],  # if it is compiled, the one that was compiled
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
    backend: Callable[..., Any],  # gets the graphs
    dynamic: bool | None,  # as for `torch.compile`
) -> list[GraphCompileReason]:
    """Call a function once through torch.compile, forget that and what was compiled, and return its graph breaks."""
    codes: list[types.CodeType] = []
    breaks = len(graph_break_reasons)
    sizes = copy.deepcopy(get_code_state())
    compile_: Callable[..., Any] = torch.compile  # its stubs lack isolate_recompiles
    compiled = compile_(_innermost(function), backend=backend, dynamic=dynamic, isolate_recompiles=True)
    hook = register_bytecode_hook(lambda old, new: codes.append(old))
    try:
        with config.patch(repro_after=None):
            compiled(*inputs, **keywords)
    finally:
        hook.remove()
        with compile_lock:
            _forget(codes, getattr(compiled, "dynamo_ctx", compiled)._isolate_recompiles_id)
            _forget_sizes(codes, sizes)
            reasons = graph_break_reasons[breaks:]
            del graph_break_reasons[breaks:]
    return reasons


def _innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(function, OptimizedModule):
        return function._orig_mod
    return function if isinstance(function, torch.nn.Module) else innermost_fn(function)


def _forget(codes: Sequence[types.CodeType], region: int) -> None:
    for code in codes:
        entries = _get_cache_entries_for_region(code, region)
        if len(entries) == _get_total_cache_entry_count(code):
            reset_code(code)
            continue
        for entry in entries:  # they stay as empty entries beside those of others
            if entry.guard_manager.extra_state is not None:
                entry.guard_manager.extra_state.invalidate(entry, DeletedGuardManagerWrapper("it was only explained"))


def _forget_sizes(codes: Sequence[types.CodeType], before: Mapping[CodeId, CodeState]) -> None:
    """Restore which sizes Dynamo has seen: with others, the next call would be compiled with dynamic ones."""
    state = get_code_state()
    own = {(code.co_filename, code.co_firstlineno, code.co_name) for code in codes}
    for key in [key for key in state if (key.filename, key.firstlineno, key.name) in own]:
        if key in before:
            state[key] = before[key]
        else:
            del state[key]
