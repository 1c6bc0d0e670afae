"""How a backend computes its named data from weights, recorded while ExecuTorch's code does it once more."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

# Where backends put data; its module has no public alias.
from executorch.exir._serialize._named_data_store import NamedDataStore

# A fake tensor has no content.
from torch._subclasses.fake_tensor import FakeTensor

# The one way to see each operator with its operands.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from exir_lowering._upstream.replacing import replacing

RECORDED = "XnnpackBackend"
"""The backend whose work is recorded."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedView:
    """A tensor, as a view of a recorded piece of memory."""

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCall:
    """A call of an operator; tensors among its arguments are views."""

    operator: Any
    args: Any
    kwargs: Any


@dataclass(slots=True, eq=False)
class Recording:
    """Pieces of memory, by number, and what was made of them."""

    memories: list[torch.Tensor] = field(default_factory=list)  # one tensor on each
    made_by: list[tuple[RecordedCall, int] | None] = field(default_factory=list)  # and which of its results it is
    data: list[tuple[str, int | None]] = field(default_factory=list)  # key and memory of named data, in order
    written: set[int] = field(default_factory=set)  # what an operator wrote to
    _numbers: dict[int, int] = field(default_factory=dict)
    _start: tuple[int, int] = (0, 0)

    def number(self, tensor: torch.Tensor, made_by: tuple[RecordedCall, int] | None = None) -> int:
        """Return the number of a tensor's memory."""
        place = tensor.untyped_storage().data_ptr()
        known = self._numbers.get(place)
        if known is None:
            known = self._numbers[place] = len(self.memories)
            self.memories.append(tensor.detach())
            self.made_by.append(made_by)
        return known

    def begin(self, tensor: torch.Tensor) -> None:
        """Expect named data that is made of a tensor."""
        self._start = self.number(tensor), len(self.memories)

    def add(self, key: str, content: Any) -> None:
        """Find of what memory named data is: the last one with its content."""
        first, later = self._start
        candidates = [*range(len(self.memories) - 1, later - 1, -1), first]
        found = (each for each in candidates if self._has(each, content))
        self.data.append((key, next(found, None)))

    def _has(self, number: int, content: Any) -> bool:
        storage = self.memories[number].untyped_storage()
        if storage.nbytes() != len(content):
            return False
        memory = (ctypes.c_char * len(content)).from_address(storage.data_ptr())  # without an operator
        return memoryview(memory).cast("B") == memoryview(content)


class _Recorder(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if any(issubclass(kind, FakeTensor) for kind in types):
            return made
        given, _ = tree_flatten((args, kwargs))
        results, _ = tree_flatten(made)
        operands = [each for each in given if isinstance(each, torch.Tensor)]
        if operands and all(map(_is_real, [*operands, *results])):
            self._note(func, args, kwargs, results)
        return made

    def _note(self, func: Any, args: Any, kwargs: Any, results: Sequence[Any]) -> None:
        recording = self._recording

        def view(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                place = tuple(value.shape), tuple(value.stride()), int(value.storage_offset())
                return RecordedView(recording.number(value), value.dtype, *place)
            return type(value)(map(view, value)) if isinstance(value, (list, tuple)) else value

        call = RecordedCall(func, view(args), {key: view(value) for key, value in kwargs.items()})
        if func._schema.is_mutable:
            given, _ = tree_flatten((call.args, call.kwargs))
            recording.written.update(one.memory for one in given if isinstance(one, RecordedView))
        for place, result in enumerate(results):
            if isinstance(result, torch.Tensor):
                recording.number(result, (call, place))


def _is_real(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return True
    plain = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return plain and value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized


_recording: ContextVar[Recording | None] = ContextVar("exir_lowering_recording", default=None)


def record(program: Any, compile_specs: Any) -> Recording:
    """Let XNNPACK's ahead-of-time code work on a program of its own, and record what named data it makes of what."""
    from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend

    recording = Recording()
    token = _recording.set(recording)
    try:
        with _RECORDING, torch.no_grad(), _Recorder(recording):
            XnnpackBackend.preprocess(program, compile_specs)
    finally:
        _recording.reset(token)
    return recording


def _recorded() -> list[tuple[Any, str, Any]]:
    from executorch.backends.xnnpack import xnnpack_preprocess
    from executorch.backends.xnnpack.operators import node_visitor

    visitor = node_visitor.NodeVisitor
    constant, scales = visitor.get_serialized_buffer_index, visitor.get_quant_params
    serialize, add = xnnpack_preprocess.serialize_xnnpack_binary, NamedDataStore.add_named_data

    def serialized(graph: Any, constants: Any) -> Any:
        return serialize(graph, constants) if _recording.get() is None else b""  # it is known

    def defined(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        recording = _recording.get()
        if recording is not None:
            params = args[4] if len(args) > 4 else kwargs.get("quant_params")
            node = tensor if params is None else params.q_input
            if node_visitor.is_param_node(self.exported_program, node):
                recording.begin(node_visitor.get_param_tensor(self.exported_program, node))
        return constant(self, tensor, *args, **kwargs)

    def scaled(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        recording = _recording.get()
        if recording is not None and isinstance(params.scale, torch.Tensor):
            recording.begin(params.scale)
        return scales(self, params, *args, **kwargs)

    def added(self: Any, key: str, data: Any, *args: Any, **kwargs: Any) -> Any:
        recording = _recording.get()
        if recording is not None:
            recording.add(key, data)
        return add(self, key, data, *args, **kwargs)

    return [
        (xnnpack_preprocess, "serialize_xnnpack_binary", serialized),
        (visitor, "get_serialized_buffer_index", defined),
        (visitor, "get_quant_params", scaled),
        (NamedDataStore, "add_named_data", added),
    ]


_RECORDING = replacing(_recorded)
