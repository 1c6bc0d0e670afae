"""The drop-in for ExecuTorch's `to_backend`: its overloads, its exceptions, and the patch that sets it up."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge, to_edge_transform_and_lower
from executorch.exir.backend import backend_api
from executorch.exir.backend.backend_api import MethodProgramsPartitionerSpec, to_backend as imported_before
from executorch.exir.backend.backend_details import BackendDetails
from executorch.exir.lowered_backend_module import LoweredBackendModule
from lowering_support import TagPartitioner, by_operator, delegates, edge_program
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import (
    CompileSpec,
    DelegationSpec,
    InputError,
    LoweringError,
    Partitioner,
    PartitionResult,
    PreprocessResult,
    UnknownPluginError,
    compat,
    load,
)
from exir_lowering.graphs import operator_name

X = torch.tensor([[1.0, -2.0, 3.0]])
SPECS = [CompileSpec("speed", b"fast"), CompileSpec("speed", b"slow")]

upstream = backend_api.to_backend
ENGINES = [compat.to_backend, upstream]
both_engines = pytest.mark.parametrize("to_backend", ENGINES, ids=["compat", "upstream"])


class CompatBackend(BackendDetails):
    """Writes down what it was given: operators, placeholders, constants and compile specs."""

    @classmethod
    def preprocess(cls, edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        lines = [f"{node.op} {node.name} {node.target}" for node in edge_program.graph.nodes]
        tables = [*edge_program.state_dict, *edge_program.constants]
        specs = [f"{spec.key}={spec.value!r}" for spec in compile_specs]
        return PreprocessResult("\n".join([*lines, *tables, *specs]).encode(), debug_handle_map={1: (2, 3)})


class CompatRaises(BackendDetails):
    """Refuses everything."""

    @classmethod
    def preprocess(cls, edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        raise ArithmeticError("unsupported: sin")


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(3, 4), torch.nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 4.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.down(torch.relu(self.up(x)))) * self.scale


class State(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("s", torch.zeros(1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.s.add_(x)
        return self.s


class SharedInList(torch.nn.Module):
    """ExecuTorch's engine refuses this one (issue 22798): a constant in a list that two partitions read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.tensor([[5.0, 6.0, 7.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.sin(torch.cat([x, self.b])), self.b])


class Diamond(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = torch.sin(x)
        return near + torch.cos(near)


@pytest.fixture(scope="module")
def mlp() -> ExportedProgram:
    return edge_program(Mlp(), (X,))


def linear(backend: str = "CompatBackend") -> TagPartitioner:
    def tag_of(node: Node) -> str | None:
        name = operator_name(node)
        return f"{name}_{node.name}" if name in ("aten.addmm.default", "aten.mul.Tensor") else None

    return TagPartitioner(tag_of, backend, compile_specs=SPECS)


def cats() -> TagPartitioner:
    return TagPartitioner(
        lambda node: f"t_{node.name}" if operator_name(node) == "aten.cat.default" else None, "CompatBackend"
    )


def payloads(program: ExportedProgram) -> list[tuple[Any, ...]]:
    return [
        (d.backend_id, d.processed_bytes, [(s.key, s.value) for s in d.compile_specs], d.meta)
        for d in delegates(program)
    ]


# -- the overloads ---------------------------------------------------------------------------------


def _whole(to_backend: Any, program: ExportedProgram) -> list[LoweredBackendModule]:
    return [
        to_backend("CompatBackend", program, SPECS),
        to_backend("CompatBackend", program, compile_specs=SPECS),
        to_backend("CompatBackend", edge_program=program, compile_specs=SPECS),
    ]


def test_a_whole_program(mlp: ExportedProgram) -> None:
    for mine, theirs in zip(_whole(compat.to_backend, mlp), _whole(upstream, mlp), strict=True):
        assert type(mine) is type(theirs) is LoweredBackendModule
        assert (mine.backend_id, mine.processed_bytes) == (theirs.backend_id, theirs.processed_bytes)
        assert b"speed=b'slow'" in mine.processed_bytes
        assert mine.compile_specs == theirs.compile_specs == SPECS
        assert mine.meta == theirs.meta
        assert mine.named_data_store_output == theirs.named_data_store_output
        torch.testing.assert_close(mine(X), theirs(X))


def _one(to_backend: Any, program: ExportedProgram) -> list[ExportedProgram]:
    return [
        to_backend(program, linear()),
        to_backend(program, partitioner_instance=linear()),
    ]


def test_one_method(mlp: ExportedProgram) -> None:
    for mine, theirs in zip(_one(compat.to_backend, mlp), _one(upstream, mlp), strict=True):
        assert type(mine) is type(theirs) is ExportedProgram
        assert len(payloads(mine)) == 3
        assert payloads(mine) == payloads(theirs)
        assert str(mine.graph_signature) == str(theirs.graph_signature)
        assert list(mine.state_dict) == list(theirs.state_dict)
        mine.validate()
        torch.testing.assert_close(mine.module()(X), theirs.module()(X))


def _all(to_backend: Any, program: ExportedProgram) -> dict[str, ExportedProgram]:
    programs = {"host": program, "a": program, "b": program}
    partitioners = {"b": linear(), "a": linear()}
    return to_backend(
        MethodProgramsPartitionerSpec(method_to_edge_program=programs, method_to_partitioner=partitioners)
    )


def test_all_methods(mlp: ExportedProgram) -> None:
    mine, theirs = _all(compat.to_backend, mlp), _all(upstream, mlp)
    assert type(mine) is type(theirs) is dict
    assert list(mine) == list(theirs) == ["host", "a", "b"]
    assert mine["host"] is theirs["host"] is mlp
    for method in mine:
        assert payloads(mine[method]) == payloads(theirs[method])
        torch.testing.assert_close(mine[method].module()(X), theirs[method].module()(X))
    assert len(payloads(mine["a"])) == 3


@both_engines
@pytest.mark.parametrize("keyword", ["backend_id", "edge_program", "method_edge_program_partitioners"])
def test_the_argument_that_selects_the_overload_is_positional(
    to_backend: Any, keyword: str, mlp: ExportedProgram
) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        to_backend(**{keyword: mlp})


@both_engines
def test_an_argument_of_another_name(to_backend: Any, mlp: ExportedProgram) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'partitioner'"):
        to_backend(mlp, partitioner=linear())


def test_a_type_without_an_overload_is_an_error() -> None:
    """ExecuTorch's own returns None."""
    assert upstream(3.14) is None
    with pytest.raises(TypeError, match=r"is a float, expected one of str, ExportedProgram, MethodPrograms"):
        compat.to_backend(3.14)


# -- exceptions ------------------------------------------------------------------------------------


class Does(Partitioner):
    """A partitioner that does one wrong thing; ExecuTorch's messages name it by its repr."""

    def __init__(self, what: Callable[[ExportedProgram], Any]) -> None:
        super().__init__()
        self.what = what

    def __repr__(self) -> str:
        return "Does()"

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        tags = {"t": DelegationSpec("CompatBackend", [])}
        result = self.what(exported_program)
        return result if isinstance(result, PartitionResult) else PartitionResult(exported_program, tags)


def _tag(program: ExportedProgram, name: str, **meta: Any) -> None:
    node = next(node for node in program.graph.nodes if node.name == name)
    node.meta.update({"delegation_tag": "t", **meta})


def _erase(program: ExportedProgram) -> None:
    node = next(node for node in program.graph.nodes if node.name == "aten_sin_default")
    node.replace_all_uses_with(node.args[0])
    program.graph.erase_node(node)


def _raises(program: ExportedProgram) -> None:
    raise LookupError("no table for sin")


def _outside_tag(program: ExportedProgram) -> None:
    _tag(program, "aten_mul_tensor")
    _tag(program, "b_scale", no_copy=True)
    _tag(program, "aten_sin_default")
    next(node for node in program.graph.nodes if node.name == "aten_mul_tensor").meta.pop("delegation_tag")


PARTITIONERS: dict[str, tuple[type[Exception], Callable[[], Partitioner]]] = {
    "unknown backend": (NotImplementedError, lambda: linear("CompatMissing")),
    "backend raises": (ArithmeticError, lambda: linear("CompatRaises")),
    "partitioner raises": (LookupError, lambda: Does(_raises)),
    "graph changed": (AssertionError, lambda: Does(_erase)),
    "no destinations": (AssertionError, lambda: Does(lambda program: PartitionResult(program, None))),
    "input tagged": (RuntimeError, lambda: Does(lambda program: _tag(program, "x"))),
    "output tagged": (RuntimeError, lambda: Does(lambda program: _tag(program, "output"))),
    "no copy": (RuntimeError, lambda: Does(_outside_tag)),
}


def _caught(kind: type[Exception], call: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:
        call()
    assert type(caught.value) is kind, caught.value
    return caught.value


@pytest.mark.parametrize("overload", ["one", "all"])
@pytest.mark.parametrize("case", PARTITIONERS)
def test_exceptions_are_those_of_executorch(case: str, overload: str, mlp: ExportedProgram) -> None:
    kind, make = PARTITIONERS[case]

    def call(to_backend: Any) -> Any:
        if overload == "one":
            return to_backend(mlp, make())
        return to_backend(MethodProgramsPartitionerSpec({"m": mlp}, {"m": make()}))

    theirs = _caught(kind, lambda: call(upstream))
    mine = _caught(kind, lambda: call(compat.to_backend))
    assert str(mine) == str(theirs)
    told = mine.__cause__ if mine.__cause__ is not None else mine.__context__
    assert isinstance(told, LoweringError), "the whole story is attached"


@pytest.mark.parametrize("backend", ["CompatMissing", "CompatRaises"])
def test_exceptions_for_a_whole_program(backend: str, mlp: ExportedProgram) -> None:
    kind = {"CompatMissing": NotImplementedError, "CompatRaises": ArithmeticError}[backend]
    theirs = _caught(kind, lambda: upstream(backend, mlp, []))
    mine = _caught(kind, lambda: compat.to_backend(backend, mlp, []))
    assert str(mine) == str(theirs)


@both_engines
def test_a_whole_program_that_is_none(to_backend: Any) -> None:
    _caught(AssertionError, lambda: to_backend("CompatBackend", Mlp(), []))


def test_a_method_without_a_program(mlp: ExportedProgram) -> None:
    spec = MethodProgramsPartitionerSpec({"forward": mlp}, {"foward": linear()})
    theirs = _caught(AssertionError, lambda: upstream(spec))
    mine = _caught(AssertionError, lambda: compat.to_backend(spec))
    assert str(mine) == str(theirs) == "Partitioner for method foward is not provided"


def test_returned_state_is_refused_as_executorch_does() -> None:
    """The engine lowers it (row M8); ExecuTorch's message goes on with the whole program."""
    everything = TagPartitioner(lambda node: "t", "CompatBackend")
    theirs = _caught(AssertionError, lambda: upstream(edge_program(State(), (X,)), everything))
    mine = _caught(AssertionError, lambda: compat.to_backend(edge_program(State(), (X,)), everything))
    assert str(theirs).startswith(str(mine))
    assert str(mine).endswith("which is currently not supported.")


def test_where_executorch_gives_up_this_engine_goes_on() -> None:
    partitioner = TagPartitioner(by_operator("aten.sin.default", "aten.add.Tensor"), "CompatBackend")
    program = edge_program(Diamond(), (X,))
    _caught(AssertionError, lambda: upstream(program, partitioner))
    lowered = compat.to_backend(program, partitioner)
    assert len(delegates(lowered)) == 2
    torch.testing.assert_close(lowered.module()(X), Diamond()(X))


def test_a_failure_keeps_nothing_alive() -> None:
    program = edge_program(Mlp(), (X,))
    alive = weakref.ref(program.graph_module)
    for partitioner in (linear("CompatRaises"), linear("CompatMissing"), Does(_raises)):
        with pytest.raises((ArithmeticError, NotImplementedError, LookupError)):
            compat.to_backend(program, partitioner)
    del program, partitioner
    gc.collect()
    assert alive() is None


# -- the patch -------------------------------------------------------------------------------------


def _by_manager() -> ExportedProgram:
    manager = to_edge({"f": torch.export.export(SharedInList(), (X,))})
    return manager.to_backend({"f": cats()}).exported_program("f")


def _by_transform() -> ExportedProgram:
    exported = torch.export.export(SharedInList(), (X,))
    return to_edge_transform_and_lower(exported, partitioner=[cats()]).exported_program()


def _by_function() -> ExportedProgram:
    return imported_before(edge_program(SharedInList(), (X,)), cats())


WAYS = [_by_manager, _by_transform, _by_function]


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """ExecuTorch's overloads are its own before and after each test."""
    kinds = (str, ExportedProgram, MethodProgramsPartitionerSpec, object)
    before = [backend_api.to_backend.dispatch(kind) for kind in kinds]
    assert {function.__module__ for function in before} == {backend_api.__name__}
    yield
    assert [backend_api.to_backend.dispatch(kind) for kind in kinds] == before
    assert backend_api.to_backend is upstream


def _is_ours(way: Callable[[], ExportedProgram]) -> bool:
    """Tell the engines apart by what only this one can lower."""
    try:
        lowered = way()
    except RuntimeError as error:
        assert "constant data node (b_b) is tagged with" in str(error)
        return False
    assert len(delegates(lowered)) == 2
    torch.testing.assert_close(lowered.module()(X), SharedInList()(X))
    return True


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.removeprefix("_by_"))
def test_patch_replaces_the_engine_and_gives_it_back(way: Callable[[], ExportedProgram]) -> None:
    assert not _is_ours(way)
    with compat.patch_executorch():
        assert _is_ours(way)
    assert not _is_ours(way)


def test_patch_covers_whole_programs(mlp: ExportedProgram) -> None:
    """A failing backend raises its bare exception on both; the story in the context is this engine's."""
    with compat.patch_executorch():
        error = _caught(ArithmeticError, lambda: imported_before("CompatRaises", mlp, []))
    assert isinstance(error.__context__, LoweringError)
    error = _caught(ArithmeticError, lambda: imported_before("CompatRaises", mlp, []))
    assert error.__context__ is None


def test_patch_is_undone_after_an_exception() -> None:
    with pytest.raises(KeyError, match="inside"), compat.patch_executorch():
        assert _is_ours(_by_function)
        raise KeyError("inside")
    assert not _is_ours(_by_function)
    with pytest.raises(ArithmeticError), compat.patch_executorch():
        imported_before(edge_program(Mlp(), (X,)), linear("CompatRaises"))
    assert not _is_ours(_by_function)


def test_nested_patches() -> None:
    with compat.patch_executorch():
        with compat.patch_executorch():
            assert _is_ours(_by_function)
        assert _is_ours(_by_function)
        with pytest.raises(KeyError), compat.patch_executorch():
            raise KeyError
        assert _is_ours(_by_function)
    assert not _is_ours(_by_function)


class Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)


def test_a_patched_script_has_reports_and_the_faster_file() -> None:
    inputs = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    exported = torch.export.export(Attention().eval(), inputs)

    def script() -> Any:
        return to_edge_transform_and_lower({"encode": exported}, partitioner=[XnnpackPartitioner()])

    with compat.patch_executorch() as outer:
        plain = script()
        with compat.patch_executorch(rewrites="safe") as lowerings:
            assert len(lowerings) == 0 and str(lowerings) == "Nothing was lowered."
            faster = script()
        assert len(lowerings) == 1 and len(outer) == 2
        whole = imported_before("CompatBackend", edge_program(Mlp(), (X,)), [])
    (before, after, last), (same,) = outer, lowerings
    assert (
        same is after and after.methods == ("encode",) and after.elapsed > 0 and isinstance(whole, LoweredBackendModule)
    )
    assert last.methods == ("forward",) and last.report is None
    assert before.report is not None and after.report is not None
    (old,), (new,) = before.report.methods, after.report.methods
    assert not old.rewritings and new.rewritings and len(new.host) < len(old.host)
    assert "encode in " in str(lowerings) and "XnnpackBackend" in str(lowerings)
    assert len(delegates(faster.exported_program("encode"))) < len(delegates(plain.exported_program("encode")))
    for manager in (plain, faster):
        (got,) = load(manager.to_executorch().buffer).run("encode", *inputs)
        torch.testing.assert_close(got, Attention()(*inputs), atol=1e-5, rtol=1e-5)


def test_the_lowerings_of_a_patch_are_those_of_its_thread_and_only_read() -> None:
    def lowering() -> None:
        imported_before(edge_program(Mlp(), (X,)), linear("CompatBackend"))

    with compat.patch_executorch() as lowerings:
        with pytest.raises(ArithmeticError):
            imported_before(edge_program(Mlp(), (X,)), linear("CompatRaises"))
        lowering()
        thread = threading.Thread(target=lowering)
        thread.start()
        thread.join()
        assert len(lowerings) == 1 and lowerings[0] in lowerings and lowerings[:1] == [lowerings[-1]]
    lowering()
    assert len(lowerings) == 1
    with pytest.raises(InputError, match="rewrites='sage'"), compat.patch_executorch(rewrites="sage"):  # type: ignore[arg-type]
        pytest.fail("entered")
    with pytest.raises(UnknownPluginError, match="sage"), compat.patch_executorch(rewrites=["sage"]):
        pytest.fail("entered")
    assert not _is_ours(_by_function)


def test_an_export_script_gives_the_same_file() -> None:
    """The file that ExecuTorch's own engine makes from an XNNPACK export, payload for payload."""
    exported = torch.export.export(Mlp().eval(), (X,))

    def script() -> Any:
        return to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])

    theirs = script()
    with compat.patch_executorch():
        mine = script()
    found = [d.processed_bytes for d in delegates(mine.exported_program())]
    assert found == [d.processed_bytes for d in delegates(theirs.exported_program())]
    assert found
    assert mine.to_executorch().buffer == theirs.to_executorch().buffer
