"""The numbers that files are read with are those of the schemas in the installed wheel of ExecuTorch."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from executorch.exir.scalar_type import ScalarType

from exir_lowering.pte import code, payloads as xnnpack, slots, value_kinds

PROGRAM = "exir/_serialize/program.fbs"
DATA = "extension/flat_tensor/serialize/flat_tensor.fbs"
ETDUMP = "devtools/etdump/etdump_schema_flatcc.fbs"
XNNPACK = "backends/xnnpack/serialization/runtime_schema.fbs"  # what the runtime reads
XNNPACK_WRITTEN = "backends/xnnpack/serialization/schema.fbs"  # what the compiler writes
SCALAR_TYPES = ("exir/_serialize/scalar_type.fbs", "extension/flat_tensor/serialize/scalar_type.fbs")


@dataclass(frozen=True)
class Schema:
    """The fields of tables with their types, and the numbers of what unions and enums have, by name."""

    tables: dict[str, list[tuple[str, str]]]
    unions: dict[str, dict[str, str]]
    enums: dict[str, dict[str, int]]

    def numbers(self, name: str) -> dict[str, int]:
        """Return the slots of a table, or the numbers of the members of a union or enum."""
        if name in self.enums:
            return self.enums[name]
        if name in self.unions:
            return {member: number for number, member in enumerate(self.unions[name], 1)}
        names: list[str] = []
        for field, type_ in self.tables[name]:
            names += [f"{field}_type", field] if type_ in self.unions else [field]
        return {field: slot for slot, field in enumerate(names)}


@cache
def schema(path: str) -> Schema:
    """Read a schema of the wheel; enums have the values that it has in comments, too."""
    spec = find_spec("executorch")
    assert spec is not None and spec.submodule_search_locations is not None
    text = (Path(next(iter(spec.submodule_search_locations))) / path).read_text()
    blocks = {
        (kind, name): body
        for kind, name, body in re.findall(r"^(table|union|enum)\s+(\w+)[^{]*\{([^}]*)\}", text, re.M)
    }
    plain = {key: re.sub(r"//.*", "", body) for key, body in blocks.items()}
    tables = {
        name: re.findall(r"(\w+)\s*:\s*([\w.\[\]]+)[^;]*;", body)
        for (kind, name), body in plain.items()
        if kind == "table"
    }
    unions = {
        name: {member: table or member for member, table in re.findall(r"(\w+)(?:\s*:\s*(\w+))?\s*,", f"{body},")}
        for (kind, name), body in plain.items()
        if kind == "union"
    }
    enums = {
        name: {entry: int(value) for entry, value in re.findall(r"(\w+)\s*=\s*(\d+)", body)}
        for (kind, name), body in blocks.items()
        if kind == "enum"
    }
    return Schema(tables, unions, enums)


def named(module: ModuleType) -> dict[str, type]:
    return {name: one for name, one in inspect.getmembers(module, inspect.isclass) if one.__module__ == module.__name__}


def plain(name: str) -> str:
    return name.replace("_", "").lower()


def numbers(one: type) -> dict[str, int]:
    return {plain(name): int(getattr(one, name)) for name in dir(one) if name.isupper()}


OTHERS = {
    DATA: {"FlatTensor": "FlatTensor", "FlatNamedData": "NamedData", "TensorLayout": "TensorLayout"},
    ETDUMP: {name: name for name in ("ETDump", "RunData", "Event", "ProfileEvent")},
    XNNPACK: {
        name: name
        for name, one in vars(xnnpack).items()
        if isinstance(one, type) and issubclass(one, IntEnum) and one is not IntEnum
    },
}
"""The classes for each schema, with its name of the table; the other ones are for PROGRAM."""
ALSO = {*OTHERS[DATA], *OTHERS[ETDUMP]}
CLASSES = [
    *((slots, PROGRAM, name, name) for name in named(slots) if name not in ALSO),
    *((slots, path, *one) for path in (DATA, ETDUMP) for one in OTHERS[path].items()),
    *((xnnpack, XNNPACK, *one) for one in OTHERS[XNNPACK].items()),
]


@pytest.mark.parametrize(
    ("module", "path", "name", "table"),
    [pytest.param(*one, id=f"{Path(one[1]).stem}-{one[2]}") for one in CLASSES],
)
def test_names_have_the_numbers_of_the_schema(module: ModuleType, path: str, name: str, table: str) -> None:
    expected = schema(path).numbers(table)
    assert numbers(vars(module)[name]) == {plain(entry): number for entry, number in expected.items()}


def test_each_schema_has_names() -> None:
    for path in (PROGRAM, *OTHERS):
        assert sum(path == one[1] for one in CLASSES) >= 3, path
        assert schema(path).tables, path


ONE_FIELD = (
    *("Int", "Bool", "Double", "String", "IntList", "DoubleList", "BoolList", "TensorList", "OptionalTensorList"),
    *("FreeCall", "Buffer", "BackendDelegateInlineData"),
)


@pytest.mark.parametrize("name", ONE_FIELD)
def test_tables_with_one_field(name: str) -> None:
    assert list(schema(PROGRAM).numbers(name).values()) == [slots.ONLY]


WORDS_FOR_TYPES = {
    **{"byte": "uint8", "char": "int8", "short": "int16", "int": "int32", "long": "int64"},
    **{"half": "float16", "float": "float32", "double": "float64"},
    **{"complexhalf": "complex32", "complexfloat": "complex64", "complexdouble": "complex128"},
}


@pytest.mark.parametrize("path", SCALAR_TYPES)
def test_each_element_type_is_known_or_refused(path: str) -> None:
    types = {plain(entry): number for entry, number in schema(path).enums["ScalarType"].items()}
    for name, number in types.items():
        refused = "quantised" if name.startswith(("qint", "quint")) else "bits" if name.startswith("bits") else None
        if refused is not None:
            assert refused in value_kinds.REFUSED[number] and number not in value_kinds.DTYPES, name
            continue
        dtype = value_kinds.DTYPES[number]
        assert plain(str(dtype)) == f"torch.{WORDS_FOR_TYPES.get(name, name)}" and value_kinds.CODES[dtype] == number
    assert set(types.values()) == {*value_kinds.DTYPES, *value_kinds.REFUSED}
    assert {one.value for one in ScalarType} <= set(types.values())


def test_each_member_of_a_union_is_read() -> None:
    assert set(value_kinds.KINDS) == set(numbers(slots.KernelTypes).values())
    kinds = {code.KERNEL, code.DELEGATE, code.MOVE, code.JUMP, code.FREE}
    assert kinds == set(numbers(slots.InstructionArguments).values()) == set(code._FIELDS)


def test_data_files_and_programs_have_the_same_segments_and_names() -> None:
    assert schema(PROGRAM).numbers("DataSegment") == schema(DATA).numbers("DataSegment")
    assert numbers(slots.NamedData).items() <= numbers(slots.FlatNamedData).items()


@pytest.mark.parametrize("name", sorted(OTHERS[XNNPACK]))
def test_the_compiler_of_xnnpack_writes_what_its_runtime_reads(name: str) -> None:
    written, read = schema(XNNPACK_WRITTEN).numbers(name), schema(XNNPACK).numbers(name)
    assert written.items() <= read.items()


@pytest.mark.parametrize("kind", sorted(xnnpack.NODES), ids=xnnpack.NODES.get)
def test_nodes_have_the_fields_of_the_schema(kind: int) -> None:
    name, written = xnnpack.NODES[kind], schema(XNNPACK)
    assert written.numbers("XNodeUnion")[f"XNN{name}"] == kind
    fields = [field for field, _ in written.tables[written.unions["XNodeUnion"][f"XNN{name}"]]]
    own = xnnpack.FIELDS.get(name, ("input", "output"))
    if own:
        left = [field for field in fields[len(own) :] if field.endswith("_id")]
        assert not [field for field in left if not name.startswith("Concatenate")]
        for field, ours in zip(fields, own, strict=False):
            unread = name.startswith("Concatenate") and field[5:6].isdigit() and int(field[5]) > int(name[-1])
            assert ours == (field.removesuffix("_id") if field.endswith("_id") and not unread else "")


def test_the_node_types_are_all_that_there_are() -> None:
    assert set(xnnpack.NODES) == set(schema(XNNPACK).numbers("XNodeUnion").values())


def test_no_number_of_a_field_is_written_elsewhere() -> None:
    root = Path(__file__).parents[2]
    reads = re.compile(r"\.(number|numbers|real|text|content|table|tables|has)\(\d|Slot\(\d")
    folders = ("exir_lowering/pte", "exir_lowering/runtime", "exir_lowering/steps")
    for path in (path for folder in folders for path in (root / folder).rglob("*.py")):
        assert not reads.search(path.read_text()), path
