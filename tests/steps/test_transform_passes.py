"""`transform_passes` and EdgeProgramManager, beside ExecuTorch's own `to_edge_transform_and_lower`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.backends.transforms.fuse_view_copy import FuseViewCopyTransform
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeProgramManager, to_edge, to_edge_transform_and_lower
from executorch.exir.dialects._ops import ops as exir_ops
from executorch.exir.lowered_backend_module import get_lowered_submodules
from executorch.exir.pass_base import ExportedProgramPassBase, ExportedProgramPassResult, ExportPass
from executorch.exir.pass_manager import ExportedProgramPassManager, PassManager
from executorch.exir.passes.remove_noop_pass import RemoveNoopPass
from lowering_support import TagPartitioner, by_operator, snapshot
from torch.export import ExportedProgram, export
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassResult

import exir_lowering
from exir_lowering import InputError, LoweringOptions
from exir_lowering.graphs import operator_name

X = torch.tensor([[0.5, -1.0, 2.0, 0.25]])
EDGE = exir_ops.edge.aten

AS_IT_IS = exir_lowering.LoweringOptions(rewrites="none")


class Model(torch.nn.Module):
    """A layer for XNNPACK, an operator that is replaced, one that does nothing, and two views."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.linear(x)).clone().reshape(2, 2).reshape(4)


class Other(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * 2


def cosine(graph_module: GraphModule) -> PassResult:
    """Compute the cosine instead of the sine."""
    for node in graph_module.graph.nodes:
        if node.target == EDGE.sin.default:
            node.target = EDGE.cos.default
    graph_module.recompile()
    return PassResult(graph_module, True)


def in_place(graph_module: GraphModule) -> None:
    """Likewise, without a result."""
    cosine(graph_module)


class Shifted(ExportPass):
    """Adds a constant to each sine: a graph that is traced anew, with a tensor as an attribute."""

    def call_operator(self, op: Any, args: Any, kwargs: Any, meta: Any) -> Any:
        result = super().call_operator(op, args, kwargs, meta)
        if op != EDGE.sin.default:
            return result
        one = super().call_operator(
            EDGE.full.default, ([1], 1.0), {"dtype": torch.float32, "device": torch.device("cpu")}, meta
        )
        return super().call_operator(EDGE.add.Tensor, (result, one), {}, meta)


class Constant(ExportedProgramPassBase):
    """Adds an attribute to the graph, which becomes an input."""

    def call(self, exported_program: ExportedProgram) -> ExportedProgramPassResult:
        module = exported_program.graph_module
        module.register_buffer("offset", torch.tensor([3.0]))
        for node in module.graph.nodes:
            if node.target == EDGE.sin.default:
                with module.graph.inserting_after(node):
                    offset = module.graph.get_attr("offset")
                    value = node.meta["val"].fake_mode.from_tensor(torch.tensor([3.0]), static_shapes=True)
                    offset.meta["val"] = value
                with module.graph.inserting_after(offset):
                    total = module.graph.call_function(EDGE.add.Tensor, (node, offset))
                    total.meta = dict(node.meta)  # the debug handle too, which is in XNNPACK's payload
                node.replace_all_uses_with(total, delete_user_cb=lambda user, total=total: user is not total)
        module.recompile()
        return ExportedProgramPassResult(exported_program, True)


def quietly(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def nodes(program: ExportedProgram) -> list[Any]:
    """Return a graph as values: operators, with the positions of their operands."""
    order = {node: number for number, node in enumerate(program.graph.nodes)}
    return [
        (node.op, operator_name(node) if node.op == "call_function" else "", [order[n] for n in node.all_input_nodes])
        for node in program.graph.nodes
    ]


def payloads(program: ExportedProgram) -> list[bytes]:
    return [bytes(module.processed_bytes) for _, module, _ in get_lowered_submodules(program.graph_module)]


@pytest.fixture(scope="module")
def programs() -> dict[str, ExportedProgram]:
    return {"forward": export(Model().eval(), (X,)), "other": export(Other(), (X,))}


PASSES: dict[str, Callable[[], Any]] = {
    "function": lambda: [cosine],
    "no result": lambda: [in_place],
    "traced anew": lambda: (Shifted(),),
    "of a program": lambda: [Constant()],
    "of ExecuTorch": lambda: [RemoveNoopPass(), FuseViewCopyTransform()],
    "several": lambda: [RemoveNoopPass(), Shifted(), cosine],
    "by method": lambda: {"other": [cosine]},
    "none": list,
    "manager of programs": lambda: ExportedProgramPassManager([cosine, RemoveNoopPass()]),
    "manager of graphs": lambda: PassManager([cosine, RemoveNoopPass()]),
}


@pytest.mark.parametrize("kind", PASSES)
def test_the_result_is_that_of_executorch(programs: dict[str, ExportedProgram], kind: str) -> None:
    before = {name: snapshot(program) for name, program in programs.items()}
    lowered = quietly(
        lambda: exir_lowering.lower(programs, "xnnpack", options=AS_IT_IS, transform_passes=PASSES[kind]())
    )
    assert {name: snapshot(program) for name, program in programs.items()} == before
    theirs = quietly(
        lambda: to_edge_transform_and_lower(
            copy.deepcopy(programs), transform_passes=PASSES[kind](), partitioner=[XnnpackPartitioner()]
        )
    )
    assert list(lowered) == ["forward", "other"]
    for name, program in lowered.items():
        assert nodes(program) == nodes(theirs.exported_program(name))
        assert payloads(program) == payloads(theirs.exported_program(name))
    ours = exir_lowering.load(lowered.emit().buffer)
    reference = exir_lowering.load(theirs.to_executorch().buffer)
    for name in lowered:
        assert torch.equal(ours.run(name, X)[0], reference.run(name, X)[0])


def test_the_passes_change_what_is_computed(programs: dict[str, ExportedProgram]) -> None:
    def run(passes: Any) -> torch.Tensor:
        lowered = quietly(lambda: exir_lowering.lower(programs["other"], transform_passes=passes))
        result: torch.Tensor = exir_lowering.load(lowered.emit().buffer).run("forward", X)[0]
        return result

    torch.testing.assert_close(run([cosine]), torch.cos(X) * 2)
    torch.testing.assert_close(run([Shifted()]), (torch.sin(X) + 1) * 2)
    torch.testing.assert_close(run([Constant()]), (torch.sin(X) + 3) * 2)


def test_partitioners_and_plans_see_what_the_passes_made(programs: dict[str, ExportedProgram]) -> None:
    partitioner = TagPartitioner(by_operator("aten.cos.default"))
    planned = exir_lowering.plan(programs["other"], partitioner, transform_passes=[cosine])
    assert [part.operators for part in planned.methods[0].partitions] == [{"aten.cos.default": 1}]
    assert not exir_lowering.plan(programs["other"], partitioner).methods[0].partitions


def test_edge_programs_are_transformed_too_and_stay_as_they_are(programs: dict[str, ExportedProgram]) -> None:
    edge = to_edge(programs["other"]).exported_program()
    before = snapshot(edge)
    lowered = exir_lowering.lower(edge, transform_passes=[in_place])
    assert snapshot(edge) == before
    torch.testing.assert_close(exir_lowering.load(lowered.emit().buffer).run("forward", X)[0], torch.cos(X) * 2)


def test_what_a_pass_makes_is_replaced_or_refused_like_anything_else(programs: dict[str, ExportedProgram]) -> None:
    def bytewise(graph_module: GraphModule) -> None:
        for node in graph_module.graph.nodes:
            if node.target == EDGE.sin.default:
                node.target = EDGE.nextafter.default
                node.args = (node.args[0], node.args[0])

    with pytest.raises(InputError, match=r"aten\.nextafter\.default"):
        exir_lowering.lower(programs["other"], transform_passes=[bytewise])
    options = LoweringOptions(unsupported="allow")
    assert exir_lowering.lower(programs["other"], transform_passes=[bytewise], options=options)


# -- passes that are wrong -------------------------------------------------------------------------


def fails(graph_module: GraphModule) -> None:
    raise KeyError("scale")


class NoProgram(ExportedProgramPassBase):
    def call(self, exported_program: ExportedProgram) -> Any:
        return ExportedProgramPassResult(7, True)  # type: ignore[arg-type]


def dangling(graph_module: GraphModule) -> None:
    """Let a node be used before it is there."""
    first, *_, last = (node for node in graph_module.graph.nodes if node.op == "call_function")
    first.args = (last, *first.args[1:])


WRONG: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "raises": (lambda: [RemoveNoopPass(), fails], ("'fails' pass", "KeyError: 'scale'", "['RemoveNoopPass']")),
    "raises in a manager": (lambda: PassManager([fails]), ("'fails' pass", "KeyError: 'scale'")),
    "returns a number": (lambda: [lambda module: 7], ("<lambda>", "returns a PassResult, a GraphModule, or None")),
    "returns no program": (lambda: [NoProgram()], ("NoProgram", "returns a PassResult, a GraphModule, or None")),
    "breaks the graph": (lambda: [dangling], ("dangling", "used before it has been defined")),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("dialect", ["ATen", "Edge"])
def test_a_pass_that_is_wrong(programs: dict[str, ExportedProgram], kind: str, dialect: str) -> None:
    passes, words = WRONG[kind]
    program = programs["other"] if dialect == "ATen" else to_edge(programs["other"]).exported_program()
    before = snapshot(program)
    with pytest.raises(InputError) as caught:
        quietly(lambda: exir_lowering.lower({"decode": program}, transform_passes=passes()))
    for word in ("'decode'", *words):
        assert word in str(caught.value)
    assert caught.value.__cause__ is not None
    assert snapshot(program) == before


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([RemoveNoopPass], ("RemoveNoopPass", "Create an instance of it.")),
        (["cosine"], ("'cosine'", "expected a sequence of passes")),
        ("cosine", ("'cosine'", "expected a sequence of passes")),
        ({"othre": [cosine]}, ("no method 'othre'", "Did you mean 'other'?")),
        ({"other": cosine}, ("transform_passes['other']", "expected a sequence of passes")),
    ],
)
@pytest.mark.parametrize("entry", [exir_lowering.lower, exir_lowering.plan], ids=lambda f: f.__name__)
def test_what_is_no_pass(
    programs: dict[str, ExportedProgram], given: Any, words: tuple[str, ...], entry: Callable[..., Any]
) -> None:
    with pytest.raises(InputError) as caught:
        entry(programs, transform_passes=given)
    for word in words:
        assert word in str(caught.value)


# -- ExecuTorch's manager --------------------------------------------------------------------------


@pytest.fixture
def manager(programs: dict[str, ExportedProgram]) -> EdgeProgramManager:
    return quietly(lambda: to_edge(programs, constant_methods={"get_vocab_size": 512, "get_scale": 0.5}))


def test_a_manager_is_lowered_with_its_constant_methods(manager: EdgeProgramManager) -> None:
    before = {name: snapshot(manager.exported_program(name)) for name in manager.methods}
    lowered = quietly(lambda: exir_lowering.lower(manager, "xnnpack", options=AS_IT_IS))
    assert list(lowered) == ["forward", "other"]
    program = exir_lowering.load(lowered.emit(constant_methods={"get_scale": 0.25, "get_eos": 2}).buffer)
    assert set(program.method_names) == {"forward", "other", "get_vocab_size", "get_scale", "get_eos"}
    assert [program.run(name)[0] for name in ("get_vocab_size", "get_scale", "get_eos")] == [512, 0.25, 2]
    assert exir_lowering.load(lowered.emit().buffer).run("get_scale") == [0.5]
    assert {name: snapshot(manager.exported_program(name)) for name in manager.methods} == before
    assert manager.config_methods == {"get_vocab_size", "get_scale"}
    theirs = quietly(lambda: manager.to_backend(XnnpackPartitioner()))
    for name in lowered:
        assert payloads(lowered[name]) == payloads(theirs.exported_program(name))
    assert manager.to_executorch().buffer  # still its own


def test_managers_at_the_wrong_place(manager: EdgeProgramManager) -> None:
    with pytest.raises(InputError, match="A manager has several methods: pass it alone"):
        exir_lowering.lower({"forward": manager})
    with pytest.raises(InputError, match="already emitted"):
        exir_lowering.lower(manager.to_executorch())
