"""What a `.pte` and a `.ptd` file say about themselves, checked before the runtime gets them.

The runtime ends the process on some of what a damaged file can hold: a kernel that finds an integer where its tensor
should be, or one argument too few. So everything that is an index, a size or a type is checked here, from the tables
of the file alone; weights and payloads are not read. What is inside of a payload only its backend can judge.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from exir_lowering import _upstream
from exir_lowering.runtime import dataflow, xnnpack_payload
from exir_lowering.runtime.dataflow import Instruction
from exir_lowering.runtime.flatbuffer import CorruptError, Table, root

PTE_MAGIC = b"ET12"
PTD_MAGIC = b"FT01"
MAX_RANK = 16

# The members of the union KernelTypes, by their numbers in the file.
NULL, INT, BOOL, DOUBLE, TENSOR, STRING = 1, 2, 3, 4, 5, 6
INT_LIST, DOUBLE_LIST, BOOL_LIST, TENSOR_LIST, OPTIONAL_TENSOR_LIST = 7, 8, 9, 10, 11
KINDS = {
    NULL: "None",
    INT: "an int",
    BOOL: "a bool",
    DOUBLE: "a float",
    TENSOR: "a tensor",
    STRING: "a str",
    INT_LIST: "a list of ints",
    DOUBLE_LIST: "a list of floats",
    BOOL_LIST: "a list of bools",
    TENSOR_LIST: "a list of tensors",
    OPTIONAL_TENSOR_LIST: "a list of tensors and None",
}
# What kernels take for the types of schemas; they end the process when they find something else.
_ACCEPTED: Mapping[str, frozenset[int]] = MappingProxyType(
    {
        "Tensor": frozenset({TENSOR}),
        "int": frozenset({INT}),
        "float": frozenset({DOUBLE}),
        "bool": frozenset({BOOL}),
        "number": frozenset({INT, BOOL, DOUBLE}),
        "str": frozenset({STRING}),
        "List[Tensor]": frozenset({TENSOR_LIST}),
        "List[Optional[Tensor]]": frozenset({TENSOR_LIST, OPTIONAL_TENSOR_LIST}),
        "List[int]": frozenset({INT_LIST}),
        "List[float]": frozenset({DOUBLE_LIST}),
        "List[bool]": frozenset({BOOL_LIST}),
    }
)

DTYPES: Mapping[int, torch.dtype] = MappingProxyType(
    {
        0: torch.uint8,
        1: torch.int8,
        2: torch.int16,
        3: torch.int32,
        4: torch.int64,
        5: torch.float16,
        6: torch.float32,
        7: torch.float64,
        8: torch.complex32,
        9: torch.complex64,
        10: torch.complex128,
        11: torch.bool,
        12: torch.qint8,
        13: torch.quint8,
        14: torch.qint32,
        15: torch.bfloat16,
        16: torch.quint4x2,
        17: torch.quint2x4,
        22: torch.bits16,
        23: torch.float8_e5m2,
        24: torch.float8_e4m3fn,
        25: torch.float8_e5m2fnuz,
        26: torch.float8_e4m3fnuz,
        27: torch.uint16,
        28: torch.uint32,
        29: torch.uint64,
    }
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a method.

    Attributes:
        dtype: Its element type.
        sizes: Its shape; an upper bound when `dynamic`.
        dim_order: Its dimensions from outer to inner, as they lie in memory.
        dynamic: Whether the shape may be smaller than `sizes`.
        unbound: Whether the shape may be anything.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    dim_order: tuple[int, ...]
    dynamic: bool
    unbound: bool


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a method.

    Attributes:
        kind: Its member of the union, a key of `KINDS`.
        content: A `Tensor`, a number, a string or the indices in a list.
    """

    kind: int
    content: Tensor | int | float | bool | str | tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Delegation:
    """A part of a method that a backend executes.

    Attributes:
        number: Which of the method's delegates it is, from 0.
        backend: The backend's id.
        payload: The size of its payload in bytes.
        arguments: How many values it is called with, inputs first.
        outputs: The last ones of them, which it may return.
        counts: How many of these it returns, the likeliest number first: see `dataflow`.
    """

    number: int
    backend: str
    payload: int
    arguments: int
    outputs: tuple[Value, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a file.

    Attributes:
        name: Its name.
        inputs: What it takes.
        lost: The inputs that are None in the file but read as something else: integers that were dynamic at export.
        operators: The kernels it calls.
        backends: The backends it calls.
        arenas: The sizes of its planned memory.
        external: The names of the weights that are not in the file, so are in a data file.
        delegations: The parts that backends execute, in the order in which the runtime sets them up.
        outputs: What it returns.
        kernels: For each instruction that calls a kernel its operator, such as "aten.add.out".
    """

    name: str
    inputs: tuple[Value, ...]
    lost: frozenset[int]
    operators: tuple[str, ...]
    backends: tuple[str, ...]
    arenas: tuple[int, ...]
    external: tuple[str, ...]
    delegations: tuple[Delegation, ...]
    outputs: tuple[Value, ...]
    kernels: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Data:
    """The places in a file that its methods may refer to.

    Attributes:
        segments: The segments, not copied.
        named: The segments that have a name.
        constants: Where each constant starts in its segment, and the segment.
        initial: The same for the initial values of each list of mutable tensors.
        inline_constants: How many constants an old file holds in its tables.
        inline_payloads: The sizes of the payloads that are in the tables.
    """

    segments: tuple[memoryview, ...]
    named: Mapping[str, memoryview]
    constants: tuple[tuple[int, memoryview], ...]
    initial: tuple[tuple[tuple[int, memoryview], ...], ...]
    inline_constants: int
    inline_payloads: tuple[int, ...]


def read_program(file: memoryview) -> dict[str, Method]:
    """Read the methods of a `.pte` file, by name in the order of names.

    Args:
        file: The file's content, which is neither copied nor read beyond its tables.

    Raises:
        CorruptError: The file is not a `.pte` file that the runtime can be given.
    """
    program, data = open_program(file)
    methods: dict[str, Method] = {}
    for plan in program.tables(1):
        method = _method(plan, data)
        if method.name in methods:
            raise CorruptError(f"it has two methods {method.name!r}")
        methods[method.name] = method
    if not methods:
        raise CorruptError("it has no method")
    return {name: methods[name] for name in sorted(methods)}


def open_program(file: memoryview) -> tuple[Table, Data]:
    """Return the root of a `.pte` file's tables, and the places that its methods may refer to.

    Args:
        file: The file's content, which is not copied.

    Raises:
        CorruptError: The file is not a `.pte` file.
    """
    if len(file) < 8:
        raise CorruptError(f"it has {len(file)} bytes")
    magic = bytes(file[4:8])
    if magic != PTE_MAGIC:
        raise CorruptError(f"bytes 4 to 8 are {magic!r}, they are {PTE_MAGIC!r} in a .pte file")
    tables, space = _pte_extent(file)
    program = root(tables)
    segments = _segments(program.tables(4), space)
    constants = program.table(5)
    data = Data(
        segments,
        _named(program.tables(7), segments),
        _offsets(constants, segments) if constants is not None else (),
        tuple(_offsets(table, segments) for table in program.tables(6)),
        program.count(2),
        tuple(table.count(0) for table in program.tables(3)),
    )
    return program, data


def read_data(file: memoryview) -> dict[str, memoryview]:
    """Find the data in a `.ptd` file, by name.

    Args:
        file: The file's content, which is neither copied nor read beyond its tables.

    Raises:
        CorruptError: The file is not a `.ptd` file that the runtime can be given.
    """
    if len(file) < 48:
        raise CorruptError(f"it has {len(file)} bytes")
    if bytes(file[4:8]) != PTD_MAGIC or bytes(file[8:12]) != b"FH01":
        raise CorruptError(f"it starts with {bytes(file[4:12])!r}, a .ptd file has {PTD_MAGIC + b'FH01'!r} there")
    length, start, size, base, space = struct.unpack_from("<IQQQQ", file, 12)
    if length < 40 or start + size > len(file) or base + space > len(file):
        raise CorruptError(
            f"its header tells of {max(start + size, base + space)} bytes, the file has {len(file)}; "
            "it may have been cut short"
        )
    # Offsets in the tables count from the start of the file.
    table = root(file[: start + size])
    return _named(table.tables(2), _segments(table.tables(1), file[base : base + space]))


def tables_end(file: bytes | bytearray) -> int:
    """Return where the tables of a `.pte` file end, which was read before."""
    return len(_pte_extent(memoryview(file))[0])


def _pte_extent(file: memoryview) -> tuple[memoryview, memoryview]:
    """Return the part of the file that has its tables, and the one that has the segments."""
    if len(file) < 40 or bytes(file[8:12]) != b"eh00":
        return file, file[:0]
    length, size, base, space = struct.unpack_from("<IQQQ", file, 12)
    if length < 24:
        raise CorruptError(f"its header has {length} bytes, 24 or more are needed")
    if length < 32 or space == 0:
        space = max(len(file) - base, 0)
    end = max(size, base + space) if base else size
    if end > len(file):
        raise CorruptError(f"its header tells of {end} bytes, the file has {len(file)}; it may have been cut short")
    if size < 40 or (base and base < size):
        raise CorruptError(f"its header puts the segments at byte {base}, inside of {size} bytes of tables")
    return file[:size], file[base : base + space] if base else file[:0]


def _segments(tables: Iterable[Table], space: memoryview) -> tuple[memoryview, ...]:
    segments = []
    for number, table in enumerate(tables):
        offset, size = table.number(0, "Q"), table.number(1, "Q")
        if offset + size > len(space):
            raise CorruptError(
                f"segment {number} ends at byte {offset + size} of the segments, they have {len(space)} bytes; "
                "the file may have been cut short"
            )
        segments.append(space[offset : offset + size])
    return tuple(segments)


def _named(tables: Iterable[Table], segments: Sequence[memoryview]) -> dict[str, memoryview]:
    found = {}
    for table in tables:
        name, index = table.text(0), table.number(1, "I")
        _index(index, len(segments), f"the data {name!r}", "segments")
        found[name] = segments[index]
    return found


def _offsets(table: Table, segments: Sequence[memoryview]) -> tuple[tuple[int, memoryview], ...]:
    offsets = table.numbers(1, "Q")
    if not offsets:
        return ()
    index = table.number(0, "I")
    # A program whose only constant is the placeholder 0 has no segment for it.
    if offsets == (0,) and index >= len(segments):
        return ((0, memoryview(b"")),)
    _index(index, len(segments), "a list of constants", "segments")
    return tuple((offset, segments[index]) for offset in offsets)


def _method(plan: Table, data: Data) -> Method:
    name = plan.text(0)
    try:
        if not name:
            raise CorruptError("it has no name")
        return _checked_method(name, plan, data)
    except CorruptError as error:
        raise CorruptError(f"method {name!r}: {error}") from None


def _checked_method(name: str, plan: Table, data: Data) -> Method:
    arenas = plan.numbers(8, "q")
    _check_arenas(arenas)
    external: set[str] = set()
    tables = list(plan.tables(2))
    values = [read_value(number, table, arenas, data, external) for number, table in enumerate(tables)]
    inputs, outputs = plan.numbers(3, "i"), plan.numbers(4, "i")
    for index in (*inputs, *outputs):
        _index(index, len(values), "an input or output", "values")
    operators = [(table.text(0), table.text(1)) for table in plan.tables(6)]
    backends = [_backend(table, data, external) for table in plan.tables(7)]
    chains = [
        [read_instruction(instruction, len(values)) for instruction in chain.tables(2)] for chain in plan.tables(5)
    ]
    read = _check_instructions(chains, values, operators, len(backends), frozenset(inputs))
    lost = {position for position, index in enumerate(inputs) if values[index].kind == NULL and index in read}
    return Method(
        name,
        tuple(values[index] for index in inputs),
        frozenset(lost),
        tuple(sorted({f"{op}.{overload}" if overload else op for op, overload in operators})),
        tuple(sorted({backend for backend, _ in backends})),
        arenas,
        tuple(sorted(external)),
        _delegations(backends, chains, tables, values, operators, inputs),
        tuple(values[index] for index in outputs),
        _kernels(chains, operators),
    )


def _kernels(chains: Sequence[Sequence[Instruction]], operators: Sequence[tuple[str, str]]) -> Mapping[int, str]:
    """Return the operators of the instructions that call a kernel, as people write those of a model."""
    if len(chains) != 1:  # their instructions are numbered one by one
        return {}
    return {
        number: ".".join(part for part in (*operators[target][0].split("::", 1), operators[target][1]) if part)
        for number, (code, target, _) in enumerate(chains[0])
        if code == dataflow.KERNEL
    }


def _has_content(table: Table) -> bool:
    """Tell whether a value is a tensor whose content is in the file, or beside it."""
    content = table.table(1)
    if table.number(0, "B") != TENSOR or content is None:
        return False
    extra = content.table(9)
    return content.number(5, "I") != 0 or (extra is not None and extra.number(2, "b") == 1)


def _delegations(
    backends: Sequence[tuple[str, int]],
    chains: Sequence[Sequence[Instruction]],
    tables: Sequence[Table],
    values: Sequence[Value],
    operators: Sequence[tuple[str, str]],
    inputs: Sequence[int],
) -> tuple[Delegation, ...]:
    given = {number for number, table in enumerate(tables) if _has_content(table)} | set(inputs)
    if not inputs:
        # A buffer without initial values has no content in the file. It is numbered before the inputs; where there is
        # none it is known as what an operator writes in place.
        given.update(
            arguments[0]
            for chain in chains
            for code, target, arguments in chain
            if code == dataflow.KERNEL and arguments and operators[target][0].endswith("_")
        )
    lists = (TENSOR_LIST, OPTIONAL_TENSOR_LIST, INT_LIST)
    items = {
        number: tuple(int(item) for item in value.content)
        for number, value in enumerate(values)
        if value.kind in lists and isinstance(value.content, tuple)
    }
    places = [_place(table, value) for table, value in zip(tables, values, strict=True)]
    calls = dataflow.output_counts(chains, places, items, given, max(inputs, default=-1))
    found = []
    for number, (backend, size) in enumerate(backends):
        arguments, counts = calls.get(number, ((), (0,)))
        outputs = tuple(values[index] for index in arguments[len(arguments) - max(counts) :])
        found.append(Delegation(number, backend, size, len(arguments), outputs, counts))
    return tuple(found)


def _place(table: Table, value: Value) -> tuple[int, int, int, torch.dtype] | None:
    """Return where a tensor lies in planned memory, with its size and type; None for one that does not."""
    content, tensor = table.table(1), value.content
    place = content.table(6) if content is not None and isinstance(tensor, Tensor) else None
    if place is None or not isinstance(tensor, Tensor):
        return None
    memory, low, high = (place.number(field, "I") for field in range(3))
    return memory, low + (high << 32), math.prod(tensor.sizes), tensor.dtype


def _backend(delegate: Table, data: Data, external: set[str]) -> tuple[str, int]:
    """Return the backend of a delegate and the size of its payload; add the weights that the file does not have."""
    backend, reference = delegate.text(0), delegate.table(1)
    if reference is None:
        raise CorruptError(f"a delegate of {backend!r} has no payload")
    for spec in delegate.tables(2):
        spec.text(0)
    in_segment, index = reference.number(0, "b"), reference.number(1, "I")
    _index(index, len(data.segments if in_segment else data.inline_payloads), f"a payload of {backend!r}", "payloads")
    size = len(data.segments[index]) if in_segment else data.inline_payloads[index]
    if in_segment and backend == xnnpack_payload.BACKEND:
        external.update(set(xnnpack_payload.weight_names(data.segments[index])) - data.named.keys())
    return backend, size


def _check_arenas(arenas: Sequence[int]) -> None:
    """Refuse planned memory that the machine does not have: the runtime would be killed when it takes it."""
    if any(size < 0 for size in arenas):
        raise CorruptError(f"its planned memory has the sizes {list(arenas)}")
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        memory = 2**48
    if sum(arenas) > memory:
        raise CorruptError(f"it plans {sum(arenas)} bytes of memory, this machine has {memory}")


def read_value(number: int, table: Table, arenas: Sequence[int], data: Data, external: set[str]) -> Value:
    """Read a value of a method.

    Args:
        number: Its number, for messages.
        table: Its table.
        arenas: The sizes of the method's planned memory.
        data: What it may refer to.
        external: The names of weights that are in a data file, to which its name is added.

    Raises:
        CorruptError: It refers to what is not there.
    """
    kind = table.number(0, "B")
    content = table.table(1)
    if kind not in KINDS or (content is None and kind != NULL):
        raise CorruptError(f"value {number} has the unknown type {kind}, or no content")
    if content is None or kind == NULL:
        return Value(NULL, None)
    if kind == TENSOR:
        try:
            return Value(kind, _tensor(content, arenas, data, external))
        except CorruptError as error:
            raise CorruptError(f"value {number}: {error}") from None
    if kind == INT:
        return Value(kind, content.number(0, "q"))
    if kind == BOOL:
        return Value(kind, bool(content.number(0, "B")))
    if kind == DOUBLE:
        return Value(kind, content.real(0))
    if kind == STRING:
        return Value(kind, content.text(0))
    return Value(kind, content.numbers(0, {INT_LIST: "q", DOUBLE_LIST: "d", BOOL_LIST: "B"}.get(kind, "i")))


def _tensor(table: Table, arenas: Sequence[int], data: Data, external: set[str]) -> Tensor:
    code = table.number(0, "b")
    if code not in DTYPES:
        raise CorruptError(f"a tensor has the unknown element type {code}")
    sizes, order, dynamism = table.numbers(2, "i"), table.numbers(3, "B"), table.number(8, "b")
    if dynamism not in (0, 1, 2):
        raise CorruptError(f"a tensor has the unknown dynamism {dynamism}")
    if len(sizes) > MAX_RANK or any(size < 0 for size in sizes) or sorted(order) != list(range(len(sizes))):
        raise CorruptError(f"a tensor has the shape {list(sizes)} with the dimensions in the order {list(order)}")
    dtype = DTYPES[code]
    size = math.prod(sizes) * dtype.itemsize if dynamism != 2 else 0
    _check_place(table, size, arenas, data, external)
    return Tensor(dtype, sizes, order, dynamism != 0, dynamism == 2)


def _check_place(table: Table, size: int, arenas: Sequence[int], data: Data, external: set[str]) -> None:
    """Check that a tensor of a size lies inside of the memory, or the part of the file, that it is given."""
    place, extra, constant = table.table(6), table.table(9), table.number(5, "I")
    if place is not None:
        memory, low, high = (place.number(field, "I") for field in range(3))
        offset = low + (high << 32)
        if not 0 < memory < len(arenas) or offset + size > arenas[memory]:
            raise CorruptError(f"a tensor of {size} bytes at byte {offset} of memory {memory} of {list(arenas)}")
    if extra is not None and extra.number(2, "b") == 1:
        name = extra.text(1)
        if not name:
            raise CorruptError("a tensor is in a data file without a name")
        external.add(name)
    elif constant and place is None and data.inline_constants:
        _index(constant, data.inline_constants, "a tensor", "constants")
    elif constant:
        which = extra.number(0, "Q") if extra is not None else 0
        if place is not None:
            _index(which, len(data.initial), "a tensor", "lists of initial values")
        offsets = data.constants if place is None else data.initial[which]
        _index(constant, len(offsets), "a tensor", "constants")
        start, segment = offsets[constant]
        if start + size > len(segment):
            raise CorruptError(f"a tensor of {size} bytes at byte {start} of a segment of {len(segment)} bytes")


def _check_instructions(
    calls: Sequence[Sequence[Instruction]],
    values: Sequence[Value],
    operators: Sequence[tuple[str, str]],
    delegates: int,
    inputs: frozenset[int],
) -> frozenset[int]:
    """Check all instructions; return the values that one reads as something that None is not."""
    # A value that an instruction writes gets its type then; one that it is also given as an argument has it before.
    untyped = set(inputs)
    for chain in calls:
        for code, _, arguments in chain:
            written = arguments if code in (2, 3) else arguments[-1:]
            untyped.update(written if code != 1 else set(written).difference(arguments[:-1]))
    untyped = {index for index in untyped if values[index].kind == NULL}
    for number, value in enumerate(values):
        _check_list(number, value, values, untyped)
    schemas = [_upstream.argument_types(*operator) for operator in operators]
    read: set[int] = set()
    for chain in calls:
        for code, target, arguments in chain:
            if code == 1:
                _index(target, len(operators), "a kernel call", "operators")
                _check_call(operators[target], schemas[target], arguments, values, untyped, read)
            elif code == 2:
                _index(target, delegates, "a delegate call", "delegates")
            elif code == 4:
                _index(target, len(chain) + 1, "a jump", "instructions")
                if values[arguments[0]].kind not in (BOOL, TENSOR) and arguments[0] not in untyped:
                    raise CorruptError(f"a jump depends on value {arguments[0]}, which is not a bool")
            elif code == 5 and values[arguments[0]].kind != TENSOR:
                raise CorruptError(f"value {arguments[0]} is freed and is not a tensor")
    return frozenset(read)


def read_instruction(table: Table, size: int) -> Instruction:
    """Return the kind of an instruction, what it calls or where it jumps to, and the values it takes.

    Args:
        table: Its table.
        size: How many values the method has.

    Raises:
        CorruptError: It is of an unknown kind, or refers to a value that is not there.
    """
    code, content = table.number(0, "B"), table.table(1)
    if code not in (1, 2, 3, 4, 5) or content is None:
        raise CorruptError(f"an instruction has the unknown type {code}")
    target = 0
    if code in (1, 2):
        target, arguments = content.number(0, "i"), content.numbers(1, "i")
    elif code == 3:
        arguments = (content.number(0, "i"), content.number(1, "i"))
    else:
        target, arguments = content.number(1, "i") if code == 4 else 0, (content.number(0, "i"),)
    for index in arguments:
        _index(index, size, "an instruction", "values")
    return code, target, arguments


def _check_list(number: int, value: Value, values: Sequence[Value], untyped: set[int]) -> None:
    """Check the lists whose items are values themselves."""
    wanted = {INT_LIST: INT, TENSOR_LIST: TENSOR, OPTIONAL_TENSOR_LIST: TENSOR}.get(value.kind)
    if wanted is None or not isinstance(value.content, tuple):
        return
    for index in value.content:
        if index == -1 and value.kind == OPTIONAL_TENSOR_LIST:
            continue
        _index(index, len(values), f"value {number}", "values")
        kind = values[index].kind
        if kind != wanted and index not in untyped and not (kind == NULL and value.kind == OPTIONAL_TENSOR_LIST):
            raise CorruptError(f"value {number} is {KINDS[value.kind]}, with {KINDS[kind]} in it")


def _check_call(
    operator: tuple[str, str],
    schema: tuple[str, ...] | None,
    arguments: Sequence[int],
    values: Sequence[Value],
    untyped: set[int],
    read: set[int],
) -> None:
    if schema is None:
        return
    name = ".".join(part for part in operator if part)
    if len(arguments) < len(schema):
        raise CorruptError(f"{name} is called with {len(arguments)} values, it takes {len(schema)}")
    for index, type_ in zip(arguments, schema, strict=False):  # what it returns follows its arguments
        allowed = _allowed(type_)
        if not allowed:
            continue
        kind = values[index].kind
        used = values[index].content if kind == INT_LIST else None
        read.update(index_ for index_ in (used if isinstance(used, tuple) else ()) if index_ in untyped)
        if kind in allowed:
            continue
        if index not in untyped:
            raise CorruptError(f"{name} is called with {KINDS[kind]} for its {type_}")
        read.add(index)


def _allowed(type_: str) -> frozenset[int]:
    """Return the kinds of values that a kernel accepts for a type of a schema; empty when that is not known."""
    optional = type_.startswith("Optional[")
    kinds = _ACCEPTED.get(type_[len("Optional[") : -1] if optional else type_)
    if kinds is None:
        return frozenset()
    return kinds | {NULL} if optional else kinds


def _index(index: int, size: int, who: str, what: str) -> None:
    if not 0 <= index < size:
        raise CorruptError(f"{who} refers to number {index} of {size} {what}")
