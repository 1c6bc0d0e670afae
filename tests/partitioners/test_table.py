"""One table of operators: what it takes, why not, and programs that its instructions compute."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch

from exir_lowering import Backend, BackendFailure, Delegate, InputError, PreprocessResult, WeightRef, load, lower, plan
from exir_lowering.graphs.serialized.plain import Container
from exir_lowering.partitioners import OperatorTable, SupportPartitioner, argument_values, dtypes, everything
from exir_lowering.plugins import Instruction, Instructions

COMPUTE = {
    "ADD": lambda one, other, alpha: torch.add(one, other, alpha=alpha),
    "MUL": torch.mul,
    "CAT": torch.cat,
    "CLAMP": torch.clamp,
    "SPLIT": lambda one, sizes, dim: torch.split_with_sizes(one, sizes, dim),
    "LINEAR": torch.nn.functional.linear,
    "SOFTMAX": lambda one, dim, _: torch.softmax(one, dim),
    "VIEW": lambda one, size: one.view(size),
}
TABLE = OperatorTable(
    "listed",
    {
        "aten.add.Tensor": ("ADD", argument_values(alpha=lambda alpha: alpha in (1, 2))),
        "aten.mul.Tensor": "MUL",
        "aten.cat.default": "CAT",
        "aten.clamp.default": "CLAMP",
        "aten.split_with_sizes_copy.default": "SPLIT",
        "aten.linear.default": "LINEAR",
        "aten._softmax.default": "SOFTMAX",
        "aten.view_copy.default": "VIEW",
    },
    check=dtypes(torch.float32),
)


class Listed(Backend):
    backend_id = "listed"

    def preprocess(self, program, compile_specs, context):
        code = TABLE.compile(program, context)
        self.codes.append(code)
        data = context.weights.named_data(code.weights)
        return PreprocessResult(
            code.to_bytes(b"LISTED-1", 3), debug_handle_map=code.debug_handle_map, data_store_output=data
        )


class ListedDelegate(Delegate):
    delegate_id = "listed"

    def compile(self, processed, compile_specs, context):
        program = Instructions.from_bytes(processed, b"LISTED-1", 3)
        return program, [ref.load(context.named_data) for ref in program.weights]

    def execute(self, handle, inputs):
        program, weights = handle
        values = [*inputs, *weights]
        for one in program.code:
            result = COMPUTE[one.opcode](*one.operands(values))
            values.extend(result if isinstance(result, tuple) else [result])
        for buffer, number in program.states:
            weights[buffer - program.inputs] = values[number].clone()
        return [values[number] for number in program.outputs]


def lowered(model, *inputs, partitioner=None, dynamic=None):
    Listed.codes = []
    program = torch.export.export(model, inputs, dynamic_shapes=dynamic)
    made = lower(program, partitioner or TABLE.partitioner(), backends={"listed": Listed})
    return load(made.emit().buffer, delegates=[ListedDelegate]), Listed.codes


class Every(torch.nn.Module):
    """Immediates of several types, a list of values, an operator with several results, weights, no bias."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = torch.nn.Linear(6, 6, bias=False), torch.nn.Parameter(torch.randn(6))

    def forward(self, x, y):
        first, second = torch.split(torch.cat([x, y * self.scale], 1), [5, 7], 1)
        second = torch.softmax(self.linear(second[:, :6] + x), -1)
        return torch.clamp(torch.add(first, 1.5, alpha=2), min=-math.inf, max=0.5), second * 2.0


def test_a_program_of_the_table_equals_eager():
    torch.manual_seed(0)
    model, batch = Every().eval(), torch.export.Dim("batch", min=2, max=8)
    loaded, codes = lowered(model, torch.randn(3, 6), torch.randn(3, 6), dynamic={"x": {0: batch}, "y": {0: batch}})
    for size in (2, 8, 5):
        inputs = torch.randn(size, 6), torch.randn(size, 6)
        for got, expected in zip(loaded.run("forward", *inputs), model(*inputs), strict=True):
            torch.testing.assert_close(got, expected)
    every = {one.opcode: one for code in codes for one in code.code}
    assert every["SPLIT"].results == 2 and every["SPLIT"].arguments[1:] == [[5, 7], 1]
    assert every["CLAMP"].arguments[1:] == [{"float": "-inf"}, 0.5]
    assert every["LINEAR"].arguments[2] is None and "value" in every["LINEAR"].arguments[1]


def test_a_size_that_is_computed_is_a_value():
    class Flat(torch.nn.Module):
        def forward(self, x):
            return x.view(x.shape[0], -1) * 2.0

    batch = torch.export.Dim("batch", min=2, max=8)
    loaded, _ = lowered(Flat(), torch.randn(3, 2, 2), dynamic={"x": {0: batch}})
    x = torch.randn(5, 2, 2)
    torch.testing.assert_close(loaded.run("forward", x)[0], Flat()(x))


def test_buffers_that_a_partition_owns_are_states():
    class Swap(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("one", torch.full((2,), 1.0))
            self.register_buffer("two", torch.full((2,), 10.0))

        def forward(self, x):
            one, two = self.one * 1.0, self.two * x
            self.one.copy_(two)
            self.two.copy_(one)
            return one + two

    loaded, (code,) = lowered(Swap(), torch.ones(2), partitioner=TABLE.partitioner(own_state=True))
    assert len(code.states) == 2
    model = Swap()
    for _ in range(3):
        torch.testing.assert_close(loaded.run("forward", torch.full((2,), 3.0))[0], model(torch.full((2,), 3.0)))


class Refused(torch.nn.Module):
    def forward(self, x):
        return torch.add(x, x, alpha=7) + torch.sigmoid(x * x)


def test_the_plan_has_the_reason_of_each_entry():
    (method,) = plan(torch.export.export(Refused(), (torch.ones(2),)), TABLE.partitioner()).methods
    assert [(node.operator, node.reason) for node in method.host] == [
        ("aten.add.Tensor", "argument alpha=7 is not supported"),
        ("aten.sigmoid.default", "aten.sigmoid.default is not in the supported operators"),
    ]


def test_what_is_not_in_the_table_is_refused_when_compiled_with_the_line():
    text = "listed does not take aten.add.Tensor: argument alpha=7 is not supported. Source code: .*torch.add"
    with pytest.raises(BackendFailure, match=text):
        lowered(Refused(), torch.ones(2), partitioner=SupportPartitioner({"listed": everything()}))


@pytest.mark.parametrize("operators", [{"aten.add": "ADD"}, {}, {"aten.ad.Tensor": "ADD"}])
def test_names_that_are_none(operators):
    with pytest.raises(InputError, match=r"a name with an overload: 'aten.add.Tensor'|does not exist|a mapping"):
        OperatorTable("listed", operators)


WEIGHT = WeightRef("", 0, torch.float32, (2,), (1,))
PROGRAM = Instructions(
    1, (WEIGHT,), [[1, 2]], [Instruction("ADD", [{"value": 0}, [1.5, None, "text", True]], 1, 4)], [2]
)


def test_instructions_are_read_as_they_were_written():
    assert Instructions.from_bytes(PROGRAM.to_bytes(b"LISTED-1", 3), b"LISTED-1", 3) == PROGRAM.__class__(
        1, [WEIGHT], [[1, 2]], PROGRAM.code, [2]
    )
    assert PROGRAM.debug_handle_map == {"ADD #0": (4,)}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda payload: b"", "expected b'LISTED-1'"),
        (
            lambda payload: payload[:8] + struct.pack("<I", 4) + payload[12:],
            "has format version 4; .*reads version 3. Lower the model again",
        ),
        (lambda payload: payload[:-1], "damaged"),
        (lambda payload: payload[:-1] + b" ", "damaged"),
    ],
)
def test_payloads_that_are_not_as_they_were(change, text):
    with pytest.raises(InputError, match=text):
        Instructions.from_bytes(change(PROGRAM.to_bytes(b"LISTED-1", 3)), b"LISTED-1", 3)


@pytest.mark.parametrize(
    "tree",
    [
        5, [1, [], []], [1, [], [], [["ADD"]], []], [1, [], [], [], [7]], [1, [], [], [], [-1]],
        [1, [], [[0, 0]], [], []],
        ["a", [], [], [], []], [1, 5, [], [], []], [True, [], [], [], []], [1, [], [], [["ADD", [], -1, None]], []],
    ],
)  # fmt: skip
def test_nonsense_with_a_right_checksum(tree: Any) -> None:
    payload = Container(b"LISTED-1", 3, "payload", compressed=False).pack(tree)
    with pytest.raises(InputError, match=r"damaged.* Lower the model again"):
        Instructions.from_bytes(payload, b"LISTED-1", 3)


@pytest.mark.parametrize("number", [-1, 3, True, "0"])
def test_an_operand_that_is_no_value(number: Any) -> None:
    with pytest.raises(IndexError, match="where a number below 3 was expected"):
        Instruction("ADD", [{"value": number}]).operands([1, 2, 3])


@pytest.mark.parametrize(
    "operators", [["aten.add.Tensor"], {}, {"aten.add": "ADD"}, {"aten.add.Tensor": 3}, {"aten.add.Tensor": ("ADD",)}]
)
def test_tables_that_are_none(operators: Any) -> None:
    with pytest.raises(InputError, match=r"OperatorTable: .*expected"):
        OperatorTable("x", operators)
