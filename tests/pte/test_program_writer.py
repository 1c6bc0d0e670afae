"""The program that calls one payload is what ExecuTorch's serializer writes for it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from executorch.exir import schema
from executorch.exir._serialize._flatbuffer_program import _flatbuffer_to_program
from executorch.exir._serialize._program import PTEFile, serialize_pte_binary
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.scalar_type import ScalarType

from exir_lowering._upstream.delegates import named_data
from exir_lowering.pte import container, format as pte_format
from exir_lowering.pte.code import read_methods
from exir_lowering.pte.program_writer import PayloadCall, write_call
from exir_lowering.pte.value_kinds import Tensor


def tensor(dtype: torch.dtype, *sizes: int, order: Sequence[int] | None = None, dynamic: bool = False) -> Tensor:
    return Tensor(dtype, sizes, tuple(order or range(len(sizes))), dynamic=dynamic, unbound=False)


SHARED = memoryview(bytes(range(200)))
CASES = {
    "plain": (
        PayloadCall(
            "forward",
            "demo",
            memoryview(b"payload"),
            [],
            [tensor(torch.float32, 2, 3)],
            [tensor(torch.float32)],
        ),
        {},
    ),
    "all": (
        PayloadCall(
            "прямо",
            "demo",
            memoryview(bytes(129)),
            [("first", b"\0value"), ("second", b""), ("", b"x")],
            [
                tensor(torch.int64, 2, 3, 4, 5, order=(0, 2, 3, 1), dynamic=True),
                tensor(torch.uint8, 3, 3),
                tensor(torch.bool, 0, 7),
            ],
            [tensor(torch.float64, 1, dynamic=True), tensor(torch.bfloat16)],
        ),
        {"a": SHARED, "b": memoryview(b"y"), "c": SHARED, "d": memoryview(b"")},
    ),
    "nothing": (PayloadCall("forward", "demo", memoryview(b"x"), [], [], []), {"a": memoryview(b"weight")}),
}


def written_by_executorch(call: PayloadCall, named: dict[str, memoryview]) -> bytes:
    values = [schema.EValue(_tensor(content)) for content in (*call.inputs, *call.outputs)]
    instructions = [schema.Instruction(schema.DelegateCall(0, list(range(len(values)))))]
    reference = schema.BackendDelegateDataReference(schema.DataLocation.INLINE, 0)
    specs = [CompileSpec(*spec) for spec in call.specs]
    inputs = list(range(len(call.inputs)))
    outputs = list(range(len(inputs), len(values)))
    plan = schema.ExecutionPlan(
        name=call.method,
        container_meta_type=schema.ContainerMetadata("", ""),
        values=values,
        inputs=inputs,
        outputs=outputs,
        chains=[schema.Chain(inputs, outputs, instructions, None)],
        operators=[],
        delegates=[schema.BackendDelegate(call.backend, reference, specs)],
        non_const_buffer_sizes=[0],
    )
    program = schema.Program(
        version=0,
        execution_plan=[plan],
        constant_buffer=[schema.Buffer(b"")],
        backend_delegate_data=[schema.BackendDelegateInlineData(bytes(call.payload))],
        segments=[],
        constant_segment=schema.SubsegmentOffsets(0, []),
        named_data=[],
    )
    store = named_data({name: bytes(content) for name, content in named.items()}, 16)
    return bytes(serialize_pte_binary(PTEFile(program, named_data=store), extract_delegate_segments=True))


def _tensor(content: Tensor) -> schema.Tensor:
    dynamism = schema.TensorShapeDynamism
    return schema.Tensor(
        scalar_type=getattr(ScalarType, SCALAR_TYPES[content.dtype]),
        storage_offset=0,
        sizes=list(content.sizes),
        dim_order=list(content.dim_order),
        requires_grad=False,
        layout=0,
        data_buffer_idx=0,
        allocation_info=None,
        shape_dynamism=dynamism.DYNAMIC_BOUND if content.dynamic else dynamism.STATIC,
    )


SCALAR_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.bfloat16: "BFLOAT16",
    torch.int64: "LONG",
    torch.uint8: "BYTE",
    torch.bool: "BOOL",
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_executorch_writes(case: str) -> None:
    files = [memoryview(write(*CASES[case])) for write in (write_call, written_by_executorch)]
    extents = [container.read_pte(file) for file in files]
    tables = [bytes(file[: extent.tables]) for file, extent in zip(files, extents, strict=True)]
    ours, theirs = map(_flatbuffer_to_program, tables)
    assert ours == theirs
    assert all(extent.base % 128 == 0 for extent in extents)
    assert extents[0].space == extents[1].space
    assert files[0][extents[0].base :] == files[1][extents[1].base :]


@pytest.mark.parametrize("case", CASES)
def test_our_reader_finds_the_same(case: str) -> None:
    files = [memoryview(write(*CASES[case])) for write in (write_call, written_by_executorch)]
    ours, theirs = (pte_format.read_program(file, lambda backend: None) for file in files)
    assert ours == theirs
    (ours_code, our_data), (theirs_code, their_data) = (read_methods(file, lambda code, data: code) for file in files)
    assert ours_code == theirs_code
    assert our_data.named == their_data.named
    assert list(ours_code) == [CASES[case][0].method]
