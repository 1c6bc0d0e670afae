"""Programs that ExecuTorch does not take: the message names operators and lines, and what it advises helps."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torchao.quantization as quantization
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig
from lowering_support import NoopBackend, TagPartitioner
from torch.export import ExportedProgram, export
from torchao.quantization.granularity import PerAxis
from torchao.utils import unwrap_tensor_subclass

import exir_lowering
from exir_lowering import BackendUnavailableWarning, InputError, LoweringOptions, lower

X = torch.tensor([0.1, 0.3, 0.6, 0.9])


@torch.library.custom_op("exir_lowering_tests::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


halve.register_fake(torch.empty_like)


class Next(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nextafter(x, x + 1) + 1


class Several(torch.nn.Module):
    """An operator in a module, one without an out variant, one in a branch, one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Next()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = torch.unique_consecutive(x), torch.unique_consecutive(x + 1)
        branch = torch.cond(x.sum() > 0, lambda t: torch.nextafter(t, -t), torch.neg, (x,))
        return self.head(x), halve(x), first, second, branch


class Spectrum(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stft(x, 4, return_complex=True).abs()


class Cache:
    """State in an object that is no module, as in transformers' StaticCache."""

    def __init__(self, kept: torch.Tensor) -> None:
        self.kept = kept


class Hidden(torch.nn.Module):
    """Writes a buffer by way of the cache, or a tensor that is no buffer at all."""

    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        self.cache = Cache(torch.zeros(4))
        if registered:
            self.register_buffer("kept", self.cache.kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.kept.view(2, 2).add_(x.view(2, 2))
        return self.cache.kept * 2


class Counted(torch.nn.Module):
    """Counts calls behind an object, without a look at its input."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.kept.add_(1)
        return self.cache.kept * x


class Embedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(32, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


def refused(call: Any, *words: str) -> str:
    """Return the message of the InputError that a call ends with, which has these words."""
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    for word in words:
        assert word in message, message
    return message


def run(lowered: exir_lowering.LoweredMethods, *inputs: Any, config: Any = None) -> list[torch.Tensor]:
    return exir_lowering.load(lowered.emit(config).buffer).run("forward", *inputs)


def delegated(program: ExportedProgram, options: LoweringOptions) -> exir_lowering.LoweredMethods:
    """Lower all of a program to a backend that nothing here executes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BackendUnavailableWarning)
        return lower(program, TagPartitioner(backend="noop"), backends={"noop": NoopBackend}, options=options)


def line_of(module: type[torch.nn.Module], text: str) -> str:
    """Return how a message begins to tell the line of this file with a text in it."""
    lines = Path(__file__).read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"class {module.__name__}("))
    number = next(number for number in range(start, len(lines)) if text in lines[number])
    return f'File "{__file__}", line {number + 1}, in forward: {lines[number].strip()}'


# -- what does not run on the host -----------------------------------------------------------------

ALLOWED = LoweringOptions(unsupported="allow")


def test_an_operator_without_a_kernel_is_refused_with_its_line_before_a_backend_is_called() -> None:
    program = export(Next(), (X,))
    for call in (lower, exir_lowering.plan):
        refused(
            lambda call=call: call(program),
            "'forward'",
            "aten.nextafter.default: ExecuTorch",
            "has no kernel aten::nextafter.out",
            line_of(Next, "torch.nextafter("),
        )
    with pytest.raises(InputError, match=r"no kernel for aten::nextafter.out"):
        run(lower(program, options=ALLOWED), X)
    assert delegated(program, LoweringOptions()).report.methods[0].coverage == 1  # what a backend takes is left to it


def test_all_operators_are_listed_at_once_with_modules_branches_and_lines() -> None:
    program = export(Several(), (X,))
    message = refused(
        lambda: lower(program),
        "aten_nextafter_default in module 'head'",
        "exir_lowering_tests.halve.default: it has no out variant",
        "aten_unique_consecutive_default, aten_unique_consecutive_default_1: ",
        ".aten_nextafter_default",
        line_of(Several, "torch.unique_consecutive("),
        line_of(Several, "torch.cond("),
    )
    assert message.count(line_of(Several, "torch.unique_consecutive(")) == 1
    assert list(lower(program, options=ALLOWED)) == ["forward"]


def test_single_operators_can_be_allowed() -> None:
    given = EdgeCompileConfig(_core_aten_ops_exception_list=[torch.ops.aten.nextafter.default], _skip_dim_order=True)
    options = LoweringOptions(edge_compile_config=given)
    message = refused(lambda: lower(export(Several(), (X,)), options=options), "aten.unique_consecutive")
    assert "aten.nextafter.default" not in message
    assert given._core_aten_ops_exception_list == [torch.ops.aten.nextafter.default]
    assert list(lower(export(Next(), (X,)), options=options)) == ["forward"]


def test_dtypes_for_which_executorch_defines_no_operator_run_where_a_kernel_takes_them() -> None:
    (result,) = run(lower(export(Spectrum(), (X,))), X)
    torch.testing.assert_close(result, Spectrum()(X))


def test_the_runtime_that_counts_is_the_one_that_is_named(tmp_path: Path) -> None:
    program, targets = export(torch.nn.ReLU(), (X,)), tmp_path / "targets.json"
    targets.write_text(json.dumps({"name": "watch", "runtime": "1.4.1", "operators": ["aten::add.out"]}))
    refused(lambda: lower(program, options=LoweringOptions(target=targets)), "watch has no kernel aten::relu.out")
    assert lower(program, options=LoweringOptions(target="1.3.1"))
    for wrong in ("0.1", tmp_path):
        refused(lambda wrong=wrong: lower(program, options=LoweringOptions(target=wrong)), "is neither a release")


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("strict", [False, True])
def test_what_is_written_through_an_object_is_state(registered: bool, strict: bool) -> None:
    lowered = lower(export(Hidden(registered=registered), (X,), strict=strict))
    loaded = exir_lowering.load(lowered.emit().buffer)
    for times in (2, 4, 6):
        torch.testing.assert_close(loaded.run("forward", X)[0], times * X)


def test_what_torch_export_has_changed_is_refused() -> None:
    """It executes what reads no input, on tensors behind objects that are not modules: state would begin with 1."""
    program = export(Counted(), (X,), strict=False)
    with pytest.raises(InputError) as caught:
        lower(program)
    for words in ("lifted_tensor_0", line_of(Counted, "add_("), "strict=True", "register_buffer"):
        assert words in str(caught.value)
    loaded = exir_lowering.load(lower(export(Counted(), (X,), strict=True)).emit().buffer)
    for times in (1, 2, 3):
        torch.testing.assert_close(loaded.run("forward", X)[0], times * X)


# -- what torchao has quantized --------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedding() -> ExportedProgram:
    """An embedding whose weights torchao has quantized."""
    model = Embedding().eval()
    config = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    quantization.quantize_(model, config, lambda module, name: isinstance(module, torch.nn.Embedding))
    unwrap_tensor_subclass(model)  # a file of torch.export has none
    return export(model, (torch.tensor([1, 2]),))


def test_an_embedding_of_torchao_is_fused(embedding: ExportedProgram) -> None:
    """Or computed in plain operators, unless the configuration asks for it."""
    lowered, tokens = lower(embedding), torch.tensor([3, 7])
    for config in (None, ExecutorchBackendConfig(do_quant_fusion_and_const_prop=True)):
        (result,) = run(lowered, tokens, config=config)
        torch.testing.assert_close(result, embedding.module()(tokens))


def test_a_linear_layer_of_torchao_need_not_be_delegated() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32)).eval()
    quantization.quantize_(model, quantization.Int8DynamicActivationIntxWeightConfig())
    example = torch.randn(1, 32)
    program = export(model, (example,))
    for partitioner, tolerance in ((None, 1e-5), ("xnnpack", 0.05)):
        (result,) = run(lower(program, partitioner), example)
        torch.testing.assert_close(result, program.module()(example), atol=tolerance, rtol=tolerance)
