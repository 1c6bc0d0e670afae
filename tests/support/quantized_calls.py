"""Calls of the wheel's kernels for quantised programs: by programs, and by files that programs do not make."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from executorch.exir import schema
from executorch.exir._serialize._program import PTEFile, serialize_pte_binary
from executorch.exir.tensor import dim_order_from_stride
from kernel_calls import DTYPES, Call, kernels_of_the_runtime, make_call

from exir_lowering._upstream.runtime import import_quantized_kernels

OTHERS = (torch.uint16, torch.float8_e4m3fn)
_TYPES = (*DTYPES, *OTHERS)
_CODES = {
    **{torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5},
    **{torch.float32: 6, torch.float64: 7, torch.bool: 11, torch.bfloat16: 15},
    **{torch.float8_e4m3fn: 24, torch.uint16: 27},
}
"""ExecuTorch's numbers of types, as in its files."""
_ALIGNED = 64


def quantized_kernels() -> list[str]:
    """Return the names of the kernels, such as "quantized_decomposed::add.out", after loading them."""
    import_quantized_kernels()
    return sorted(name for name in kernels_of_the_runtime() if name.startswith("quantized_decomposed::"))


@dataclass(frozen=True)
class KernelCall:
    """A call of an out variant: values in the order of its schema, and what it writes."""

    kernel: str
    arguments: tuple[Any, ...]  # tensors, numbers, dtypes and None
    outputs: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    expected: Callable[..., Any] | None  # takes the arguments; may raise where nothing is defined

    def call(self, note: str) -> Call:
        """Return the call of a file with nothing else in it."""
        inputs = tuple(one for one in self.arguments if isinstance(one, torch.Tensor))
        shown = ", ".join(map(_show, self.arguments))
        made = ", ".join(f"{_show(dtype)}{list(shape)}" for dtype, shape in self.outputs)
        return Call(f"{self.kernel}({shown}) -> {made}  [{note}]", None, inputs, self.file(), self._expected())

    def _expected(self) -> Any:
        try:
            made = self.expected(*(one.clone() if isinstance(one, torch.Tensor) else one for one in self.arguments))
        except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            # PyTorch has no result to compare with.
            return None
        made = made if isinstance(made, tuple) else (made,)
        # What differs from what is written is for `load` to refuse.
        same = [(one.dtype, tuple(one.shape)) for one in made] == list(self.outputs)
        return made if same else None

    def file(self) -> bytes:
        """Return a `.pte` file whose method makes the call."""
        values: list[schema.EValue] = []
        offset = 0
        for one in self.arguments:
            value, offset = _value(one, offset)
            values.append(schema.EValue(value))
        given = [index for index, one in enumerate(self.arguments) if isinstance(one, torch.Tensor)]
        written = []
        for dtype, shape in self.outputs:
            value, offset = _tensor(dtype, shape, tuple(range(len(shape))), offset)
            written.append(len(values))
            values.append(schema.EValue(value))
        name, _, overload = self.kernel.partition(".")
        returned = written if len(written) == 1 else [len(values)]
        if len(written) > 1:
            values.append(schema.EValue(schema.TensorList(written)))
        instruction = schema.Instruction(schema.KernelCall(0, [*range(len(self.arguments)), *written, *returned]))
        plan = schema.ExecutionPlan(
            "forward", schema.ContainerMetadata("", ""), values, given, written,
            [schema.Chain([], [], [instruction], None)], [schema.Operator(name, overload)], [], [0, max(offset, 1)],
        )  # fmt: skip
        program = schema.Program(0, [plan], [schema.Buffer(b"")], [], [], schema.SubsegmentOffsets(0, []))
        return bytes(serialize_pte_binary(PTEFile(program)))


def _value(one: Any, offset: int) -> tuple[Any, int]:
    if isinstance(one, torch.Tensor):
        return _tensor(one.dtype, tuple(one.shape), tuple(dim_order_from_stride(one.stride())), offset)
    if one is None:
        return schema.Null(), offset
    if isinstance(one, float):
        return schema.Double(one), offset
    return schema.Int(_CODES[one] if isinstance(one, torch.dtype) else one), offset


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...], offset: int) -> tuple[Any, int]:
    size = torch.Size(shape).numel() * dtype.itemsize
    place = schema.AllocationDetails(1, offset, 0)
    tensor = schema.Tensor(
        _CODES[dtype], 0, list(shape), list(order), False, 0, 0, place, schema.TensorShapeDynamism.STATIC
    )
    return tensor, offset + -(-size // _ALIGNED) * _ALIGNED


def _show(one: Any) -> str:
    if isinstance(one, torch.Tensor):
        return f"{_show(one.dtype)}{list(one.shape)}"
    return str(one).removeprefix("torch.")


# -- right calls ------------------------------------------------------------------------------------------------------


def _ints(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    bounds = torch.iinfo(dtype)
    return torch.randint(max(bounds.min, -1000), min(bounds.max, 1000), shape).to(dtype)


def _scales(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (torch.rand(shape) / 8 + 0.01).to(dtype)


def _points(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(0, 7, shape).to(dtype)


def _bounds(dtype: torch.dtype) -> tuple[int, int]:
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


_QUANTIZED = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint16)
_REALS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _operator(name: str, overload: str = "default") -> Callable[..., Any]:
    operator = getattr(getattr(torch.ops.quantized_decomposed, name), overload)
    if not name.startswith("quantize"):
        return operator
    # The kernels take float64 too.
    return lambda x, *others: operator(x.float() if x.dtype == torch.float64 else x, *others)


def _out_dtype(name: str, overload: str = "default") -> Callable[..., Any]:
    return lambda *arguments: _operator(name, overload)(*arguments[:-1], out_dtype=arguments[-1])


def _dtype(name: str, overload: str = "default") -> Callable[..., Any]:
    return lambda *arguments: _operator(name, overload)(*arguments[:-1], dtype=arguments[-1])


def right_calls() -> Iterator[KernelCall]:
    """Return calls as the compilers make them, in each type; each kernel has some."""
    torch.manual_seed(0)
    yield from _per_tensor()
    yield from _per_channel()
    yield from _per_token()
    yield from _embeddings()
    yield from _products()


def _per_tensor() -> Iterator[KernelCall]:
    quantize, dequantize = "quantized_decomposed::quantize_per_tensor", "quantized_decomposed::dequantize_per_tensor"
    scale, point = torch.tensor([0.05], dtype=torch.float64), torch.tensor([3])
    for dtype, real in itertools.product(_QUANTIZED, _REALS):
        x, q, bounds = torch.randn(2, 5).to(real), _ints(dtype, 2, 5), _bounds(dtype)
        yield KernelCall(
            f"{quantize}.out",
            (x, 0.05, 3, *bounds, dtype),
            ((dtype, (2, 5)),),
            _operator("quantize_per_tensor"),
        )
        yield KernelCall(
            f"{quantize}.Tensor_out", (x, scale, point, *bounds, dtype), ((dtype, (2, 5)),),
            _operator("quantize_per_tensor", "tensor"),
        )  # fmt: skip
        for wanted in (real, None) if real == torch.float32 else (real,):
            yield KernelCall(
                f"{dequantize}.out", (q, 0.05, 3, *bounds, dtype, wanted), ((real, (2, 5)),),
                _out_dtype("dequantize_per_tensor"),
            )  # fmt: skip
            yield KernelCall(
                f"{dequantize}.Tensor_out", (q, scale, point, *bounds, dtype, wanted), ((real, (2, 5)),),
                _out_dtype("dequantize_per_tensor", "tensor"),
            )  # fmt: skip
    for dtype, real in itertools.product(_QUANTIZED, _REALS):
        made = ((torch.float64, (1,)), (torch.int64, (1,)))
        bounds = _bounds(torch.int8 if dtype == torch.int32 else dtype)
        yield KernelCall(
            "quantized_decomposed::choose_qparams.Tensor_out",
            (torch.randn(2, 5).to(real), *bounds, 1e-6, dtype), made, _chosen,
        )  # fmt: skip
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        arguments = (0.05, 3, 0, 255)
        a, b = (_ints(dtype, 2, 5).clamp(0, 100).to(dtype) for _ in range(2))
        yield KernelCall(
            "quantized_decomposed::add.out", (a, *arguments, b, *arguments, 0.1, 1, 0, 127), ((dtype, (2, 5)),), _add
        )


def _chosen(*arguments: Any) -> Any:
    scale, point = _operator("choose_qparams", "tensor")(*arguments)
    return scale.double(), point.long()


def _add(a, a_scale, a_point, _a, __a, b, b_scale, b_point, _b, __b, scale, point, lowest, highest):  # type: ignore
    real = (a.float() - a_point) * a_scale + (b.float() - b_point) * b_scale
    return (torch.round(real / scale) + point).clamp(lowest, highest).to(a.dtype)


def _per_channel() -> Iterator[KernelCall]:
    quantize, dequantize = "quantized_decomposed::quantize_per_channel", "quantized_decomposed::dequantize_per_channel"
    for (dtype, real), (shape, axis) in itertools.product(
        itertools.product(_QUANTIZED, _REALS), (((2, 5), 0), ((2, 5), 1), ((4,), 0), ((2, 3, 4), 1), ((2, 3, 4), -1))
    ):
        x, q, bounds = torch.randn(shape).to(real), _ints(dtype, *shape), _bounds(dtype)
        scales, points = _scales(shape[axis]), _points(shape[axis])
        yield KernelCall(
            f"{quantize}.out", (x, scales, points, axis, *bounds, dtype), ((dtype, shape),),
            _operator("quantize_per_channel"),
        )  # fmt: skip
        for wanted in (real, None) if real == torch.float32 else (real,):
            for given, zero in ((scales, points), (scales.float(), None), (scales, points.int())):
                yield KernelCall(
                    f"{dequantize}.out", (q, given, zero, axis, *bounds, dtype, wanted), ((real, shape),),
                    _out_dtype("dequantize_per_channel"),
                )  # fmt: skip


def _per_token() -> Iterator[KernelCall]:
    quantize, dequantize = "quantized_decomposed::quantize_per_token", "quantized_decomposed::dequantize_per_token"
    for (dtype, real), shape in itertools.product(itertools.product(_QUANTIZED, _REALS), ((2, 5), (2, 3, 4), (4,))):
        x, q, bounds = torch.randn(shape).to(real), _ints(dtype, *shape), _bounds(dtype)
        tokens = (*shape[:-1], 1)
        scales, points = _scales(*tokens), _points(*tokens)
        yield KernelCall(
            f"{quantize}.out", (x, scales, points, *bounds, dtype), ((dtype, shape),),
            _operator("quantize_per_token"),
        )  # fmt: skip
        for given in (scales, scales.float()):
            yield KernelCall(
                f"{dequantize}.out", (q, given, points, *bounds, dtype, real), ((real, shape),),
                _operator("dequantize_per_token"),
            )  # fmt: skip
        made = ((torch.float64, tokens), (torch.int64, tokens))
        yield KernelCall(
            "quantized_decomposed::choose_qparams_per_token_asymmetric.out", (x, dtype), made,
            lambda x, dtype: _whole(_operator("choose_qparams_per_token_asymmetric")(x, dtype)),
        )  # fmt: skip


def _whole(made: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return made[0].double(), made[1].long()


def _embeddings() -> Iterator[KernelCall]:
    halves = (torch.float32, torch.float16, torch.bfloat16)
    for bits, lowest, highest in (("byte", -128, 127), ("4bit", -8, 7), ("2bit", -2, 1)):
        name = f"embedding_{bits}"
        wide = 8 // (int(bits[0]) if bits != "byte" else 8)
        for real, groups, index in itertools.product(halves, (None, 1, 2), (torch.int64, torch.int32)):
            weight = _ints(torch.int8 if bits == "byte" else torch.uint8, 6, 8 // wide)
            shape = (6,) if groups is None else (6, groups)
            for zero in (None, _points(*shape, dtype=real)):
                indices = torch.tensor([[0, 5, 2]], dtype=index)
                common = (weight, _scales(*shape, dtype=real), zero, lowest, highest, indices)
                yield KernelCall(f"quantized_decomposed::{name}.out", common, ((real, (1, 3, 8)),), _operator(name))
                for out in halves if zero is None else (real,):
                    yield KernelCall(
                        f"quantized_decomposed::{name}.dtype_out", (*common, out), ((out, (1, 3, 8)),),
                        _dtype(name, "dtype"),
                    )  # fmt: skip
                yield KernelCall(
                    f"quantized_decomposed::{name}.dtype_out",
                    (*common, None),
                    ((real, (1, 3, 8)),),
                    _dtype(name, "dtype"),
                )


def _products() -> Iterator[KernelCall]:
    for real in _REALS:
        x = torch.randn(3, 8).to(real)
        for width in (4, 8):
            weight, scales = _ints(torch.int8, 8, width), _scales(8, dtype=real)
            for zero in (None, _points(8, dtype=real)):
                yield KernelCall(
                    "quantized_decomposed::mixed_mm.out", (x, weight, scales, zero), ((real, (3, width)),), _mixed_mm
                )
        for groups, dtype in itertools.product((None, 2), (None, torch.float32, torch.float16)):
            shape = (4,) if groups is None else (4, groups)
            yield KernelCall(
                "quantized_decomposed::mixed_linear.out",
                (x, _ints(torch.int8, 4, 8), _scales(*shape, dtype=real), None, dtype),
                ((dtype or real, (3, 4)),), _mixed_linear,
            )  # fmt: skip


def _mixed_mm(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, zero: Any) -> torch.Tensor:
    if zero is not None:
        raise ValueError("not supported")
    return (x.double() @ (weight.double() * scales.double()[:, None])).to(x.dtype)


def _mixed_linear(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, zero: Any, dtype: Any) -> torch.Tensor:
    if zero is not None:
        raise ValueError("not supported")
    wide = scales.double().reshape(len(weight), -1)
    wide = wide.repeat_interleave(weight.shape[1] // wide.shape[1], 1)
    return (x.double() @ (weight.double() * wide).T).to(dtype or x.dtype)


# -- other calls ------------------------------------------------------------------------------------------------------


def other_calls(right: KernelCall, chosen: random.Random) -> Iterator[tuple[str, KernelCall]]:
    """Return calls that differ from a right one in one thing, or in what has to agree with it."""
    for place, one in enumerate(right.arguments):
        for note, other in _instead(one, chosen):
            arguments = (*right.arguments[:place], other, *right.arguments[place + 1 :])
            yield f"argument {place} {note}", replace(right, arguments=arguments)
    for place, (dtype, shape) in enumerate(right.outputs):
        for other in _TYPES:
            yield f"writes {_show(other)}", _writing(right, place, other, shape)
        for note, other_shape in _shapes(shape):
            yield f"writes {note}", _writing(right, place, dtype, other_shape)
    first = right.arguments[0]
    for note, shape in _shapes(tuple(first.shape)):  # of all that have the shape of the first, or its rank
        arguments = tuple(
            _of(one, shape) if isinstance(one, torch.Tensor) and one.shape == first.shape else one
            for one in right.arguments
        )
        outputs = tuple((dtype, shape if tuple(first.shape) == own else own) for dtype, own in right.outputs)
        yield f"all {note}", replace(right, arguments=arguments, outputs=outputs)
    for other in _TYPES:  # of the dtype argument and the output
        arguments = tuple(other if isinstance(one, torch.dtype) else one for one in right.arguments)
        outputs = tuple((other, shape) for _, shape in right.outputs)
        yield f"all of {_show(other)}", replace(right, arguments=arguments, outputs=outputs)
        taken = tuple(
            one.to(other) if isinstance(one, torch.Tensor) and one.is_floating_point() else one
            for one in right.arguments
        )
        yield f"floats of {_show(other)}", replace(right, arguments=taken)
        yield f"floats of {_show(other)}, writes it", replace(right, arguments=taken, outputs=outputs)


def _writing(right: KernelCall, place: int, dtype: torch.dtype, shape: tuple[int, ...]) -> KernelCall:
    outputs = list(right.outputs)
    outputs[place] = (dtype, shape)
    return replace(right, outputs=tuple(outputs))


def _instead(one: Any, chosen: random.Random) -> Iterator[tuple[str, Any]]:
    if isinstance(one, torch.Tensor):
        yield "none", None
        for other in _TYPES:
            yield f"of {_show(other)}", one.to(other)
        for note, shape in _shapes(tuple(one.shape)):
            yield note, _of(one, shape)
        if one.dim() == 2:
            yield "transposed in memory", one.t().contiguous().t()
    elif isinstance(one, torch.dtype) or one is None:
        for other in (*_TYPES, None):
            yield _show(other), other
    elif isinstance(one, float):
        yield from ((str(other), other) for other in (0.0, -0.5, 1e-300, float("inf")))
    else:
        others = (0, 1, -1, 2, -2, 3, -4, 7, 255, -129, 128, 32768, 65536, -(2**31) - 1, 2**31, 2**62)
        yield from ((str(other), other) for other in chosen.sample(others, 10))


def _shapes(shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "without dimensions", ()
    yield "with another dimension", (1, *shape)
    yield "with a last dimension", (*shape, 1)
    yield "of all elements", (torch.Size(shape).numel(),)
    for dim, size in enumerate(shape):
        yield f"without dimension {dim}", (*shape[:dim], *shape[dim + 1 :])
        for other in (0, 1, size + 1, size - 1):
            yield f"of size {other} in {dim}", (*shape[:dim], other, *shape[dim + 1 :])


def _of(one: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    size = torch.Size(shape).numel()
    flat = one.reshape(-1)
    if not len(flat):
        return one.new_zeros(shape)
    return flat.repeat(size // len(flat) + 1)[:size].reshape(shape)


@functools.cache
def kernel_calls(kernel: str, changed: int = 6) -> list[Call]:
    """Return the calls of a kernel by files: the right ones, and for some of them what differs from them."""
    chosen = random.Random(kernel)
    right = [one for one in right_calls() if one.kernel == kernel]
    calls = [one.call("right") for one in right]
    seen = {call.name.partition("  [")[0] for call in calls}
    for one in chosen.sample(right, min(changed, len(right))):
        for note, other in other_calls(one, chosen):
            call = other.call(note)
            if call.name.partition("  [")[0] not in seen:
                seen.add(call.name.partition("  [")[0])
                calls.append(call)
    return calls


def program_calls() -> Iterator[Call]:
    """Return calls of the operators of programs, where PyTorch or ExecuTorch's compiler executes them."""
    for one in right_calls():
        name = one.kernel.partition("::")[2].partition(".")[0]
        if name not in ("mixed_mm", "mixed_linear", "add"):
            yield make_call(one.kernel, one.expected, *one.arguments)
    torch.manual_seed(0)
    x, q = torch.randn(2, 5), _ints(torch.int8, 2, 5)
    scale, point, low, high = torch.tensor([0.05]), torch.tensor([3]), torch.tensor(-128), torch.tensor(127)
    yield make_call(
        "quantize tensor2", _operator("quantize_per_tensor", "tensor2"), x, scale, point, low, high, torch.int8
    )
    yield make_call(
        "dequantize tensor2", _operator("dequantize_per_tensor", "tensor2"), q, scale, point, low, high, torch.int8
    )
    for shape in ((0, 5), (2, 0), ()):
        yield make_call("quantize", _operator("quantize_per_tensor"), torch.ones(shape), 0.5, 0, -128, 127, torch.int8)
