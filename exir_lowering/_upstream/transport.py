"""Programs as bytes for another process that has the same software: torch's pickler of graphs, with tensors beside."""

from __future__ import annotations

import io
import sys
from collections.abc import Collection, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from executorch.exir.dialects._ops import ops as edge_operators

# Wrap ATen operators in Edge dialect, which torch's pickler does not know; a backend's own are of the second class.
from executorch.exir.dialects.backend._ops import BackendOpOverload
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.program._program import _register_no_decomp_op, aten_op_to_transform_op, transform_op_to_aten_op
from executorch.exir.verification.verifier import EXIREdgeDialectVerifier
from torch._export.verifier import load_verifier  # the verifiers of torch's own dialects, by their names
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx._graph_pickler import (
    GraphPickler,
    Options,
    _GraphUnpickler,
    _ShapeEnvPickleData,
    _SymNodePickleData,
    _UnpickleState,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from exir_lowering._upstream.edge import without_validity_checks
from exir_lowering._upstream.fakes import DECISIONS, FakeTensor, FakeTensorMode, make_meta
from exir_lowering._upstream.locks import conversion
from exir_lowering._upstream.programs import assemble_program, guards_code_of, pytree

_DIALECTS: dict[Any, str] = {EdgeOpOverload: "edge", BackendOpOverload: "backend"}

_BY_REFERENCE = frozenset({"executorch", "exir_lowering", "sympy", "torch", *sys.stdlib_module_names})
"""The packages whose classes and functions travel as such; those of others travel as their names."""

_ALIGNMENT = 64  # where what is sent of a storage may begin: the elements of a tensor stay aligned


def dumps(program: ExportedProgram, left_out: Collection[str]) -> tuple[bytes, bytes]:
    """Write a copy of a program, which is changed, without some metadata; any error if that is not possible.

    Return it, and its tensors.
    """
    dialects = [_DIALECTS.get(type(node.target), "") for node in _calls(program.graph_module)]
    for node, dialect in zip(_calls(program.graph_module), dialects, strict=True):
        if dialect:
            node.target = node.target._op  # type: ignore[union-attr]
    parts = {
        "graph_module": program.graph_module,
        "signature": program.graph_signature,
        "state_dict": program.state_dict,
        "constants": program.constants,
        "range_constraints": program.range_constraints,
        "module_call_graph": program.module_call_graph,
        "guards_code": guards_code_of(program),
        "kind": type(program),
    }
    with io.BytesIO() as stream, io.BytesIO() as memory:
        pickler = _Pickler(stream, left_out)
        pickler.dump((dialects, [verifier.dialect for verifier in program.verifiers], parts))
        torch.save(_cut([*pickler.tensors]), memory)
        return stream.getvalue(), memory.getvalue()


def loads(content: bytes, memory: bytes) -> ExportedProgram:
    """Read a program that `dumps` wrote, whose operators are registered here; any error if that is not possible."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), export=True)  # as `torch.export` has it
    with io.BytesIO(content) as stream, io.BytesIO(memory) as written:
        unpickler = _Unpickler(stream, _UnpickleState(mode))
        unpickler.tensors = torch.load(written, weights_only=True)
        dialects, verifiers, parts = unpickler.load()
    for node, dialect in zip(_calls(parts["graph_module"]), dialects, strict=True):
        if dialect:
            node.target = _in_dialect(dialect, node.target)
    return assemble_program(**parts, verifiers=list(map(_find_verifier, verifiers)))


def _cut(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the same tensors on memory that has only what they span: torch saves the whole of it, whoever reads it."""
    spans: dict[int, tuple[int, int]] = {}
    for one in tensors:
        offset, item, storage = int(one.storage_offset()), one.element_size(), one.untyped_storage()
        last = sum((size - 1) * step for size, step in zip(one.shape, one.stride(), strict=True)) if one.numel() else -1
        first, end = spans.get(storage._cdata, (storage.nbytes(), 0))
        first = min(first, offset * item // _ALIGNMENT * _ALIGNMENT)
        spans[storage._cdata] = first, max(end, (offset + last + 1) * item)
    pieces: dict[int, torch.UntypedStorage] = {}

    def moved(one: torch.Tensor) -> torch.Tensor:
        storage = one.untyped_storage()
        first, end = spans[storage._cdata]
        if end - first >= storage.nbytes():
            return one
        if storage._cdata not in pieces:
            part = torch.empty(0, dtype=torch.uint8).set_(storage, first, (end - first,), (1,))
            pieces[storage._cdata] = part.clone().untyped_storage()
        offset = int(one.storage_offset()) - first // one.element_size()
        made = torch.empty(0, dtype=one.dtype).set_(pieces[storage._cdata], offset, one.shape, one.stride())
        if isinstance(one, torch.nn.Parameter):
            return torch.nn.Parameter(made, one.requires_grad)
        return made.requires_grad_(one.requires_grad)

    return list(map(moved, tensors))


def _calls(module: GraphModule) -> Iterator[Node]:
    for each in module.modules():
        if isinstance(each, GraphModule):
            yield from (node for node in each.graph.nodes if node.op == "call_function")


def _in_dialect(dialect: str, operator: Any) -> Any:
    found = getattr(edge_operators, dialect)
    for part in (operator.namespace, operator._opname, operator._overloadname):
        found = getattr(found, part)
    return found


def _keep_whole(operator: OpOverload) -> Any:
    """Return what stands for an operator that is kept whole while a program is decomposed, and in metadata later."""
    with conversion():
        _register_no_decomp_op(operator)
    return aten_op_to_transform_op[operator]


class _Pickler(GraphPickler):
    def __init__(self, stream: io.BytesIO, left_out: Collection[str]) -> None:
        super().__init__(stream, Options(ops_filter=None, node_metadata_key_filter=lambda key: key not in left_out))
        self.tensors: dict[torch.Tensor, int] = {}  # with their numbers; a tensor's hash is its identity

    def persistent_id(self, value: Any) -> Any:
        """Return the number of a tensor that has memory."""
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return super().persistent_id(value)
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise ValueError(f"a {type(value).__name__}")
        return self.tensors.setdefault(value, len(self.tensors))

    def reducer_override(self, value: Any) -> Any:
        """Return how to make a value again where torch's pickler does not know that, or would change it."""
        kind, state = type(value), self._unpickle_state
        if kind in _DIALECTS:
            return _in_dialect, (_DIALECTS[kind], value._op)
        if kind is OpOverload and str(value) in transform_op_to_aten_op:
            return _keep_whole, (transform_op_to_aten_op[str(value)],)
        if kind is FakeTensor:
            layout = tuple(value.shape), value.stride(), value.storage_offset(), value.dtype
            facts = value.fake_device, value.requires_grad, isinstance(value, torch.nn.Parameter), value.constant
            return _make_fake, (state, layout, *facts)
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            return _make_number, (kind, _SymNodePickleData(value.node), state)
        if isinstance(value, ShapeEnv):
            data = _ShapeEnvPickleData(value)
            data.data.pop(DECISIONS, None)  # of copies of it in this process
            return _ShapeEnvPickleData.unpickle, (data, state)
        if isinstance(value, (torch.memory_format, torch.qscheme)):
            # They name no module: pickle takes the first one that has such a name, which may be a script's.
            return _find_constant, (str(value).removeprefix("torch."),)
        if isinstance(value, pytree.TreeSpec):
            return pytree.treespec_loads, (pytree.treespec_dumps(value),)
        if isinstance(value, (type, FunctionType)):
            known = value.__module__.partition(".")[0] in _BY_REFERENCE and "<locals>" not in value.__qualname__
            return NotImplemented if known else (str, (f"{value.__module__}.{value.__qualname__}",))
        return super().reducer_override(value)


class _Unpickler(_GraphUnpickler):
    tensors: Sequence[torch.Tensor]

    def persistent_load(self, name: Any) -> Any:
        """Return a tensor by its number."""
        return self.tensors[name] if type(name) is int else super().persistent_load(name)


def _make_fake(state: Any, layout: Any, device: Any, gradient: bool, parameter: bool, constant: Any) -> FakeTensor:
    facts = {"requires_grad": gradient, "_is_param": parameter, "constant": constant}
    made = FakeTensor(state.fake_mode, make_meta(*layout), device, **facts)
    if constant is not None:
        state.fake_mode.fake_tensor_converter.add_constant_storage_mapping(made)
    return made


def _find_constant(name: str) -> Any:
    return getattr(torch, name)


def _make_number(kind: Any, data: Any, state: Any) -> Any:
    return kind(data._to_sym_node())


def _find_verifier(dialect: str) -> Any:
    """Return a verifier of a dialect: for Edge, whose classes are made for each program, one that checks nothing."""
    if dialect == "EDGE":
        return EXIREdgeDialectVerifier(without_validity_checks(), class_only=True)
    return load_verifier(dialect)
