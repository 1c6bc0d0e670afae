"""Cases that show what a release's runtime runs: files of one kernel call each, from torch's samples of operators."""
# ruff: noqa: B023 - each function is called before the next one is made

from __future__ import annotations

import functools
import itertools
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import program_writer as writer
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from exir_lowering.pte import container, slots
from exir_lowering.pte.slots import KernelTypes as K
from exir_lowering.pte.value_kinds import CODES, Tensor

Case = tuple[bytes, str, list[Any], list[torch.Tensor]]
"""A file, its method, the inputs, and the results that are expected."""

DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_RANDOM = frozenset(
    {
        *("bernoulli", "empty", "empty_like", "empty_permuted", "empty_strided", "multinomial", "new_empty"),
        *("new_empty_strided", "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d"),
        *("nn.functional.dropout3d", "nn.functional.feature_alpha_dropout.with_train", "nn.functional.rrelu"),
        *("normal", "normal.in_place", "normal.number_mean", "rand_like", "randint", "randint_like", "randn"),
        *(
            "randn_like",
            "uniform",
            "exponential",
            "geometric",
            "cauchy",
            "log_normal",
            "nn.functional.fractional_max_pool2d",
        ),
        "nn.functional.fractional_max_pool3d",
    }
)
_MOST = 30  # samples of an operator and a type
_LARGEST = 4096  # elements of a sample
_EACH = 2  # calls of one kind
_UNSET = ("aten::empty", "dim_order_ops::_empty")  # what they return has any content


@functools.cache
def operators() -> Sequence[Any]:
    """Return torch's own tests of operators, each operator once."""
    from torch.testing._internal.common_methods_invocations import op_db

    return sorted((op for op in op_db if op.full_name not in _RANDOM), key=lambda op: op.full_name)


class Unwritable(Exception):
    """A call that no file can have."""


def _number(kind: int, flags: Any, value: Any) -> dict[int, Any]:
    return {slots.EValue.VAL_TYPE: (writer._UINT8, kind), slots.EValue.VAL: {slots.ONLY: (flags, value)}}


class KernelFile:
    """Writes a file whose only instruction calls a kernel."""

    def __init__(self, schema: Any) -> None:
        self.schema, self.values, self.memory = schema, [], 0
        self.inputs: list[torch.Tensor] = []
        self.places: list[int] = []

    def add(self, table: dict[int, Any]) -> int:
        self.values.append(table)
        return len(self.values) - 1

    def tensor(self, tensor: torch.Tensor, given: bool) -> int:
        shape = tuple(tensor.shape)
        if tensor.is_contiguous():
            order = tuple(range(tensor.dim()))
        elif tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
            order = (0, 2, 3, 1)
        else:
            raise Unwritable("its memory is in no order")
        table = writer._tensor(Tensor(tensor.dtype, shape, order, not given, False))
        table[slots.Tensor.ALLOCATION_INFO] = writer._allocation(self.memory)
        self.memory += -(-max(tensor.nbytes, 1) // 16) * 16
        place = self.add({slots.EValue.VAL_TYPE: (writer._UINT8, K.TENSOR), slots.EValue.VAL: table})
        if given:
            self.inputs.append(tensor)
            self.places.append(place)
        return place

    def value(self, value: Any, type_: str) -> int:
        """Add an argument of a schema's type."""
        if value is None:
            return self.add({slots.EValue.VAL_TYPE: (writer._UINT8, K.NULL), slots.EValue.VAL: {}})
        if isinstance(value, torch.Tensor):
            return self.tensor(value if value.is_contiguous() else _dense(value), True)
        if isinstance(value, torch.dtype):
            return self.value(CODES[value], "int")
        if isinstance(value, bool) and "float" not in type_:
            return self.add(_number(K.BOOL, writer.number_types.BoolFlags, int(value)))
        if isinstance(value, str):
            return self.add({slots.EValue.VAL_TYPE: (writer._UINT8, K.STRING), slots.EValue.VAL: {slots.ONLY: value}})
        if isinstance(value, float) or (isinstance(value, (int, bool)) and "float" in type_):
            bits = struct.unpack("<q", struct.pack("<d", value))[
                0
            ]  # a number of 8 bytes, which the writer takes as an int
            return self.add(_number(K.DOUBLE, writer._INT64, bits))
        if isinstance(value, int):
            return self.add(_number(K.INT, writer._INT64, int(value)))
        if isinstance(value, (list, tuple)):
            return self.list(value, type_)
        if isinstance(value, torch.memory_format):
            return self.value({torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2}[value], "")
        raise Unwritable(f"{type(value).__name__} as {type_}")

    def list(self, items: Sequence[Any], type_: str) -> int:
        if "Tensor" in type_:
            kind = K.OPTIONAL_TENSOR_LIST if "Optional[Tensor]" in type_ else K.TENSOR_LIST
            flags, numbers = writer._INT32, [-1 if item is None else self.value(item, "Tensor") for item in items]
        elif "bool" in type_:
            kind, flags, numbers = K.BOOL_LIST, writer.number_types.BoolFlags, [int(item) for item in items]
        elif "float" in type_:
            kind, flags, numbers = K.DOUBLE_LIST, writer.number_types.Float64Flags, [float(item) for item in items]
        else:
            kind, flags = K.INT_LIST, writer._INT64
            numbers = [self.value(int(item), "int") for item in items]
        return self.add(
            {slots.EValue.VAL_TYPE: (writer._UINT8, kind), slots.EValue.VAL: {slots.ONLY: (flags, numbers)}}
        )

    def tensors(self, places: Sequence[int]) -> int:
        """Add a list of tensors."""
        content = {slots.ONLY: (writer._INT32, places)}
        return self.add({slots.EValue.VAL_TYPE: (writer._UINT8, K.TENSOR_LIST), slots.EValue.VAL: content})

    def write(self, call: Sequence[int], outputs: Sequence[int]) -> bytes:
        of, chain, meta, kernel = slots.ExecutionPlan, slots.Chain, slots.ContainerMetadata, slots.KernelCall
        inputs, returned = (writer._INT32, self.places), (writer._INT32, outputs)
        name, _, overload = self.schema.name, None, self.schema.overload_name
        instruction = {
            slots.Instruction.INSTR_ARGS_TYPE: (writer._UINT8, slots.InstructionArguments.KERNEL_CALL),
            slots.Instruction.INSTR_ARGS: {kernel.ARGS: (writer._INT32, call)},
        }
        plan = {
            of.NAME: "forward",
            of.CONTAINER_META_TYPE: {meta.ENCODED_INP_STR: "", meta.ENCODED_OUT_STR: ""},
            of.VALUES: self.values,
            of.INPUTS: inputs,
            of.OUTPUTS: returned,
            of.CHAINS: [{chain.INPUTS: inputs, chain.OUTPUTS: returned, chain.INSTRUCTIONS: [instruction]}],
            of.OPERATORS: [{slots.Operator.NAME: name, slots.Operator.OVERLOAD: overload}],
            of.DELEGATES: [],
            of.NON_CONST_BUFFER_SIZES: (writer._INT64, [0, max(self.memory, 16)]),
        }
        segments, _, end = writer._lay_out([memoryview(b"")], 128)
        tables = {slots.Program.EXECUTION_PLAN: [plan], slots.Program.CONSTANT_BUFFER: []}
        tables |= {slots.Program.BACKEND_DELEGATE_DATA: [], slots.Program.SEGMENTS: segments}
        tables[slots.Program.CONSTANT_SEGMENT] = {slots.SubsegmentOffsets.OFFSETS: (writer._UINT64, [0])}
        return writer.add_header(writer._build(tables, container.PTE_MAGIC), 128, end)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor if dense else tensor.contiguous()


def write_call(out: Any, named: Mapping[str, Any], results: Sequence[torch.Tensor]) -> Case:
    """Write the call of an out variant."""
    file = KernelFile(out._schema)
    call, outputs = [], []
    for argument in out._schema.arguments:
        type_ = str(argument.type)
        if argument.is_out:
            if "List" in type_:
                outputs = [file.tensor(_dense(each), False) for each in results]
                call.append(file.tensors(outputs))
            else:
                outputs.append(file.tensor(_dense(results[len(outputs)]), False))
                call.append(outputs[-1])
            continue
        value = named.get(argument.name, argument.default_value)
        call.append(file.value(value, type_))
    if call[-1] not in outputs or len(outputs) == 1:
        call.append(call[-1])
    else:
        call.append(file.tensors(outputs))
    return file.write(call, outputs), "forward", [one.clone() for one in file.inputs], _expected(out, results)


def primitive_cases(kernels: Sequence[str]) -> Iterator[Case]:
    """Yield calls of the primitives that compute with numbers; what they return is not compared."""

    class Schema:
        name, overload_name = "", ""

    for kernel in kernels:
        if not kernel.startswith("executorch_prim::") or "::et_" in kernel:
            continue
        schema = Schema()
        schema.name, schema.overload_name = kernel.split(".")
        word = schema.name.partition("::")[2]
        unary = word in ("ceil", "round", "trunc", "neg", "sym_float", "sym_int", "sym_not")
        for values in (
            ((7,), (7.5,), (True,)) if unary else ((True, 7, 2), (True, 7.5, 2.0)) if word == "sym_ite" else _PAIRS
        ):
            for result in (0, 0.0, True):
                file = KernelFile(schema)
                call = [file.value(value, "number") for value in values]
                yield file.write([*call, file.value(result, "number")], []), "forward", [], []


def order_cases() -> Iterator[Case]:
    """Yield calls of the operators that change types and orders of dimensions, which torch takes apart."""
    orders, last = torch.ops.dim_order_ops, [0, 2, 3, 1]
    for shape, given, made in itertools.product(_ONE, DTYPES, DTYPES):
        plain, x = list(range(len(shape))), (torch.rand(shape) * 3).to(given)
        ways = [(x, plain)]
        if len(shape) == 4:
            z = x.contiguous(memory_format=torch.channels_last)
            ways += [(x, last), (z, plain), (z, last)]
        for one, order in ways:
            copy, clone, empty = orders._to_dim_order_copy, orders._clone_dim_order, orders._empty_dim_order
            arguments = {"self": one, "non_blocking": False, "dim_order": order}
            yield write_call(copy.out, arguments, [copy(one, dtype=made, dim_order=order)])
            if given == made:
                yield write_call(clone.out, arguments, [clone(one, dim_order=order)])
                sizes = {"size": list(shape), "dim_order": order}
                yield write_call(empty.out, sizes, [empty(list(shape), dtype=made, dim_order=order)])


_PAIRS = ((7, 2), (7.5, 2.0), (7, 2.0), (7.5, 2))


def _expected(out: Any, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if out.name().startswith(_UNSET):
        return [one.to("meta") for one in results]
    return [one.clone() for one in results]


def out_variants(kernels: Sequence[str]) -> dict[Any, Any]:
    """Return the out variant with a kernel, by the functional operator that computes the same."""
    found: dict[Any, Any] = {}
    for name in kernels:
        space, _, rest = name.partition("::")
        operator, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, space), operator, None)
        out = getattr(packet, overload or "default", None)
        if out is None or not any(argument.is_out for argument in out._schema.arguments):
            continue
        wanted = [(a.name, str(a.type)) for a in out._schema.arguments if not a.is_out]
        packets = [packet, getattr(getattr(torch.ops, space), operator.removesuffix("_copy"), packet)]
        for each in packets:
            for one in each.overloads():
                functional = getattr(each, one)
                given = [(a.name, str(a.type)) for a in functional._schema.arguments]
                given = [pair for pair in given if pair in wanted or pair[0] not in _MEMORY]
                if given == wanted and not any(a.is_out for a in functional._schema.arguments):
                    found.setdefault(functional, out)
    return found


_MEMORY = ("dtype", "layout", "device", "pin_memory", "memory_format")


class Recorder(TorchDispatchMode):
    """Records the calls of operators that have a kernel; takes the others apart as far as Edge conversion does."""

    def __init__(self, variants: Mapping[Any, Any], table: Mapping[Any, Any], seen: Counter[Any]) -> None:
        super().__init__()
        self.variants, self.table, self.seen, self.found = variants, table, seen, []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = self.variants.get(function)
        if out is None and function in self.table:
            try:
                with self:
                    made = self.table[function](*args, **kwargs)
                if made is not NotImplemented:
                    return made
            except Exception:
                pass
        key = out and (out, *map(_kind, pytree.tree_leaves((args, kwargs))))
        if out is None or self.seen[key] >= _EACH:
            return function(*args, **kwargs)
        self.seen[key] += 1
        before = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
        made = function(*args, **kwargs)
        if out is not None:
            names = [argument.name for argument in function._schema.arguments]
            results = [one.detach().clone() for one in pytree.tree_leaves(made) if isinstance(one, torch.Tensor)]
            self.found.append((out, {**dict(zip(names, before[0], strict=False)), **before[1]}, results))
        return made


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.dim(), leaf.is_contiguous(), not leaf.numel()
    return leaf if isinstance(leaf, (bool, str, torch.dtype)) else type(leaf)


def _shapes(sample: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of a sample, and the same with the images of channels last."""
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors or any(tensor.layout != torch.strided for tensor in tensors):
        return
    if sum(tensor.numel() for tensor in tensors) > _LARGEST:
        return
    plain = [leaf.detach().contiguous() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    yield pytree.tree_unflatten(plain, spec)
    if any(tensor.dim() == 4 for tensor in tensors):
        last = [
            one.contiguous(memory_format=torch.channels_last)
            if isinstance(one, torch.Tensor) and one.dim() == 4
            else one
            for one in plain
        ]
        yield pytree.tree_unflatten(last, spec)


_ONE, _TWO = [(), (3,), (2, 3), (2, 3, 4), (2, 3, 2, 2), (2, 1, 3, 2, 2)], ((1, 3), (2, 1, 1))


def _elementwise(op: Any, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield arguments of every rank, equal and broadcast, for operators that work element by element."""
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo

    if not isinstance(op, (UnaryUfuncInfo, BinaryUfuncInfo)):
        return

    def make(shape: Sequence[int]) -> torch.Tensor:
        return (torch.rand(shape) * 0.8 + 0.1).to(dtype) if dtype.is_floating_point else torch.ones(shape).to(dtype)

    for shape in _ONE:
        for format_ in (torch.contiguous_format, *[torch.channels_last] * (len(shape) == 4)):
            one = make(shape).contiguous(memory_format=format_)
            if isinstance(op, UnaryUfuncInfo):
                yield (one,), {}
                continue
            yield (one, make(shape).contiguous(memory_format=format_)), {}
            yield (one, make(())), {}
            yield (one, 2 if not dtype.is_floating_point else 0.5), {}
            for other in _ONE[:-1]:
                if other and shape[-len(other) :] == other and other != shape:
                    yield (one, make(other)), {}
                    yield (make(other), one), {}


def record_calls(kernels: Sequence[str]) -> Iterator[tuple[Any, Mapping[str, Any], list[torch.Tensor]]]:
    """Yield the calls of kernels that torch's own samples of operators make."""
    variants, table, seen = out_variants(kernels), torch._decomp.core_aten_decompositions(), Counter[Any]()
    for op in operators():
        for dtype in (dtype for dtype in DTYPES if dtype in op.dtypes):
            torch.manual_seed(0)
            try:
                samples = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 200))
            except Exception:
                continue
            random.Random(op.full_name).shuffle(samples)
            given = itertools.chain(*(_shapes(sample) for sample in samples[:_MOST]), _elementwise(op, dtype))
            for args, kwargs in given:
                yield from _record(Recorder(variants, table, seen), lambda: op.op(*args, **kwargs))
    for function in _others():
        yield from _record(Recorder(variants, table, seen), function)


def _record(recorder: Recorder, function: Callable[[], Any]) -> list[Any]:
    try:
        with torch.no_grad(), recorder:
            function()
    except Exception:  # the sample is of something that raises
        pass
    return recorder.found


_INT8, _BYTE = (-128, 127, torch.int8), (0, 255, torch.uint8)
_QUANTISED = (_INT8, _BYTE, (-32768, 32767, torch.int16), (-(2**31), 2**31 - 1, torch.int32))


def _others() -> Iterator[Callable[[], Any]]:
    """Yield calls of operators that torch has no samples of."""
    quantized, aten = torch.ops.quantized_decomposed, torch.ops.aten
    for shape in _ONE:
        x = torch.rand(shape)
        for low, high, dtype in _QUANTISED:
            q = (x * 50).to(dtype)
            yield lambda: quantized.quantize_per_tensor(x, 0.02, 3, low, high, dtype)
            yield lambda: quantized.dequantize_per_tensor(q, 0.02, 3, low, high, dtype)
            for dim in range(len(shape)):
                scales, zeros = torch.rand(shape[dim]).double() + 0.1, torch.zeros(shape[dim]).long()
                yield lambda: quantized.quantize_per_channel(x, scales, zeros, dim, low, high, dtype)
                yield lambda: quantized.dequantize_per_channel(q, scales, zeros, dim, low, high, dtype)
                floats = scales.float()
                yield lambda: quantized.quantize_per_channel(x, floats, zeros, dim, low, high, dtype)
                yield lambda: quantized.dequantize_per_channel(q, floats, zeros, dim, low, high, dtype)
            scale, zero = torch.tensor([0.02]).double(), torch.tensor([3])
            yield lambda: quantized.quantize_per_tensor.tensor(x, scale, zero, low, high, dtype)
            yield lambda: quantized.dequantize_per_tensor.tensor(q, scale, zero, low, high, dtype)
        yield lambda: quantized.choose_qparams.tensor(x, -128, 127, 1e-5, torch.int8)
        yield lambda: quantized.choose_qparams_per_token_asymmetric(x, torch.int8)
    for dtype in DTYPES[:4]:
        for shape in _ONE[2:]:
            x, w = torch.rand(shape).to(dtype), torch.rand(shape[1]).to(dtype)
            yield lambda: aten._native_batch_norm_legit_no_training(x, w, w, w, w, 0.1, 1e-5)
            yield lambda: aten._native_batch_norm_legit_no_training(x, None, None, w, w, 0.1, 1e-5)
            yield lambda: aten._native_batch_norm_legit.no_stats(x, w, w, True, 0.1, 1e-5)
