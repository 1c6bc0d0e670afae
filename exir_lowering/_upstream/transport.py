"""Programs as bytes for another process that has the same software: torch's pickler of graphs, with tensors beside."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Collection, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig
from executorch.exir.dialects._ops import ops as edge_operators

# Wrap ATen operators in Edge dialect, which torch's pickler does not know; a backend's own are of the second class.
from executorch.exir.dialects.backend._ops import BackendOpOverload
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.verification.verifier import EXIREdgeDialectVerifier
from torch._export.verifier import load_verifier  # the verifiers of torch's own dialects, by their names
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

from exir_lowering._upstream.fakes import DECISIONS, FakeTensor, FakeTensorMode
from exir_lowering._upstream.programs import assemble_program, guards_code_of, pytree

_DIALECTS: dict[Any, str] = {EdgeOpOverload: "edge", BackendOpOverload: "backend"}

_BY_REFERENCE = frozenset({"executorch", "exir_lowering", "sympy", "torch", *sys.stdlib_module_names})
"""The packages whose classes and functions travel as such; those of others travel as their names."""

_ALIGNMENT = 64
"""Where pieces of memory may start in a storage: the elements of a tensor stay aligned when it is stored elsewhere."""


def dumps(program: ExportedProgram, left_out: Collection[str]) -> tuple[bytes, list[bytes]]:
    """Write a copy of a program, which is changed, without some metadata; any error if that is not possible.

    Return it, and the memory of its tensors.
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
    with io.BytesIO() as stream:
        pickler = _Pickler(stream, left_out)
        pickler.dump((dialects, list(map(_verifier_facts, program.verifiers)), parts))
        described, pieces = pickler.finish()
        return pickle.dumps((pickler.mode, described, stream.getvalue())), pieces


def loads(content: bytes, pieces: Sequence[bytes]) -> ExportedProgram:
    """Read a program that `dumps` wrote, whose operators are registered here; any error if that is not possible."""
    mode, described, written = pickle.loads(content)
    with io.BytesIO(written) as stream:
        unpickler = _Unpickler(stream, _UnpickleState(_make_mode(*mode)))
        # The memory is the program's own, which a backend may write into.
        storages = [torch.frombuffer(bytearray(piece), dtype=torch.uint8).untyped_storage() for piece in pieces]
        unpickler.tensors = [_make_tensor(storages, *facts) for facts in described]
        dialects, verifiers, parts = unpickler.load()
    for node, dialect in zip(_calls(parts["graph_module"]), dialects, strict=True):
        if dialect:
            node.target = _in_dialect(dialect, node.target)
    return assemble_program(**parts, verifiers=[_make_verifier(*facts) for facts in verifiers])


def _calls(module: GraphModule) -> Iterator[Node]:
    for each in module.modules():
        if isinstance(each, GraphModule):
            yield from (node for node in each.graph.nodes if node.op == "call_function")


def _in_dialect(dialect: str, operator: Any) -> Any:
    found = getattr(edge_operators, dialect)
    for part in (operator.namespace, operator._opname, operator._overloadname):
        found = getattr(found, part)
    return found


class _Pickler(GraphPickler):
    def __init__(self, stream: io.BytesIO, left_out: Collection[str]) -> None:
        super().__init__(stream, Options(ops_filter=None, node_metadata_key_filter=lambda key: key not in left_out))
        self.mode: tuple[bool, ...] = (True, False, True)  # the settings of the values' fake tensor mode
        self._tensors: dict[int, tuple[int, torch.Tensor]] = {}  # by identity, with their numbers

    def persistent_id(self, value: Any) -> Any:
        """Return the number of a tensor that has memory."""
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return super().persistent_id(value)
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_conj() or value.is_neg():
            raise ValueError(f"a {type(value).__name__}, or a conjugate or negative view")
        if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
            raise ValueError(f"a tensor of layout {value.layout} and dtype {value.dtype} on {value.device}")
        return self._tensors.setdefault(id(value), (len(self._tensors), value))[0]

    def reducer_override(self, value: Any) -> Any:
        """Return how to make a value again where torch's pickler does not know that, or would change it."""
        kind, state = type(value), self._unpickle_state
        if kind in _DIALECTS:
            return _in_dialect, (_DIALECTS[kind], value._op)
        if kind is FakeTensor:
            if value.layout is not torch.strided or value.real_tensor is not None or value.is_conj() or value.is_neg():
                raise ValueError("a fake tensor with another layout, a real one, or that is a conjugate view")
            mode = value.fake_mode
            self.mode = mode.allow_fallback_kernels, mode.allow_non_fake_inputs, mode.static_shapes
            layout = tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.fake_device
            facts = value.requires_grad, isinstance(value, torch.nn.Parameter), value.constant
            return _make_fake, (state, *layout, *facts)
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

    def finish(self) -> tuple[list[Any], list[bytes]]:
        """Return the description of each tensor, and the pieces of memory that they lie in."""
        storages: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
        places = []
        for _, tensor in self._tensors.values():
            storage, item = tensor.untyped_storage(), tensor.element_size()
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            start = int(tensor.storage_offset()) * item
            places.append((storage.data_ptr() if tensor.numel() else 0, start))
            if tensor.numel():
                _, first, end = storages.get(storage.data_ptr(), (storage, start, start))
                first = min(first, start // _ALIGNMENT * _ALIGNMENT)
                storages[storage.data_ptr()] = storage, first, max(end, start + (last + 1) * item)
        numbers = {address: number for number, address in enumerate(storages)}
        described = [
            (
                numbers.get(address, -1),
                start - storages[address][1] if address else 0,
                *(tensor.dtype, tuple(tensor.shape), tensor.stride()),
                *(isinstance(tensor, torch.nn.Parameter), tensor.requires_grad),
            )
            for (_, tensor), (address, start) in zip(self._tensors.values(), places, strict=True)
        ]
        memory = [
            torch.empty(0, dtype=torch.uint8).set_(storage, start, (end - start,), (1,)).numpy().tobytes()
            for storage, start, end in storages.values()
        ]
        return described, memory


class _Unpickler(_GraphUnpickler):
    tensors: Sequence[torch.Tensor]

    def persistent_load(self, name: Any) -> Any:
        """Return a tensor by its number."""
        return self.tensors[name] if type(name) is int else super().persistent_load(name)


def _make_tensor(
    storages: Any, piece: int, offset: int, dtype: Any, shape: Any, stride: Any, parameter: bool, gradient: bool
) -> torch.Tensor:
    made = torch.empty_strided(shape, stride, dtype=dtype)
    if piece >= 0:
        made = torch.empty(0, dtype=dtype).set_(storages[piece], offset // dtype.itemsize, shape, stride)
    return torch.nn.Parameter(made, gradient) if parameter else made.requires_grad_(gradient)


def _make_mode(fallback: bool, non_fake: bool, static: bool) -> FakeTensorMode:
    return FakeTensorMode(
        allow_fallback_kernels=fallback,
        allow_non_fake_inputs=non_fake,
        static_shapes=static,
        shape_env=ShapeEnv(),
        export=True,
    )


def _make_fake(
    state: Any,
    size: Any,
    stride: Any,
    offset: Any,
    dtype: Any,
    device: Any,
    gradient: bool,
    parameter: bool,
    constant: torch.Tensor | None,
) -> FakeTensor:
    meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    if not isinstance(offset, int) or offset:
        meta = meta.as_strided(size, stride, offset)
    made = FakeTensor(state.fake_mode, meta, device, constant=constant, requires_grad=gradient, _is_param=parameter)
    if constant is not None:
        state.fake_mode.fake_tensor_converter.add_constant_storage_mapping(made)
    return made


def _find_constant(name: str) -> Any:
    return getattr(torch, name)


def _make_number(kind: Any, data: Any, state: Any) -> Any:
    return kind(data._to_sym_node())


def _verifier_facts(verifier: Any) -> tuple[str, tuple[Any, ...]]:
    """Describe a verifier, whose class is made anew for each Edge program; other ones are known by their dialects."""
    if verifier.dialect == "EDGE" and verifier.__qualname__.startswith(EXIREdgeDialectVerifier.__name__):
        made = verifier()
        allowed = list(made._core_aten_ops_exception_list), list(made._preserve_ops)
        return verifier.dialect, (made.enable, made.use_dim_order, *allowed)
    if load_verifier(verifier.dialect) is not verifier:
        raise ValueError(f"the verifier {verifier}")
    return verifier.dialect, ()


def _make_verifier(dialect: str, facts: Sequence[Any]) -> Any:
    if not facts:
        return load_verifier(dialect)
    enable, dim_order, exceptions, preserved = facts
    config = EdgeCompileConfig(_check_ir_validity=enable, _skip_dim_order=not dim_order)
    return EXIREdgeDialectVerifier(
        config, class_only=True, core_aten_ops_exception_list=exceptions, preserve_ops=preserved
    )
