"""What a serialised program refers to by name, and the parts of torch's values that it stores.

Everything is found among what this process has registered already; nothing is imported by name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import sympy
import torch
from executorch.exir import EdgeCompileConfig
from executorch.exir.dialects._ops import ops as edge_operators

# Wrap ATen operators in Edge dialect; a backend's own operators are of the second class.
from executorch.exir.dialects.backend._ops import BackendOpOverload
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.verification.verifier import EXIREdgeDialectVerifier
from torch._export.verifier import Verifier, load_verifier  # the verifiers of torch's own dialects, by their names
from torch._ops import HigherOrderOperator as HigherOrderOperator, _higher_order_ops  # their table; torch.ops imports
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor, FakeTensorMode as FakeTensorMode  # nodes' values
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols as free_unbacked_symbols
from torch.fx.passes.shape_prop import TensorMetadata as TensorMetadata
from torch.fx.traceback import NodeSource as NodeSource, NodeSourceAction as NodeSourceAction
from torch.utils._sympy import functions  # what symbolic sizes are made of, and infinities
from torch.utils._sympy.numbers import int_oo as int_oo
from torch.utils._sympy.value_ranges import ValueRanges as ValueRanges

from exir_lowering._upstream.operators import OpOverload, defining, find_operator, list_registered_operators

sympy_functions = functions


def is_flat(graph: torch.fx.Graph) -> bool:
    """Return whether a graph takes and returns flat lists of values; its code says how it does."""
    return type(graph._codegen) is torch.fx.graph.CodeGen


_NAME = re.compile(r"(\w+)::(\w+)(?:\.(\w+))?", re.ASCII)
_DIALECTS = {"": OpOverload, "edge": EdgeOpOverload, "backend": BackendOpOverload}


def name_overload(target: Any) -> tuple[str, str] | None:
    """Return an operator's dialect ("" for ATen) and registered name; None if it is not an operator of torch."""
    kind = type(target)
    if kind is OpOverload:
        return "", target.name()
    if kind is EdgeOpOverload or kind is BackendOpOverload:
        return "edge" if kind is EdgeOpOverload else "backend", target._op.name()
    return None


@lru_cache(maxsize=4096)
def find_overload(dialect: str, name: str) -> Any:
    """Return an operator like "aten::add.Tensor" of a dialect ("" is ATen; "edge", "backend"); LookupError if none."""
    found = _NAME.fullmatch(name)
    if found is not None and dialect in _DIALECTS:
        namespace, base, overload = found[1], found[2], found[3] or "default"
        for _ in defining(namespace):
            if name in list_registered_operators() and find_operator(namespace, base, overload) is not None:
                return _in_dialect(dialect, namespace, base, overload)
    raise LookupError(f"no operator {name[:200]!r} is registered in this process")


def _in_dialect(dialect: str, namespace: str, base: str, overload: str) -> Any:
    found: Any = getattr(edge_operators, dialect) if dialect else torch.ops
    for part in (namespace, base, overload):
        found = getattr(found, part)
    if type(found) is not _DIALECTS[dialect]:
        raise LookupError(f"{namespace}::{base}.{overload} is not an operator of the dialect {dialect!r}")
    return found


def find_higher_order(name: str) -> Any:
    """Return a higher-order operator by name; LookupError if none is known in this process."""
    return _higher_order_ops[name]


def make_mode(facts: Sequence[bool], environment: Any) -> FakeTensorMode:
    """Make a fake tensor mode with a separate shape environment, as `mode_facts` describes it."""
    fallback, non_fake, static = facts
    return FakeTensorMode(
        allow_fallback_kernels=fallback,
        allow_non_fake_inputs=non_fake,
        static_shapes=static,
        shape_env=environment,
        export=True,
    )


def mode_facts(mode: FakeTensorMode) -> list[bool]:
    """Describe a fake tensor mode, for `make_mode`."""
    return [mode.allow_fallback_kernels, mode.allow_non_fake_inputs, mode.static_shapes]


_SETTINGS = (
    "allow_scalar_outputs",
    "allow_dynamic_output_shape_ops",
    "assume_static_by_default",
    "specialize_zero_one",
    "duck_shape",
    "prefer_deferred_runtime_asserts_over_guards",
    "trace_asserts",
)


def environment_facts(environment: Any) -> list[bool]:
    """Describe the settings of a shape environment, for `make_environment`."""
    return [bool(getattr(environment.settings, name)) for name in _SETTINGS]


def make_environment(
    facts: Sequence[bool], symbols: Sequence[tuple[sympy.Symbol, int, Any, Any]], divisible: Sequence[sympy.Expr]
) -> ShapeEnv:
    """Make a shape environment of settings, symbols with hint and bounds, and remainders that are known to be zero."""
    settings: dict[str, Any] = dict(zip(_SETTINGS, facts, strict=True))
    environment = ShapeEnv(**settings)
    for symbol, hint, lower, upper in symbols:
        environment.add_backed_var_to_val(symbol, hint)
        environment.constrain_symbol_range(symbol, compiler_min=lower, compiler_max=upper)
    environment.divisible.update(divisible)
    return environment


def make_number(environment: Any, kind: type, expression: Any, hint: Any) -> Any:
    """Make a symbolic number of a shape environment: a SymInt, SymFloat or SymBool."""
    if kind is torch.SymInt:
        return environment.create_symintnode(expression, hint=hint)
    if kind is torch.SymFloat:
        return environment.create_symfloatnode(expression, hint=hint)
    return environment.create_symboolnode(expression)


def fake_tensor(
    mode: FakeTensorMode,
    size: Sequence[Any],
    stride: Sequence[Any],
    offset: Any,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
    parameter: bool,
    constant: torch.Tensor | None,
) -> FakeTensor:
    """Make a fake tensor."""
    meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    if not isinstance(offset, int) or offset:
        meta = meta.as_strided(size, stride, offset)
    made = FakeTensor(mode, meta, device, constant=constant, requires_grad=requires_grad, _is_param=parameter)
    if constant is not None:
        mode.fake_tensor_converter.add_constant_storage_mapping(made)
    return made


def make_source(
    name: str | None, target: str, graph: int, pass_name: str, actions: Sequence[str], parents: list[NodeSource]
) -> NodeSource:
    """Make a part of a node's history; the constructor copies the histories of real nodes."""
    made = object.__new__(NodeSource)
    made.pass_name = pass_name
    made.action = [NodeSourceAction(action) for action in actions]
    made.from_node = parents
    made.node_info = None if name is None else NodeSource.NodeInfo(name, target, graph)
    made._action_string = made._dict = None
    return made


def verifier_facts(verifier: type[Any]) -> tuple[str, list[Any]] | None:
    """Describe a verifier, for `make_verifier`: its dialect and options; None if it cannot be made from them."""
    if not isinstance(verifier, type) or not issubclass(verifier, Verifier):
        return None
    if verifier.dialect == "EDGE" and verifier.__qualname__.startswith(EXIREdgeDialectVerifier.__name__):
        made: Any = verifier()
        allowed = [made._core_aten_ops_exception_list, made._preserve_ops]
        return verifier.dialect, [made.enable, made.use_dim_order, *map(list, allowed)]
    try:
        return (verifier.dialect, []) if load_verifier(verifier.dialect) is verifier else None
    except KeyError:
        return None


def make_verifier(dialect: str, options: Sequence[Any]) -> type[Any]:
    """Make a verifier; LookupError if none of the dialect is known in this process."""
    if dialect != "EDGE":
        found: type[Any] = load_verifier(dialect)
        return found
    enable, dim_order, exceptions, preserved = options
    config = EdgeCompileConfig(_check_ir_validity=bool(enable), _skip_dim_order=not dim_order)
    made: type[Any] = EXIREdgeDialectVerifier(
        config, class_only=True, core_aten_ops_exception_list=list(exceptions), preserve_ops=list(preserved)
    )
    return made
