"""What a file asks of a runtime, as forms: calls of one form differ in sizes and numbers only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from exir_lowering.plugins.payload import find_checks
from exir_lowering.pte import slots
from exir_lowering.pte.code import Code, Payload
from exir_lowering.pte.container import Data, open_program
from exir_lowering.pte.dataflow import DELEGATE, FREE, JUMP, KERNEL, MOVE
from exir_lowering.pte.instructions import items
from exir_lowering.pte.payloads import check_payload, describe
from exir_lowering.pte.slots import KernelTypes as K
from exir_lowering.pte.value_kinds import Tensor, ValueSpec

_LISTS = frozenset({K.TENSOR_LIST, K.OPTIONAL_TENSOR_LIST})
_LETTERS = {K.INT: "i", K.DOUBLE: "d", K.NULL: "n", K.INT_LIST: "l", K.DOUBLE_LIST: "r", K.BOOL_LIST: "b"}
_WORDS = {MOVE: "a move", JUMP: "a jump", FREE: "a free"}
_OPERAND = re.compile(r"^(.*?)\[([^\]]*)\]$")
_DATA_FILE = "weights in a data file"


@dataclass(frozen=True, slots=True)
class Form:
    """What is asked of a runtime."""

    name: str  # a kernel, an operator of a backend as "XnnpackBackend/XNNAdd", or a feature of the file
    types: str = ""  # the element types of its tensors
    ranks: str = ""  # how many dimensions its first tensor has, and the one with most: "2.4"
    rest: str = ""  # the kinds of its other arguments, bools and strings themselves; orders of dimensions
    of: Literal["kernel", "backend", "feature"] = "feature"


def table_forms(content: memoryview) -> set[Form]:
    """Return what a file asks of a runtime's schema: the fields of its tables that it uses."""
    program, _ = open_program(content)
    tables = [("Program", program), *(("ExecutionPlan", each) for each in program.tables(slots.Program.EXECUTION_PLAN))]
    return {Form(f"field {slot} of {name}") for name, table in tables for slot in range(16) if table.has(slot)}


def method_forms(code: Code, data: Data) -> Iterator[tuple[int | None, Form]]:
    """Yield what a method asks of a runtime, with the numbers of the instructions that ask for it."""
    yield from ((None, Form(feature)) for feature in sorted(_features(code, data)))
    places = [(payload.backend, id(payload.content)) for payload in code.payloads]  # which delegates may share
    distinct = dict(zip(places, code.payloads, strict=True))
    payloads = {place: tuple(_payload_forms(payload, data)) for place, payload in distinct.items()}
    for number, (kind, target, arguments) in enumerate(each for chain in code.chains for each in chain):
        if kind == KERNEL:
            yield number, _kernel_form(code, target, arguments)
        elif kind == DELEGATE:
            yield from ((number, form) for form in payloads[places[target]])


def _features(code: Code, data: Data) -> set[str]:
    kinds = {instruction[0] for chain in code.chains for instruction in chain}
    used = {_WORDS[kind] for kind in kinds - {KERNEL, DELEGATE}}
    used |= {"several arenas"} if len(code.arenas) > 2 else set()
    for value, stored in zip(code.values, code.storage, strict=True):
        tensor = value.content
        if not isinstance(tensor, Tensor) or stored is None:
            continue
        used |= {"a dynamic shape"} if tensor.dynamic else set()
        used |= {"an unbound shape"} if tensor.unbound else set()
        if stored.name is not None:
            used.add(_DATA_FILE)
        elif tensor.stored:
            used.add("first values of state" if tensor.planned else "weights of the host")
            used |= {"weights in the tables of the program"} if data.inline_constants else set()
    return used


def _kernel_form(code: Code, target: int, arguments: tuple[int, ...]) -> Form:
    values, types, rest, tensors = code.values, list[str](), list[str](), list[Tensor]()
    for argument in arguments[: len(arguments) - _repeats(code, arguments)]:
        value = values[argument]
        listed = value.kind in _LISTS
        parts = [values[item] for item in items(values, argument)]
        found = [part.content for part in parts if isinstance(part.content, Tensor)]
        words = [str(tensor.dtype).removeprefix("torch.") for tensor in found]
        types += [f"[{' '.join(sorted(set(words)))}]"] if listed else words
        negative = "-" * any(one.kind == K.INT and int(one.content) < 0 for one in parts)  # type: ignore[arg-type]
        missing = "o" * (listed and -1 in value.content)  # type: ignore[operator]
        rest.append(missing if listed or found else _letter(value) + negative)
        tensors += found
    orders = {"".join(map(str, each.dim_order)) for each in tensors if list(each.dim_order) != sorted(each.dim_order)}
    name = ".".join(filter(None, code.operators[target]))
    if name.startswith("executorch_prim::"):  # of any types and ranks
        return Form(name, rest="".join(rest), of="kernel")
    ranks = _ranks([len(each.sizes) for each in tensors])
    return Form(name, " ".join(types), ranks, "".join(rest + sorted(orders)), "kernel")


def _repeats(code: Code, arguments: tuple[int, ...]) -> bool:
    """Return whether the last argument is what the kernel returns: what it wrote to, again."""
    last = code.values[arguments[-1]] if arguments else None
    if last is not None and last.kind == K.TENSOR_LIST and isinstance(last.content, tuple):
        return {*last.content} <= {*arguments[:-1]}
    return arguments[-1:] != () and arguments[-1] in arguments[:-1]


def _letter(value: ValueSpec) -> str:
    known = repr(value.content) if value.kind in (K.BOOL, K.STRING) else _LETTERS.get(value.kind, "?")
    return known[0] if value.kind == K.BOOL else known + "0" * (value.content == ())


def _ranks(ranks: list[int]) -> str:
    return f"{ranks[0]}.{max(ranks)}" if ranks else ""


def _payload_forms(payload: Payload, data: Data) -> Iterator[Form]:
    """Yield the forms of a payload's operators; only its backend if no installed plug-in can read it."""
    checked = check_payload(payload.backend, payload.content, find_checks)
    operators = describe(payload.backend, checked) if checked is not None else ()
    if checked is None or not operators:
        yield Form(payload.backend, of="backend")
        return
    for operator in operators:
        found = [match for each in (*operator.inputs, *operator.outputs) if (match := _OPERAND.match(each))]
        ranks = _ranks([len(match[2].split(",")) if match[2] else 0 for match in found])
        rest = "named data" if checked.weights and any("constant" in each for each in operator.inputs) else ""
        types = " ".join(match[1] for match in found)
        yield Form(f"{payload.backend}/{operator.name}", types, ranks, rest, "backend")
    if not set(checked.weights) <= set(data.named):
        yield Form(_DATA_FILE)
