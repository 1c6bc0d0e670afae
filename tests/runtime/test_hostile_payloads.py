"""Payloads and files that would write, seed, loop or take all memory if they could: each ends in an error of ours.

Their authors know the formats: check sums are right, and everything else is as the backend writes it.
"""

from __future__ import annotations

import contextlib
import gc
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
    BackendUnavailableWarning,
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
from exir_lowering.backends.compiler_demo import CompilerDemoDelegate
from exir_lowering.backends.reference import ReferenceDelegate
from exir_lowering.backends.reference.backend import refusal
from exir_lowering.backends.reference.delegate import FORMAT, Graph, resolve
from exir_lowering.cli import main
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


def test_a_payload_that_writes_a_file_from_the_command_line(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "model.pte").write_bytes(file_with(mapping(tmp_path / "marker")))
    code = main(["run", str(tmp_path / "model.pte")])
    assert code == 2 and "aten.from_file.default is not on the closed list" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model.pte"]


def test_a_kept_graph_that_writes_a_file(tmp_path: Path) -> None:
    """What stands in for a missing backend reads the same payloads."""
    from exir_lowering._upstream.delegates import named_data

    class Absent(Backend):
        backend_id = "absent"

        def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
            data = {"exir_lowering.original/forward/0": mapping(tmp_path / "marker")}
            return PreprocessResult(b"?", data_store_output=named_data(data, 1))

    partitioner = TagPartitioner(by_operator("aten.add.Tensor"), "absent")
    lowered = lower(export(Double(), (torch.ones(4),)), partitioner, backends={"absent": Absent()})
    with (
        pytest.warns(BackendUnavailableWarning),
        pytest.raises(BackendFailure, match=r"aten\.from_file\.default is not on the closed list"),
    ):
        load(lowered.emit().buffer, unavailable="fallback")
    assert not list(tmp_path.iterdir())


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


def test_lowering_leaves_what_is_not_on_the_list_to_the_host() -> None:
    graph = torch.fx.symbolic_trace(lambda x: torch.ops.aten.segment_reduce(x, "sum"))
    (node,) = [node for node in graph.graph.nodes if node.op == "call_function"]
    node.target = torch.ops.aten.segment_reduce.default
    code, text = refusal(graph, node) or ("", "")
    assert code == "op" and text.startswith("aten.segment_reduce.default is not on the closed list")


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
        (
            call("cond", True, g(1), g(1), [v(0)]),
            *([1, [call("cond", True, g(n), g(n), [v(0)])], [v(0)]] for n in range(2, 400)),
            [1, [], [v(0)]],
        ),
    ],
    ids=["itself", "circle", "deep"],
)
def test_graphs_that_call_each_other(graphs: Any) -> None:
    with pytest.raises(InputError, match=r"its graphs (call each other in a cycle|are nested more than 100 deep)"):
        run(payload(graphs[0], others=graphs[1:], results=[v(0)]), torch.ones(4))


@pytest.mark.parametrize(
    "code",
    [
        [call("aten.full.default", [2**40], 1.0)],
        [call("aten.arange.start_step", 0, 2**42, 1, dtype=torch.int8)],
        [call("aten.repeat.default", v(0), [2**20, 2**20])],
        [call("aten.expand_copy.default", v(0), [2**40, 4])],
        [call("aten.unsqueeze.default", v(0), 1), call("aten.expand.default", v(1), [4, 2**40]),
         call("aten.clone.default", v(2))],
        [call("aten.unsqueeze.default", v(0), 1), call("aten.expand.default", v(1), [4, 2**40]),
         call("aten.add.Tensor", v(2), v(2))],
    ],
    ids=["full", "arange", "repeat", "expand", "clone", "add"],
)  # fmt: skip
def test_more_memory_than_there_is(code: Any) -> None:
    code = [*code, call("aten.add.Tensor", v(0), v(0))]
    with pytest.raises(BackendFailure, match=r"failed: RuntimeError: .*allocate"):
        load(file_with(payload(*code))).run("forward", torch.ones(4))


def test_numbers_without_end() -> None:
    square = [call("mul", 2**40, 2**40)]
    for code in (square, [call("pow", 10, 10**9)], [call("lshift", 1, 10**12)]):
        with pytest.raises(BackendFailure, match="OverflowError"):
            run(payload(*code), torch.ones(4))
    with pytest.raises(BackendFailure, match="mul takes numbers, got str"):
        run(payload(call("mul", "text", 10**12)), torch.ones(4))


# -- what kernels do not check ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        [call("aten.full.default", [1], -(2**63), dtype=torch.int64), call("aten.div.Tensor_mode", v(1), -1,
                                                                            rounding_mode="trunc")],
        [call("aten.view_copy.default", v(0), [2, 2]),
         call("aten.full.default", [3], 0, dtype=torch.int64),
         call("aten.arange.start_step", 0, -(2**40) - 1, -(2**40), dtype=torch.int64),
         call("aten._embedding_bag.default", v(1), v(2), v(3), False, 0)],
        [call("aten._to_copy.default", v(0), dtype=torch.complex64),
         call("aten._fft_c2r.default", v(1), [2**40, 7], 0, 10**7)],
        [call("aten.view_copy.default", v(0), [1, 4, 1, 1]),
         call("aten._native_batch_norm_legit.no_stats", v(1), None, None, False, 0.1, 1e-5)],
        [call("aten.view_copy.default", v(0), [1, 1, 2, 2]),
         call("aten.full.default", [1, 1, 2, 2], 10**12, dtype=torch.int64),
         call("aten.max_pool2d_with_indices_backward.default", v(1), v(1), [1, 1], [1, 1], [0, 0], [1, 1], False,
              v(2))],
    ],
    ids=["div", "embedding_bag", "fft", "batch_norm", "max_pool_backward"],
)  # fmt: skip
def test_arguments_that_kernels_do_not_survive(code: Any) -> None:
    """Whoever runs a stranger's file does so with limits: what reads other memory may end the other process, or not."""
    program = load(file_with(payload(*code, results=[v(0)])), limits=Limits(seconds=20))
    with contextlib.suppress(LoweringError):
        assert torch.equal(program.run("forward", torch.ones(4))[0], torch.ones(4))


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
        payload(call("aten.ones.default", [2])[:3]),
        payload(["aten.ones.default", [[2]], {}, 1.5]),
        payload(["aten.ones.default", {"%": 0}, {}, -1]),
        payload(call("getitem", [g(1)], 0), others=[[1, [], [v(0)]]]),
        payload(results=[g(1)], others=[[1, [], [v(0)]]]),
        payload(results=[v(1)]),
        payload(results=[v(0)], outputs=[None, None]),
        payload(results=[v(0)], outputs=[0]),
        payload(results=v(0), outputs=[None]),
        payload(inputs=-1, results=[]),
        payload(inputs=1 << 40, results=[]),
        payload(results=[{"weight": 0}]),
        payload(results=[{"state": -1}]),
        payload(results=[v(0)], graphs=[]),
    ],
)
def test_payloads_that_are_not_consistent(content: bytes) -> None:
    with pytest.raises(InputError, match=r"cannot be read: \w+Error: "):
        run(content, torch.ones(4))


def test_a_weight_of_zeros_that_nobody_has_room_for() -> None:
    ref = WeightRef("", 0, torch.float32, (2**40,), (1,))
    content = payload(inputs=0, results=[{"weight": 0}], weights=[ref.to_json()])
    with pytest.raises(
        InputError, match=r"A weight of zeros, torch.float32\[1099511627776\], cannot be made: .*allocate"
    ):
        run(content)


def test_a_file_does_not_change_the_weights_of_another() -> None:
    """Files share weights in memory by their keys, which are digests if their author is honest."""
    ref = WeightRef("0" * 32, 0, torch.float32, (4,), (1,))
    content = payload(inputs=0, results=[{"weight": 0}], weights=[ref.to_json()])
    delegate, contents = ReferenceDelegate(), (bytes(16), torch.ones(4).numpy().tobytes(), bytes(16))
    handles = [delegate.compile(content, [], DelegateContext("forward", {ref.key: data}.get)) for data in contents]
    got = [delegate.execute(handle, [])[0] for handle in handles]
    assert torch.equal(got[1], torch.ones(4)) and torch.equal(got[0], torch.zeros(4))
    assert got[0].data_ptr() == got[2].data_ptr()  # equal ones are one


def test_types_in_the_text_of_the_demo_compiler() -> None:
    text = (
        b"compiler_demo 1\ninputs 1\n%1 = constant _inductor [1] [1]\n"
        b"%2 = aten.add %0 %1 alpha=1 # debug_handle 1\nreturn %2\n"
    )
    for name in (b"_inductor", b"quint8"):
        with pytest.raises(InputError, match="is not a valid constant"):
            CompilerDemoDelegate().compile(text.replace(b"_inductor", name), [], DelegateContext("forward", {}.get))


def test_nothing_is_left_of_a_refused_file() -> None:
    content = file_with(mapping(Path("marker")))
    before = {id(each) for each in gc.get_objects() if isinstance(each, Graph)}  # of other tests' fixtures
    for _ in range(2):
        with contextlib.suppress(BackendFailure):
            load(content)
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, Graph) and id(each) not in before]
