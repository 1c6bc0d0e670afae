"""Vendors' compilers: the same bytes, fast or not; what their passes trace again is as they trace it."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import executorch.backends.vulkan.patterns as vulkan
import pytest
import torch
from executorch.exir.dialects._ops import ops
from executorch.exir.lowered_backend_module import LoweredBackendModule
from executorch.exir.pass_base import ExportPass, NodeMetadata
from skipped_passes import describe_value
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram, export
from torch.fx import GraphModule, Node

from exir_lowering import LoweringOptions, inspect as inspect_file, lower
from exir_lowering._upstream import pins
from exir_lowering.fast import accelerated, vulkan_patterns
from exir_lowering.plugins import registry


class Attention(nn.Module):
    """An attention with a cache, a norm and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.project, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.mix = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (part.view(1, 8, 2, 8).transpose(1, 2) for part in self.project(self.norm(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(1, 8, 16))
        return nn.functional.gelu(self.mix(x.transpose(1, 2)))


INPUTS = (torch.linspace(-1, 1, 128).view(1, 8, 16),)


def exported() -> ExportedProgram:
    return export(Attention().eval(), INPUTS)


def tosa(kind: str) -> Any:
    from executorch.backends.arm.tosa.compile_spec import TosaCompileSpec
    from executorch.backends.arm.tosa.partitioner import TOSAPartitioner

    return TOSAPartitioner(TosaCompileSpec(f"TOSA-1.0+{kind}"))


def ethos_u() -> Any:
    from executorch.backends.arm.ethosu import EthosUCompileSpec, EthosUPartitioner

    return EthosUPartitioner(EthosUCompileSpec("ethos-u55-128"))


def quantised() -> ExportedProgram:
    from executorch.backends.arm.quantizer.arm_quantizer import TOSAQuantizer, get_symmetric_quantization_config
    from executorch.backends.arm.tosa.compile_spec import TosaCompileSpec
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = TOSAQuantizer(TosaCompileSpec("TOSA-1.0+INT"))
    quantizer.set_global(get_symmetric_quantization_config())
    prepared = prepare_pt2e(exported().module(check_guards=False), quantizer)
    prepared(*INPUTS)
    return export(convert_pt2e(prepared), INPUTS)


VENDORS: dict[str, tuple[str, Callable[[], Any], Callable[[], ExportedProgram]]] = {
    "vulkan": ("executorch", lambda: registry.find_partitioner("vulkan"), exported),
    "openvino": ("openvino", lambda: registry.find_partitioner("openvino"), exported),
    "coreml": ("coremltools", lambda: registry.find_partitioner("coreml"), exported),
    "tosa": ("tosa", lambda: tosa("FP"), exported),
    "tosa-int": ("tosa", lambda: tosa("INT"), quantised),
    "ethos-u": ("ethosu", ethos_u, quantised),
}
"""By name: the module that it needs, and what makes its partitioner and the program."""


@pytest.mark.parametrize("vendor", VENDORS)
def test_the_same_bytes(vendor: str) -> None:
    needed, partitioner, program = VENDORS[vendor]
    pytest.importorskip(needed)
    made = program()
    options = (LoweringOptions(rewrites="none", fast=on) for on in (True, False))
    lowered = [lower(made, partitioner(), options=one) for one in options]
    fast, slow = (one.emit() for one in lowered)
    assert not lowered[0].report.switched_off
    if vendor not in ("coreml", "openvino"):  # whose payloads differ from one time to the next
        assert fast.buffer == slow.buffer
    given = [list(map(describe_given, delegated(one["forward"]))) for one in lowered]
    assert given[0] == given[1] and given[0]
    counts = [len(inspect_file(file.buffer).methods[0].delegates) for file in (fast, slow)]
    assert counts == [len(given[0])] * 2


def delegated(program: ExportedProgram) -> list[ExportedProgram]:
    modules = program.graph_module.modules()
    return [one.original_module for one in modules if isinstance(one, LoweredBackendModule)]


def describe_given(program: ExportedProgram) -> list[Any]:
    """Return what a backend sees of its program."""
    return [
        (*map(str, (node.op, node.name, node.target, node.args, node.kwargs)), *meta(node))
        for node in program.graph.nodes
    ]


def meta(node: Node) -> Any:
    return (
        describe_value(node.meta.get("val")),
        str(node.meta.get("tensor_meta")),
        str(node.meta.get("nn_module_stack")),
    )


# -- a pass traces -----------------------------------------------------------------------------------------------------


class Doubling(ExportPass):
    """Makes nodes with what the old node had, with more, with nothing, and lists."""

    def call_operator(self, op: Any, args: Any, kwargs: Any, meta: Any) -> Any:
        made = super().call_operator(op, args, kwargs, meta)
        if op is not ops.edge.aten.linear.default:
            return made
        meta = NodeMetadata({**meta.data, "more": 1})
        halves = super().call_operator(ops.edge.aten.split_with_sizes_copy.default, (made, [4, 4], 1), {}, meta)
        both = [self.call_getitem(halves, number, NodeMetadata({})) for number in (1, 0)]
        return super().call_operator(ops.edge.aten.cat.default, (both, 1), {}, NodeMetadata({}))


class Reading(Doubling):
    """Reads the text of each node, and fails at a product."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Any] = []

    def call_operator(self, op: Any, args: Any, kwargs: Any, meta: Any) -> Any:
        self.read.append(self.node_debug_str)
        return super().call_operator(op, args, kwargs, meta)


class Failing(ExportPass):
    def call_operator(self, op: Any, args: Any, kwargs: Any, meta: Any) -> Any:
        if op is ops.edge.aten.mul.Tensor:
            raise RuntimeError("not this")
        return super().call_operator(op, args, kwargs, meta)


def describe(module: GraphModule) -> list[Any]:
    def origin(sources: Any) -> Any:
        return [
            (one.name, one.pass_name, one.target, one._get_action_string(), origin(one.from_node)) for one in sources
        ]

    described: list[Any] = []
    for node in module.graph.nodes:
        meta = {key: repr(value) for key, value in node.meta.items() if key not in ("val", "from_node", "seq_nr")}
        come = origin(node.meta.get("from_node", []))
        given = node.op, node.name, node.target, str(node.args), str(node.kwargs), list(node.meta)
        described.append((*given, meta, come, describe_value(node.meta.get("val"))))
    return described


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 2 + x.view(8, -1).sum() + torch.full((1, 8), 3.0)


@pytest.mark.parametrize("kind", [Doubling, Reading, ExportPass])
def test_a_pass_traces_as_it_does(kind: Any) -> None:
    module = lower(export(Mixed(), (torch.ones(2, 8),)))["forward"].graph_module
    made, said = [], []
    for fast in (True, False):
        with accelerated(fast):
            one = kind()
            for _ in range(2):  # the second time, all is known
                result = one(one(module).graph_module).graph_module
            made.append(describe(result))
            said.append((one.node_debug_str, getattr(one, "read", None)))
    for here, there in zip(*made, strict=True):
        assert sorted(here[5]) == sorted(there[5]) and here[:5] == there[:5] and here[6:] == there[6:]
    assert said[0] == said[1]


def test_a_pass_that_fails_says_where() -> None:
    module = lower(export(Mixed(), (torch.ones(2, 8),)))["forward"].graph_module
    said = []
    for fast in (True, False):
        one = Failing()
        with accelerated(fast), pytest.raises(RuntimeError, match="not this"):
            one(module)
        said.append(one.node_debug_str)
    assert said[0] == said[1] and "mul" in str(said[0])


def test_operators_of_arm_are_asked_again_for_another_specification() -> None:
    pytest.importorskip("tosa")
    from executorch.backends.arm.tosa.specification import TosaLoweringContext, TosaSpecification

    class Rescaling(ExportPass):
        def call_operator(self, op: Any, args: Any, kwargs: Any, meta: Any) -> Any:
            return super().call_operator(ops.backend.tosa.RESCALE.default, (args[0], torch.int8, [1.0], 0, 0), {}, meta)

    with FakeTensorMode() as mode:
        graph = torch.fx.Graph()
        node = graph.placeholder("x")
        node.meta["val"] = mode.from_tensor(torch.ones(4, dtype=torch.int8))
        graph.output((graph.call_function(ops.edge.aten.neg.default, (node,)),))
    module = GraphModule({}, graph)
    with accelerated():
        with TosaLoweringContext(TosaSpecification.create_from_string("TOSA-1.0+INT")):
            assert [Rescaling()(module).graph_module.graph.find_nodes(op="output") for _ in range(2)]
        with (
            TosaLoweringContext(TosaSpecification.create_from_string("TOSA-1.0+FP")),
            pytest.raises(Exception, match="doesn't support integers"),
        ):
            Rescaling()(module)


# -- patterns of Vulkan ------------------------------------------------------------------------------------------------


def test_a_pattern_is_never_skipped() -> None:
    for name, (place, names) in vulkan_patterns.PATTERNS.items():
        build = vulkan.fusable_patterns[name].get_graphs_fn
        assert build is pins.find(place).__wrapped__ and build is not None
        for pattern in build():
            assert vulkan_patterns.may_match(pattern.graph, names)


@pytest.mark.parametrize("pattern", [vulkan.RotaryEmbeddingPattern, vulkan.HfRotaryEmbeddingPattern])
@pytest.mark.parametrize("width", [32, 24])
def test_rotary_embeddings_are_found(pattern: Any, width: int) -> None:
    if pattern is vulkan.RotaryEmbeddingPattern:
        width = 16
    inputs = (*(torch.ones(1, 1, heads, 32) for heads in (4, 2)), torch.ones(1, width), torch.ones(1, width))
    program = export(pattern(), inputs, strict=True)
    fast, slow = (
        lower(program, "vulkan", options=LoweringOptions(rewrites="none", fast=on)).emit().buffer
        for on in (True, False)
    )
    assert fast == slow and b"apply_rotary_emb" in fast


def test_patterns_are_not_built_for_a_model_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    monkeypatch.setattr(vulkan_patterns, "_build_once", built.append)
    lower(exported(), "vulkan", options=LoweringOptions(rewrites="none"))
    assert not built


@pytest.mark.parametrize("broken", [False, True])
def test_core_ml_checks_a_program_when_its_passes_are_done(
    broken: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("coremltools")
    caplog.set_level("WARNING", "coremltools")  # packages of other vendors have the log of all show more
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import Function
    from coremltools.converters.mil.mil.passes import pass_pipeline, pass_registry
    from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass

    class Breaks(AbstractGraphPass):  # type: ignore[misc]
        def apply(self, prog: Any) -> None:
            if broken:
                var = next(iter(prog.functions["main"].inputs.values()))
                prog.functions["main"].operations[-1].outputs[0].child_ops.append(var.child_ops[0])

    @mb.program(input_specs=[mb.TensorSpec(shape=(2, 3))])  # type: ignore[untyped-decorator]
    def program(x: Any) -> Any:
        return mb.exp(x=mb.relu(x=x))

    checks: list[Any] = []
    check = Function.validate
    monkeypatch.setattr(Function, "validate", lambda self, *a, **k: checks.append(self) or check(self, *a, **k))
    monkeypatch.setitem(pass_registry.PASS_REGISTRY.passes, "common::breaks", Breaks)
    passes = [*["common::noop_elimination"] * 5, "common::breaks", "common::noop_elimination"]
    pipeline = pass_pipeline.PassPipeline(passes, "test")
    if broken:
        with accelerated(), pytest.raises(Exception, match="should be consumed"):
            pass_pipeline.PassPipelineManager.apply_pipeline(program, pipeline)
        return
    for fast, checked in ((True, 2), (False, 8)):
        checks.clear()
        with accelerated(fast):
            pass_pipeline.PassPipelineManager.apply_pipeline(program, pipeline)
        assert len(checks) == checked


def test_the_text_of_a_function_is_that_of_python() -> None:
    modules = {place.partition(":")[0] for feature in pins.FEATURES.values() for place in feature.code} - {"file"}
    modules = {name for name in modules if importlib.util.find_spec(name.partition(".")[0])}
    compared = 0
    for name in modules:
        module = inspect.importlib.import_module(name)  # type: ignore[attr-defined]
        lines = inspect.findsource(module)[0]
        for number, line in enumerate(lines):
            if line.lstrip().startswith(("def ", "async def ")) and number < 400:
                assert pins.block_of(lines[number:]) == inspect.getblock(lines[number:]), f"{name}:{number + 1}"
                compared += 1
    assert compared > 300
