"""Payloads and files that would write, seed, loop or take all memory if they could: each ends in an error of ours.

Their authors know the formats: check sums are right, and everything else is as the backend writes it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import ExecutorchBackendConfig
from executorch.exir._serialize._program import PTEFile, deserialize_pte_binary, serialize_pte_binary
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.schema import Bool, EValue, Instruction as FileInstruction, Int, KernelCall, Operator, String
from lowering_support import TagPartitioner, by_operator
from torch.export import export

from exir_lowering import (
    Backend,
    BackendFailure,
    DelegateContext,
    InputError,
    LimitError,
    Limits,
    LoweringError,
    PreprocessResult,
    WeightRef,
    load,
    lower,
)
from exir_lowering.backends.reference import ReferenceDelegate
from exir_lowering.backends.reference.delegate import FORMAT, resolve
from exir_lowering.graphs.operators import pure as pure_operators
from exir_lowering.graphs.serialized.plain import PlainWriter


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


def v(number: int) -> Any:
    return {"%": number}


def g(number: int) -> Any:
    return {"graph": number}


def call(operator: str, *args: Any, **kwargs: Any) -> list[Any]:
    written = {key: PlainWriter().write(value) for key, value in kwargs.items()}
    return [operator, list(args), written, -1]


def payload(*code: Any, inputs: int = 1, others: Any = (), results: Any = None, **parts: Any) -> bytes:
    """Write a payload that returns the value of its last instruction."""
    last = [v(inputs + len(code) - 1)] if results is None else results
    graphs = [[inputs, list(code), last], *others]
    return FORMAT.pack({"weights": [], "states": [], "outputs": [None] * len(last), "graphs": graphs, **parts})


def file_with(content: bytes, backend_id: str = "reference") -> bytes:
    """Make a .pte with a payload where `x + x` was; x is four numbers."""

    class Evil(Backend):
        def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
            return PreprocessResult(content)

    Evil.backend_id = backend_id
    partitioner = TagPartitioner(by_operator("aten.add.Tensor"), backend_id)
    lowered = lower(export(Double(), (torch.ones(4),)), partitioner, backends={backend_id: Evil()})
    return lowered.emit().buffer


def run(content: bytes, *inputs: Any) -> list[Any]:
    """Compile and execute a payload."""
    delegate = ReferenceDelegate()
    handle = delegate.compile(content, [], DelegateContext("forward", {}.get))
    return list(delegate.execute(handle, list(inputs)))


# -- what would act ---------------------------------------------------------------------------------------------------


def mapping(path: Path) -> bytes:
    """Map a file, and write to it."""
    mapped = call("aten.from_file.default", str(path), True, 4, dtype=torch.float32)
    return payload(mapped, call("aten.copy_.default", v(1), v(0)), call("aten.add.Tensor", v(0), v(0)))


def saving(path: Path) -> bytes:
    return payload(call("aten.save.default", v(0), str(path)), call("aten.add.Tensor", v(0), v(0)))


def writing(path: Path) -> bytes:
    """Write to the input, which is the runtime's own memory."""
    return payload(call("aten.mul_.Tensor", v(0), v(0)), call("aten.add.Tensor", v(0), v(0)))


ACTING = pytest.mark.parametrize(
    ("make", "named"),
    [(mapping, r"aten\.from_file\.default"), (saving, r"aten\.save"), (writing, r"aten\.mul_\.Tensor writes to self")],
    ids=["map", "save", "write"],
)


@ACTING
def test_a_payload_that_writes_a_file(make: Any, named: str, tmp_path: Path) -> None:
    content, x = file_with(make(tmp_path / "marker")), torch.ones(4)
    with pytest.raises(BackendFailure, match=named):  # when it is loaded, before anything is executed
        load(content)
    assert not list(tmp_path.iterdir()) and torch.equal(x, torch.ones(4))


@pytest.mark.parametrize(
    "name",
    [
        "aten.manual_seed.default", "aten.set_.source_Tensor", "aten.resize_.default", "aten.copy_.default",
        "aten.add.out", "aten.native_batch_norm.default", "aten._reshape_alias_copy.default",
        "aten.segment_reduce.default", "aten.matrix_power.default", "aten.special_laguerre_polynomial_l.default",
        "aten.embedding_dense_backward.default", "aten.rrelu_.default", "aten.warn.default",
        "prim.load.default", "prims.copy_to.default", "profiler._record_function_enter_new.default",
        "inductor.resize_storage_bytes_.default", "c10d.send.default", "_c10d_functional.all_reduce.default",
        "torch.ops.load_library", "aten.__class__.mro", "load_library.__call__.default", "aten.add", "",
    ],
)  # fmt: skip
def test_operators_that_are_not_on_the_list(name: str) -> None:
    before = torch.initial_seed()
    with pytest.raises(InputError, match="a reference payload cannot call it"):
        resolve(name)
    assert torch.initial_seed() == before


def test_the_list_by_schema() -> None:
    """Whatever is found writes nothing, and takes no text that could be a path."""
    from exir_lowering import graphs

    found = {name: operator for name in graphs.known_operators() if (operator := pure_operators.find(name)) is not None}
    assert {name.split(".")[0] for name in found} <= {"aten", "quantized_decomposed", "torchao"}
    assert len(found) > 700 and "aten.convolution.default" in found
    for name, operator in found.items():
        for argument in operator.arguments:
            assert not argument.written, name
            assert "str" not in argument.type or argument.name not in ("filename", "path", "file", "name"), name
            assert not any(word in argument.type for word in ("Storage", "Stream", "__torch__", "Any")), name


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return self.total * 2


def test_a_method_of_shared_state_that_writes_a_file(tmp_path: Path) -> None:
    """Such methods are set up together with the first one that runs."""
    model = Counter()
    programs = {name: export(model, (torch.ones(4),)) for name in ("first", "second")}
    planning = MemoryPlanningPass(share_mutable_buffers=True)
    emitted = lower(programs).emit(
        ExecutorchBackendConfig(memory_planning_pass=planning, emit_mutable_buffer_names=True)
    )
    file = deserialize_pte_binary(emitted.buffer)
    plan = next(plan for plan in file.program.execution_plan if plan.name == "second")
    (output,) = [value for value in plan.outputs if value not in plan.inputs]
    plan.operators.append(Operator("aten::from_file", "out"))
    first = len(plan.values)
    plan.values += [EValue(String(str(tmp_path / "marker"))), EValue(Bool(True)), EValue(Int(4))]
    chain = plan.chains[0]
    kernel_call = KernelCall(len(plan.operators) - 1, [first, first + 1, first + 2, output, output])
    chain.instructions.append(FileInstruction(kernel_call))
    if chain.stacktrace is not None:
        chain.stacktrace.append(chain.stacktrace[-1])
    content = bytes(serialize_pte_binary(PTEFile(file.program, file.mutable_data, file.named_data)))
    program = load(content, verify=False)
    with contextlib.suppress(LoweringError):
        program.run("first", torch.ones(4))
    with pytest.raises(InputError, match="from_file"):
        program.run("second", torch.ones(4))
    assert not (tmp_path / "marker").exists()


class Constant(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def test_an_operator_that_writes_a_weight_of_the_file() -> None:
    """A file is mapped for reading: a write ends the process, or changes what the caller holds."""
    file = deserialize_pte_binary(lower(export(Constant(), (torch.ones(4),))).emit().buffer)
    plan = file.program.execution_plan[0]
    (instruction,) = [i for i in plan.chains[0].instructions if isinstance(i.instr_args, KernelCall)]
    weight = instruction.instr_args.args[1]
    instruction.instr_args.args[-2:] = [weight, weight]
    content = bytes(serialize_pte_binary(PTEFile(file.program, file.mutable_data, file.named_data)))
    before = bytes(bytearray(content))
    with pytest.raises(InputError, match=r"is part of the file|is a constant"):
        load(content).run("forward", torch.ones(4))
    assert content == before


# -- what would not end, or take everything ---------------------------------------------------------------------------


ENDLESS = (
    call("while_loop", g(1), g(2), [v(0)], []),
    [1, [call("aten.ones.default", [1], dtype=torch.bool)], [v(1)]],
    [1, [], [v(0)]],
)


def test_a_loop_that_never_ends() -> None:
    content = payload(ENDLESS[0], call("getitem", v(1), 0), others=ENDLESS[1:], results=[v(2)])
    with pytest.raises(LimitError, match="seconds"):
        load(file_with(content), limits=Limits(seconds=3)).run("forward", torch.ones(4))


@pytest.mark.parametrize(
    "graphs",
    [
        (call("cond", True, g(0), g(0), [v(0)]),),
        (
            call("cond", True, g(1), g(1), [v(0)]),
            [1, [call("cond", True, g(2), g(2), [v(0)])], [v(0)]],
            [1, [call("cond", True, g(1), g(1), [v(0)])], [v(0)]],
        ),
    ],
    ids=["itself", "circle"],
)
def test_graphs_that_call_each_other(graphs: Any) -> None:
    with pytest.raises(InputError, match="its graphs call each other in a cycle"):
        run(payload(graphs[0], others=graphs[1:], results=[v(0)]), torch.ones(4))


# -- what else a payload says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree",
    [{"dtype": "quint8"}, {"dtype": "_inductor"}, {"layout": "sparse_coo"}, {"device": "cuda"}, {"device": "meta"},
     {"memory_format": "float32"}, {"%": -1}, {"%": True}, {"graph": 9}],
    ids=str,
)  # fmt: skip
def test_values_that_a_payload_may_not_have(tree: Any) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        run(payload(call("aten.ones.default", tree)), torch.ones(4))


@pytest.mark.parametrize(
    "content",
    [
        payload(call("aten.ones.default", [2], pin_memory=True)),
        payload(["aten.ones.default", [[2]], {}, 1.5]),
        payload(call("getitem", [g(1)], 0), others=[[1, [], [v(0)]]]),
        payload(results=[v(1)]),
        payload(results=[v(0)], outputs=[None, None]),
        payload(inputs=1 << 40, results=[]),
        payload(results=[{"weight": 0}]),
        payload(results=[v(0)], graphs=[]),
    ],
)
def test_payloads_that_are_not_consistent(content: bytes) -> None:
    with pytest.raises(InputError, match=r"cannot be read: \w+Error: "):
        run(content, torch.ones(4))


def test_a_file_does_not_change_the_weights_of_another() -> None:
    """Files share weights in memory by their keys, which are digests if their author is honest."""
    ref = WeightRef("0" * 32, 0, torch.float32, (4,), (1,))
    content = payload(inputs=0, results=[{"weight": 0}], weights=[ref.to_json()])
    delegate, contents = ReferenceDelegate(), (bytes(16), torch.ones(4).numpy().tobytes(), bytes(16))
    handles = [delegate.compile(content, [], DelegateContext("forward", {ref.key: data}.get)) for data in contents]
    got = [delegate.execute(handle, [])[0] for handle in handles]
    assert torch.equal(got[1], torch.ones(4)) and torch.equal(got[0], torch.zeros(4))
    assert got[0].data_ptr() == got[2].data_ptr()  # equal ones are one
