"""Messages name the true cause: what a user reads where something else was to blame at first sight."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.exir.backend.backend_details import BackendDetails
from lowering_support import TagPartitioner

import exir_lowering
import exir_lowering.plugins
from exir_lowering import (
    Backend,
    BackendContractError,
    BackendFailure,
    Delegate,
    PartitionerContractError,
    PluginLoadError,
    PreprocessResult,
    RewriteContractError,
    register_backend,
    register_delegate,
)


class Function(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.arange(1.0, 5.0))

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


def program(function: Callable[..., Any], *inputs: torch.Tensor, batch: bool = False) -> torch.export.ExportedProgram:
    shapes = (tuple({0: torch.export.Dim("batch", min=1, max=8)} for _ in inputs),) if batch else None
    return torch.export.export(Function(function).eval(), inputs, dynamic_shapes=shapes)


# ---- reasons


@pytest.mark.parametrize(
    ("function", "shape", "operator", "reason"),
    [
        (
            lambda m, x: torch.relu(x.flatten(1)), (2, 3, 4), "aten.view_copy.default",
            "one of its arguments is a number that is computed at run time, not a tensor (the check says "
            '"invalid dtype") (float32[',
        ),
        (
            lambda m, x: torch.relu(x[x > 0]), (2,), "aten.relu.default",
            "one of its inputs has a size that depends on the values of a tensor (the check says "
            '"invalid dtype") (float32[u',
        ),
    ],
)  # fmt: skip
def test_a_reason_of_xnnpack_that_names_the_wrong_cause(
    function: Any, shape: tuple[int, ...], operator: str, reason: str
) -> None:
    options = exir_lowering.LoweringOptions(rewrites="none")  # which would write the size as -1
    plan = exir_lowering.plan(program(function, torch.ones(shape), batch=True), "xnnpack", options=options)
    (host,) = (node for node in plan.methods[0].host if node.operator == operator)
    assert host.reason.startswith(reason)


def test_the_advice_for_a_shape_is_good() -> None:
    """What the reason above advises is delegated, with a batch that changes."""
    given = program(lambda m, x: torch.relu(x.view(-1, 12)), torch.ones(2, 3, 4), batch=True)
    lowered = exir_lowering.lower(given, "xnnpack")
    assert lowered.report.methods[0].coverage == 1.0
    loaded = exir_lowering.load(lowered.emit().buffer)
    for size in (1, 5):
        x = torch.randn(size, 3, 4)
        torch.testing.assert_close(loaded.run("forward", x)[0], torch.relu(x.view(-1, 12)))


def test_a_dtype_that_is_invalid_is_called_so() -> None:
    plan = exir_lowering.plan(program(lambda m, x: x + x, torch.ones(2, dtype=torch.int32)), "xnnpack")
    assert [node.reason for node in plan.methods[0].host] == ["invalid dtype (int32[2] -> int32[2])"]


# ---- failures of backends

OPERATORS = {"aten.mul.Tensor": 1}


def number_of(name: str) -> int:
    return OPERATORS[name]


class Table(Backend):
    backend_id = "table"

    def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
        numbers = [number_of(node.target.__name__) for node in program.graph.nodes if node.op == "call_function"]
        return PreprocessResult(bytes(numbers))


class Grouped(Table):
    def preprocess_all(self, edge_programs: Any, compile_specs: Any, **_: Any) -> Any:
        return super().preprocess_all(edge_programs, compile_specs)


class Json(Backend):
    backend_id = "table"

    def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
        import json

        return PreprocessResult(json.dumps(program).encode())


class TableDetails(BackendDetails):
    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        return PreprocessResult(bytes([number_of("aten.add.Tensor")]))


class Refusing(Backend):
    backend_id = "table"

    def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
        raise exir_lowering.InputError("aten.add.Tensor is not supported.")


def failure_of(backend: Any) -> str:
    given = program(lambda m, x: x + x, torch.ones(3))
    with pytest.raises(BackendFailure) as caught:
        exir_lowering.lower(given, TagPartitioner(backend="table"), backends={"table": backend})
    return str(caught.value)


@pytest.mark.parametrize("backend", [Table, Grouped, TableDetails])
def test_a_failure_names_the_line_of_the_backend_and_that_of_the_model(backend: Any) -> None:
    line = number_of.__code__.co_firstlineno + 1
    first, second, *rest = failure_of(backend).splitlines()
    assert first == "Backend 'table' failed: KeyError: 'aten.add.Tensor'"
    assert second == f'  raised at File "{__file__}", line {line}, in number_of: return OPERATORS[name]'
    assert "partition forward/0:t of method 'forward': aten_add_tensor" in rest[0]
    assert rest[1].endswith("in forward: return self.function(self, *inputs)")


def test_a_failure_in_what_the_backend_calls_names_the_backends_line() -> None:
    text = failure_of(Json)
    assert "TypeError: Object of type ExportedProgram is not JSON serializable" in text
    assert f'raised at File "{__file__}"' in text
    assert "in preprocess: return PreprocessResult(json.dumps(program).encode())" in text


class MuteError(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


class Mute(Table):
    def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
        raise MuteError


def raise_mute(*_: Any, **__: Any) -> Any:
    raise MuteError


class MuteClass(Table):
    __init__ = raise_mute


class MutePartitioner(TagPartitioner):
    partition = raise_mute


class MuteRewrite(exir_lowering.plugins.Rewrite):
    name, operators, exactness = "mute", ("*",), "bits"
    rewrite = raise_mute


def test_an_error_without_a_text_does_not_escape() -> None:
    """Whoever raises it is named, and what it raises when it is asked for its text is not."""
    shown = "MuteError: it has no message that can be shown"
    assert failure_of(Mute).startswith(f"Backend 'table' failed: {shown}")
    given = program(lambda m, x: x + x, torch.ones(3))
    with pytest.raises(PartitionerContractError, match=shown):
        exir_lowering.lower(given, MutePartitioner(backend="table"), backends={"table": Table})
    with pytest.raises(RewriteContractError, match=shown):
        exir_lowering.lower(given, options=exir_lowering.LoweringOptions(rewrites=[MuteRewrite()]))
    with pytest.raises(PluginLoadError, match=shown):
        exir_lowering.lower(given, TagPartitioner(backend="table"), backends={"table": MuteClass})


# ---- what a backend forgets


def forgetting(payload: Callable[[str], bytes], returned: Callable[[Any, list[Any]], Any]) -> type[Backend]:
    class Forgetting(Backend):
        backend_id = "table"

        def preprocess(self, program: Any, compile_specs: Any, context: Any) -> PreprocessResult:
            refs = [context.weights.ref(tensor) for tensor in program.state_dict.values()]
            return PreprocessResult(
                b"".join(payload(ref.key) for ref in refs), data_store_output=returned(context.weights, refs)
            )

    return Forgetting


WEIGHTED = program(lambda m, x: x * m.weight, torch.ones(4))


@pytest.mark.parametrize("payload", [str.encode, bytes.fromhex])
@pytest.mark.parametrize("returned", [lambda weights, refs: None, lambda weights, refs: weights.named_data([])])
def test_named_data_that_was_not_returned(payload: Any, returned: Any) -> None:
    with pytest.raises(BackendContractError) as caught:
        exir_lowering.lower(
            WEIGHTED, TagPartitioner(backend="table"), backends={"table": forgetting(payload, returned)}
        )
    message = str(caught.value)
    assert "Backend 'table' refers in its payload of partition forward/0:t to named data that it did not" in message
    assert "data_store_output=context.weights.named_data(refs)" in message


def test_classes_that_nobody_can_make_are_not_registered() -> None:
    with pytest.raises(PluginLoadError, match=r"register_backend: .*Mute has no preprocess, which every Backend needs"):

        @register_backend
        class Mute(Backend):
            backend_id = "mute"

    with pytest.raises(PluginLoadError, match=r"has no preprocess"):

        @register_backend
        class AllOnly(Backend):
            backend_id = "mute"

            def preprocess_all(self, edge_programs: Any, compile_specs: Any, **_: Any) -> Any:
                return {}

    with pytest.raises(PluginLoadError, match=r"register_delegate: .*Idle has no execute, which every Delegate needs"):

        @register_delegate
        class Idle(Delegate):
            delegate_id = "mute"

    with pytest.raises(exir_lowering.UnknownPluginError):
        exir_lowering.lower(WEIGHTED, TagPartitioner(backend="mute"))


# ---- the page about an error


def pages_in(error: BaseException) -> list[str]:
    lines = "".join(traceback.format_exception(error)).splitlines()
    return [line for line in lines if line.startswith("See docs/errors/")]


def test_a_traceback_has_the_page_of_each_error_once() -> None:
    given = program(lambda m, x: x + x, torch.ones(3))
    with pytest.raises(BackendFailure) as caught:
        exir_lowering.lower(given, TagPartitioner(backend="table"), backends={"table": Refusing})
    pages = ["See docs/errors/InputError.md", "See docs/errors/BackendFailure.md"]
    assert pages_in(caught.value) == pages
    assert "See docs" not in str(caught.value)
    # Pickles have no causes, unless something in the process, such as Dask, teaches them.
    assert pages_in(pickle.loads(pickle.dumps(caught.value))) in (pages, pages[1:])
