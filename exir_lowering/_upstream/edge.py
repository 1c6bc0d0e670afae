"""ExecuTorch's Edge dialect: conversions to it, passes over it, and what its verifier and its emitter reject."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, ExecutorchProgramManager
from executorch.exir.dialects._ops import ops  # the only name of the Edge dialect's operators

# Edge and backend operators wrap ATen ones; their classes have no public alias.
from executorch.exir.dialects.backend._ops import BackendOpOverload
from executorch.exir.dialects.edge._ops import EdgeOpOverload

# Says which operators the pass to out variants skips.
from executorch.exir.operator.convert import _get_overload_schema, is_out_variant, to_out_variant
from executorch.exir.passes import to_out_var_skiplist
from executorch.exir.passes.executorch_prim_ops_registry import _PYTHON_SYM_OPS_TO_EXECUTORCH_SYM_OPS

# to_edge_transform_and_lower is one function; its parts (decompose as the partitioners ask, run passes) have no public
# name.
from executorch.exir.program._program import (
    EdgeProgramManager as EdgeProgramManager,
    _gen_edge_manager_for_partitioners,
    _transform,
    _transform_with_pass_manager,
)
from torch._export.verifier import SpecViolationError as SpecViolationError  # raised if one value goes to two buffers
from torch.export import ExportedProgram
from torch.fx.passes.infra.pass_manager import PassManager as FxPassManager

from exir_lowering._upstream.passes import lift_constants

SIZE_FUNCTIONS = frozenset(_PYTHON_SYM_OPS_TO_EXECUTORCH_SYM_OPS)  # those that files have instructions for
gen_edge_manager = _gen_edge_manager_for_partitioners


def transform(program: ExportedProgram, passes: Any) -> Any:
    """Run passes, or a manager of passes, over an Edge program, which they may change; its weights are not copied."""
    managed = isinstance(passes, FxPassManager)
    result = _transform_with_pass_manager(program, passes) if managed else _transform(program, *passes)
    # Passes add constants as attributes; in programs they are inputs.
    return lift_constants(result) if isinstance(result, ExportedProgram) else result


def manager_contents(manager: EdgeProgramManager) -> tuple[dict[str, ExportedProgram], dict[str, Any]]:
    """Return the programs of a manager by method, in order, and the values of its constant methods."""
    return dict(manager._edge_programs), dict(manager._config_methods or {})


def allowed_operators(config: EdgeCompileConfig | None) -> list[Any]:
    """Return the operators that a configuration allows although they are not in Core ATen."""
    return [] if config is None else list(config._core_aten_ops_exception_list)


def out_variant(target: Any) -> str | None:
    """Return the name of the operator that computes the same into given memory, None if there is none."""
    with suppress(RuntimeError, AssertionError):  # both raise if there is none
        if isinstance(target, (EdgeOpOverload, BackendOpOverload)):
            return str(target.to_out_variant().name())
        if isinstance(target, torch._ops.OpOverload):  # and not a function that computes sizes
            return str(to_out_variant(target)[0].name())
    return None


def lacks_out_variant(node: torch.fx.Node) -> bool:
    """Return whether ExecuTorch's emission needs an out variant of a node's operator that does not exist."""
    target = node.target
    if not isinstance(target, (torch._ops.OpOverload, EdgeOpOverload, BackendOpOverload)):
        return False
    if target in to_out_var_skiplist or is_out_variant(target._schema.name, target._schema.overload_name):
        return False
    schema = _get_overload_schema(target)
    inplace = schema is not None and schema.kind().name == "inplace"
    return not inplace and out_variant(target) is None


def without_validity_checks() -> EdgeCompileConfig:
    """Return ExecuTorch's configuration for programs with delegates, which its verifier does not accept."""
    return EdgeCompileConfig(_check_ir_validity=False)


def edge_record(programs: Mapping[str, ExportedProgram], manager: ExecutorchProgramManager) -> Any:
    """Return ExecuTorch's ETRecord of an emitted program; the Inspector looks debug handles up in `programs`."""
    from executorch.devtools.etrecord import ETRecord  # it needs pandas, and is rarely used

    record = ETRecord()
    record.add_edge_dialect_program(EdgeProgramManager(dict(programs), None, without_validity_checks()))
    record.add_executorch_program(manager)
    return record


ADD_NUMBER = ops.edge.aten.add.Scalar
CLONE = ops.edge.aten.clone.default
CLONE_IN_ORDER = ops.edge.dim_order_ops._clone_dim_order.default
COPY = ops.edge.aten.copy.default
FULL = ops.edge.aten.full.default
INDEX_PUT = ops.edge.aten.index_put.default
INDEX_PUT_IN_PLACE = ops.edge.aten.index_put_.default
LESS = ops.edge.aten.lt.Scalar
VIEWS = (ops.edge.aten.view_copy.default, ops.edge.aten.view.default)
TRUTHS = {name: getattr(ops.backend.executorch_prim, name).Scalar for name in ("eq", "ge", "gt", "sym_not")}
"""What ExecuTorch's runtime computes of truth values, by name; this is the form that its emitter takes."""
WHERE = ops.edge.aten.where.self


@lru_cache(maxsize=1024)
def edge_operator(name: str) -> Any:
    """Return an Edge operator, such as "aten.mul.Tensor"; AttributeError or RuntimeError if there is none."""
    found = ops.edge
    for part in name.split("."):
        found = getattr(found, part)
    return found
