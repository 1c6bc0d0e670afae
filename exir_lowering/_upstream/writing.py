"""Files that ExecuTorch's serializers write: a program that only calls one payload, and data files put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO

_DATA_ALIGNMENT = 4096  # of a segment of a data file; what its backend asked for is smaller, and not in the file


def write_call(module: Any, method: str, inputs: Sequence[Any], outputs: Sequence[Any], named: Iterable[str]) -> bytes:
    """Return a `.pte` file whose one method calls a lowered module, with these of its named data.

    The inputs and outputs have a dtype, sizes, a dim_order, and are dynamic or not.
    """
    from executorch.exir import schema
    from executorch.exir._serialize._named_data_store import NamedDataStore
    from executorch.exir._serialize._program import PTEFile, serialize_pte_binary
    from executorch.exir.tensor import scalar_type_enum

    from exir_lowering._upstream.delegates import named_data_contents

    dynamism, values = schema.TensorShapeDynamism, []
    for one in (*inputs, *outputs):
        shape = dynamism.DYNAMIC_BOUND if one.dynamic else dynamism.STATIC
        form = scalar_type_enum(one.dtype), 0, list(one.sizes), list(one.dim_order)
        values.append(schema.EValue(schema.Tensor(*form, False, 0, 0, None, shape)))
    taken, given = list(range(len(inputs))), list(range(len(inputs), len(values)))
    call = schema.Instruction(schema.DelegateCall(0, [*taken, *given]))
    reference = schema.BackendDelegateDataReference(schema.DataLocation.INLINE, 0)
    plan = schema.ExecutionPlan(
        name=method,
        container_meta_type=schema.ContainerMetadata("", ""),
        values=values,
        inputs=taken,
        outputs=given,
        chains=[schema.Chain(taken, given, [call], None)],
        operators=[],
        delegates=[schema.BackendDelegate(module.backend_id, reference, module.compile_specs)],
        non_const_buffer_sizes=[0],
    )
    payload, constants = schema.BackendDelegateInlineData(module.processed_bytes), schema.SubsegmentOffsets(0, [])
    program = schema.Program(0, [plan], [schema.Buffer(b"")], [payload], [], constants)
    store, contents = NamedDataStore(), named_data_contents(module)
    for key in named:
        store.add_named_data(key, contents[key], alignment=16)
    file = PTEFile(program, named_data=store.get_named_data_store_output())
    return bytes(serialize_pte_binary(file, extract_delegate_segments=True))


def write_data(file: BinaryIO, data: Mapping[str, tuple[memoryview, Any]]) -> None:
    """Write a `.ptd` file with named data, each with the form of the tensor that it is, if it is one."""
    from executorch.exir._serialize.data_serializer import DataEntry, DataPayload
    from executorch.exir.tensor import scalar_type_enum
    from executorch.exir.tensor_layout import TensorLayout
    from executorch.extension.flat_tensor.serialize.serialize import FlatTensorConfig, FlatTensorSerializer

    entries = {}
    for number, (key, (_, form)) in enumerate(data.items()):
        layout = form and TensorLayout(scalar_type_enum(form.dtype), list(form.sizes), list(form.dim_order))
        entries[key] = DataEntry(number, 1, layout)
    payload = DataPayload([bytes(content) for content, _ in data.values()], entries)
    FlatTensorSerializer(FlatTensorConfig(_DATA_ALIGNMENT)).serialize(payload).write_to_file(file)
