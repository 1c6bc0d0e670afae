"""The reference backend: its delegate against eager on real models, and on everything that a program can have."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from delegate_support import Tied, named_data, runner
from lowering_support import delegates, edge_program
from models import build
from quantized_models import INPUTS as QUANTIZED_INPUTS, quantized
from torch.export import Dim, export

import exir_lowering
from exir_lowering import BackendFailure, DelegateContext, InputError, LoweredMethods, LoweringOptions, graphs
from exir_lowering.backends.reference import ReferenceDelegate
from exir_lowering.backends.reference.backend import refusal
from exir_lowering.backends.reference.delegate import FORMAT


def lowered(module: torch.nn.Module, inputs: tuple[Any, ...], **options: Any) -> LoweredMethods:
    """Lower a module to the reference backend; all of it goes there."""
    found = exir_lowering.lower(export(module.eval(), inputs, **options), "reference")
    (method,) = found.report.methods
    assert not method.host, [(node.operator, node.reason) for node in method.host]
    return found


def check(module: torch.nn.Module, *inputs: Any, found: LoweredMethods | None = None, **options: Any) -> None:
    """Compare with eager."""
    run = runner(found or lowered(module, inputs, **options), reference=ReferenceDelegate())
    compare(run(*inputs), module(*inputs))


def compare(got: list[Any], expected: Any) -> None:
    flat = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    assert len(got) == len(flat)
    for mine, other in zip(got, flat, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def payload(found: LoweredMethods) -> bytes:
    (delegate,) = delegates(found["forward"])
    return bytes(delegate.processed_bytes)


def graphs_in(found: LoweredMethods) -> Any:
    return FORMAT.unpack(payload(found))["graphs"]


def compiled(module: Any) -> tuple[Any, ReferenceDelegate]:
    """Compile what a lowered module holds."""
    store = module.named_data_store_output
    data = {key: bytes(store.buffers[entry.buffer_index]) for key, entry in store.pte_data.items()}
    delegate = ReferenceDelegate()
    return delegate.compile(module.processed_bytes, [], DelegateContext("forward", data.get)), delegate


def data_size(found: LoweredMethods) -> int:
    return sum(map(len, named_data(found).values()))


# -- real models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["bert", "llama", "mobilenet_v2"])
def test_real_models(case: str) -> None:
    module, inputs = build(case)
    found = lowered(module, inputs)
    with torch.no_grad():
        expected = module(*inputs)
    (got,) = runner(found, reference=ReferenceDelegate())(*inputs)
    scale = expected.abs().max()  # mobilenet with random weights answers with tiny numbers
    torch.testing.assert_close(got / scale, expected / scale, rtol=1e-5, atol=1e-5)
    weights = {p.data_ptr(): p.numel() * p.element_size() for p in module.parameters()}
    assert data_size(found) <= 1.05 * sum(weights.values())


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.filterwarnings("ignore")
def test_int8_programs(dynamic: bool) -> None:
    program = quantized(dynamic)
    found = exir_lowering.lower(program, "reference")
    assert not found.report.methods[0].host
    (got,) = runner(found, reference=ReferenceDelegate())(*QUANTIZED_INPUTS)
    torch.testing.assert_close(got, program.module()(*QUANTIZED_INPUTS), rtol=1e-5, atol=1e-5)
    operators_called = {name for _, code, _ in graphs_in(found) for name, *_ in code}
    assert any(name.startswith("quantized_decomposed.") for name in operators_called)


# -- shapes, types, results -------------------------------------------------------------------------------------------


def test_dynamic_shapes() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 6)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            both = torch.cat([self.linear(x), self.linear(y)]).reshape(-1, 2, 3)
            return both.permute(1, 0, 2).reshape(2, -1) * (x.shape[0] // 2 + y.shape[0]), x.new_zeros(y.shape[0] * 2)

    a, b = Dim("a", min=2, max=64), Dim("b", min=2, max=64)
    model, example = Model().eval(), (torch.randn(4, 4), torch.randn(6, 4))
    found = lowered(model, example, dynamic_shapes={"x": {0: a}, "y": {0: b}})
    run = runner(found, reference=ReferenceDelegate())
    for first, second in ((4, 6), (2, 2), (64, 3), (7, 64)):
        inputs = (torch.randn(first, 4), torch.randn(second, 4))
        with torch.no_grad():
            compare(run(*inputs), model(*inputs))


def test_memory_formats_and_types() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.conv(x.to(memory_format=torch.channels_last))
            z = y.contiguous().double() + torch.zeros(1, dtype=torch.float64)
            full = torch.full((2, 2), float("-inf")) + torch.full((2, 2), float("nan"))
            return z, y.half().clone(memory_format=torch.channels_last), full, torch.ones_like(y, dtype=torch.int32)

    with torch.no_grad():
        model, x = Model().eval(), torch.randn(1, 3, 5, 5)
        found = lowered(model, (x,))
        check(model, x, found=found)
        run = runner(found, reference=ReferenceDelegate())
        assert run(x)[1].is_contiguous(memory_format=torch.channels_last)


def test_outputs_and_inputs_of_every_kind() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("empty", torch.zeros(0, 3))
            self.register_buffer("flag", torch.tensor(True))

        def forward(self, x: torch.Tensor, scalar: torch.Tensor) -> Any:
            values, indices = torch.topk(x, 2)
            parts = torch.split(x, [1, 3], dim=1)
            picked = x[:, torch.tensor([2, 0])] + torch.ops.aten.index.Tensor(x, [None, indices[0]])
            empty = torch.cat([self.empty, self.empty]) * 2
            return values, indices, parts[1] + parts[0], picked, empty, scalar * 2, self.flag & (scalar > 0), x.sum()

    check(Model(), torch.randn(2, 4), torch.tensor(1.5))


def test_several_calls_leave_weights_alone() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor) -> Any:
            return torch.relu(x) + self.weight, self.weight

    model = Model().eval()
    found = exir_lowering.lower_whole_program(edge_program(model, (torch.ones(3),)), "reference")
    handle, delegate = compiled(found)
    for _ in range(3):
        x = torch.randn(3)
        compare(list(delegate.execute(handle, [x])), model(x))


# -- control flow and state -------------------------------------------------------------------------------------------


class Flow(torch.nn.Module):
    """A branch in a loop over rows, a scan and a while loop, all over weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4) * 0.3)

    def forward(self, x: torch.Tensor) -> Any:
        from functorch.experimental.control_flow import map as torch_map

        def body(row: torch.Tensor) -> torch.Tensor:
            return torch.cond(row.sum() > 0, lambda v: v @ self.weight, lambda v: v * 2 - 1, (row,))

        def more(i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return i < 3

        def step(i: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, torch.sigmoid(v @ self.weight)

        y = torch_map(body, x)
        return torch.while_loop(more, step, (torch.zeros((), dtype=torch.int64), y * 1.0))[1], y


def test_control_flow() -> None:
    with torch.no_grad():
        module, inputs = Flow().eval(), (torch.randn(5, 4),)
        program = export(module, inputs)
        found = exir_lowering.lower(program, "reference")
        assert not found.report.methods[0].host and len(delegates(found["forward"])) == 1
        assert len(graphs_in(found)) == 6  # the program, map, its two branches, the loop's two
        run = runner(found, reference=ReferenceDelegate())
        for _ in range(3):
            x = torch.randn(5, 4)
            for mine, other in zip(run(x), module(x), strict=True):
                torch.testing.assert_close(mine, other)


class Cache(torch.nn.Module):
    """State that is returned before and after it is written, and whose initial values are not all zero."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.arange(4.0))
        self.register_buffer("second", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> Any:
        before = self.first.clone()
        self.first.add_(x)
        self.second[1:3].copy_(before[:2])
        self.count.add_(1)
        return before + 0, self.second * self.count, self.first * 2


def test_state_lives_in_the_handle() -> None:
    eager = Cache().eval()
    found = lowered(Cache(), (torch.ones(4),))
    assert not found["forward"].graph_signature.buffers_to_mutate
    delegate = ReferenceDelegate()
    first, second = runner(found, reference=delegate), runner(found, reference=delegate)
    for _ in range(3):
        x = torch.randn(4)
        compare(first(x), [value.clone() for value in eager(x)])
    compare(second(torch.ones(4)), Cache()(torch.ones(4)))  # from the beginning


class Decoder(torch.nn.Module):
    """A layer of attention over a cache, and the greedy next token."""

    def __init__(self, length: int = 48, width: int = 16) -> None:
        super().__init__()
        self.embed, self.place = torch.nn.Embedding(50, width), torch.nn.Embedding(length, width)
        self.query, self.key, self.value = (torch.nn.Linear(width, width) for _ in range(3))
        self.head = torch.nn.Linear(width, 50)
        self.register_buffer("keys", torch.zeros(length, width))
        self.register_buffer("values", torch.zeros(length, width))

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(places)
        self.keys.index_copy_(0, places, self.key(x))
        self.values.index_copy_(0, places, self.value(x))
        seen = torch.arange(self.keys.shape[0]) <= places[:, None]
        scores = (self.query(x) @ self.keys.t()).masked_fill(~seen, float("-inf"))
        return self.head(x + torch.softmax(scores, -1) @ self.values)[-1:].argmax(-1)


def test_a_cache_over_32_steps() -> None:
    torch.manual_seed(1)
    model, length = Decoder().eval(), Dim("length", min=2, max=40)
    prompt = torch.randint(0, 50, (5,))
    with torch.no_grad():
        shapes = {"tokens": {0: length}, "places": {0: length}}
        programs = {
            "prefill": export(model, (prompt, torch.arange(5)), dynamic_shapes=shapes),
            "decode": export(model, (prompt[:1], torch.tensor([5]))),
        }
        found = exir_lowering.lower(programs, "reference")
        assert all(not method.host and len(method.partitions) == 1 for method in found.report.methods)
        delegate = ReferenceDelegate()
        prefill, decode = (runner(found, method, reference=delegate) for method in programs)
        eager, mine = list(prompt), list(prompt)
        eager += model(prompt, torch.arange(5))
        mine += prefill(prompt, torch.arange(5))[0]
        for place in range(5):  # each method has a state of its own: this one gets the prompt token by token
            (last,) = decode(prompt[place : place + 1], torch.tensor([place]))
        assert torch.equal(last[0], mine[-1])
        for place in range(5, 37):
            eager += model(eager[-1][None], torch.tensor([place]))
            mine += decode(mine[-1][None], torch.tensor([place]))[0]
    assert [int(t) for t in mine] == [int(t) for t in eager] and len(set(map(int, mine))) > 4


# -- weights ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TwoMethods:
    module: torch.nn.Module
    tokens: torch.Tensor
    one: LoweredMethods
    both: LoweredMethods


@pytest.fixture(scope="module")
def llama() -> TwoMethods:
    module, (tokens,) = build("llama")
    programs = {"prefill": export(module, (tokens,)), "decode": export(module, (tokens[:, :1],))}
    # Constants that are made of one method's inputs are its own: only weights are shared.
    as_it_is = LoweringOptions(rewrites="none")
    one = exir_lowering.lower({"prefill": programs["prefill"]}, "reference", options=as_it_is)
    return TwoMethods(module, tokens, one, exir_lowering.lower(programs, "reference", options=as_it_is))


def test_weights_are_stored_once_by_memory_and_by_content() -> None:
    model, x = Tied(torch.randn(64, 64)), torch.randn(2, 64)
    found = lowered(model, (x,))
    with torch.no_grad():
        check(model, x, found=found)
    # Conversion to Edge dialect lays out "turned", "column" and "wide" anew; the rest is one matrix, and zeros.
    assert sorted(map(len, named_data(found).values())) == [64 * 4, *[64 * 64 * 4] * 3]
    run = runner(found, reference=ReferenceDelegate())
    run(x)
    (handle,) = run.handles.values()
    assert sorted(t.storage_offset() for t in handle.weights) == [0] * len(handle.weights)


def test_partitions_that_share_weights_share_memory_at_run_time(llama: TwoMethods) -> None:
    delegate = ReferenceDelegate()
    runs = [runner(llama.both, method, reference=delegate) for method in llama.both]
    for run, tokens in zip(runs, (llama.tokens, llama.tokens[:, :1]), strict=True):
        run(tokens)
    first, second = (
        {t.data_ptr() for handle in run.handles.values() for t in handle.weights if t.numel() > 64} for run in runs
    )
    assert first == second and len(first) > 8


# -- the file ---------------------------------------------------------------------------------------------------------


def first(tree: Any) -> Any:
    """Return the first instruction."""
    return tree["graphs"][0][1][0]


def test_failures_at_run_time_name_the_operator() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda a, b: torch.sin(a @ b), lambda a, b: a - b, (x, y))

    found = lowered(Model(), (torch.ones(2, 2), torch.ones(2, 2)))
    delegate = ReferenceDelegate()
    handle = delegate.compile(payload(found), [], DelegateContext("forward", {}.get))
    with pytest.raises(InputError, match="takes 2 inputs, got 3"):
        delegate.execute(handle, [torch.ones(2, 2)] * 3)
    said = r"aten\.mm\.default\(float32\[2, 2\], float32\[3, 3\]\), debug handle \d+, failed: RuntimeError: mat1"
    with pytest.raises(BackendFailure, match=said) as caught:
        delegate.execute(handle, [torch.ones(2, 2), torch.ones(3, 3)])
    (module,) = (lowered.original_module.graph_module for lowered in delegates(found["forward"]))
    nodes = [node for _, nested in graphs.walk(module) for node in nested.graph.nodes]
    named = {node.name for node in nodes if node.meta.get("debug_handle") == caught.value.debug_handle}
    assert named == {"aten_mm_default"}
    assert len(delegate.execute(handle, [torch.ones(2, 2)] * 2)) == 1


def test_every_instruction_has_a_debug_handle() -> None:
    found = lowered(Cache(), (torch.ones(4),))
    (delegate,) = delegates(found["forward"])
    nodes = [node for node in delegate.original_module.graph.nodes if node.op == "call_function"]
    _, code, _ = graphs_in(found)[0]
    assert [handle for *_, handle in code] == [node.meta["debug_handle"] for node in nodes]
    assert delegate.meta["debug_handle_map"] == {
        f"{name} #{n}": (handle,) for n, (name, _, _, handle) in enumerate(code)
    }


# -- what is not supported --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library() -> Any:
    library = torch.library.Library("exir_lowering_tests", "FRAGMENT")
    library.define("write(Tensor(a!) x) -> Tensor")
    library.impl("write", lambda x: x.mul_(1).clone(), "CPU")
    library.impl("write", lambda x: torch.empty_like(x), "Meta")
    yield library


def test_the_partitioner_says_why_not(library: Any) -> None:
    program = torch.fx.symbolic_trace(lambda x: torch.ops.exir_lowering_tests.write(x))
    (node,) = [n for n in program.graph.nodes if n.op == "call_function"]
    node.target = torch.ops.exir_lowering_tests.write.default
    assert refusal(program, node) == ("op", "exir_lowering_tests.write.default writes to x")
    node.target, node.args = torch.ops.aten.add.Tensor, (node.args[0], torch.Generator())
    assert "an argument of type Generator" in str(refusal(program, node))
    node.target, node.args = os.path.join, (node.args[0],)
    assert refusal(program, node) == ("op", "the delegate does not have the Python function join")
    node.target, node.args = torch.ops.aten.ones.default, ([2],)
    node.kwargs = {"device": torch.device("cuda")}
    assert "makes a tensor on device cuda" in str(refusal(program, node))


# -- whole processes --------------------------------------------------------------------------------------------------

RUN_TIME = """
import sys
from pathlib import Path
import torch
from exir_lowering.backends.reference import ReferenceDelegate
from exir_lowering import DelegateContext

folder = Path(sys.argv[1])
delegate = ReferenceDelegate()
context = DelegateContext("forward", lambda key: (folder / key).read_bytes())
handle = delegate.compile((folder / "payload").read_bytes(), [], context)
(got,) = delegate.execute(handle, [torch.load(folder / "input.pt")])
torch.testing.assert_close(got, torch.load(folder / "expected.pt"), rtol=1e-5, atol=1e-5)
own = sorted(name for name in sys.modules if name.startswith("exir_lowering."))
print(own)
print(sorted(name for name in sys.modules if name.split(".")[0] in ("executorch", "torchao")))
"""


@pytest.mark.filterwarnings("ignore")
def test_the_run_time_side_imports_no_compiler(tmp_path: Path) -> None:
    program = quantized(False)
    found = exir_lowering.lower(program, "reference")
    (tmp_path / "payload").write_bytes(payload(found))
    for key, data in named_data(found).items():
        (tmp_path / key).write_bytes(data)
    torch.save(QUANTIZED_INPUTS[0], tmp_path / "input.pt")
    torch.save(program.module()(*QUANTIZED_INPUTS).detach(), tmp_path / "expected.pt")
    done = forked.run(RUN_TIME, tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr[-3000:]
    own, others = done.stdout.splitlines()[-2:]
    assert eval(own) == [
        "exir_lowering._upstream",
        "exir_lowering._upstream.operators",
        "exir_lowering._upstream.tensors",
        "exir_lowering.backends",
        "exir_lowering.backends.reference",
        "exir_lowering.backends.reference.delegate",
        "exir_lowering.errors",
        "exir_lowering.graphs",
        "exir_lowering.graphs.operators",
        "exir_lowering.graphs.operators.functions",
        "exir_lowering.graphs.operators.pure",
        "exir_lowering.graphs.serialized",
        "exir_lowering.graphs.serialized.plain",
        "exir_lowering.graphs.weights",
        "exir_lowering.plugins",
        "exir_lowering.plugins.delegate",
        "exir_lowering.public_names",
    ]
    assert eval(others) == []


def test_plugins_are_found() -> None:
    from exir_lowering.plugins import registry

    assert type(registry.find_backend("reference")).__name__ == "ReferenceBackend"
    assert type(registry.find_partitioner("reference")).__name__ == "SupportPartitioner"
