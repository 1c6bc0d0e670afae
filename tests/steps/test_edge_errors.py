"""Programs that ExecuTorch does not take: the message names operators and lines, and what it advises helps."""

from __future__ import annotations

import re
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
from exir_lowering import BackendUnavailableWarning, InputError, LoweringOptions, cli, lower

X = torch.tensor([0.1, 0.3, 0.6, 0.9])
WHOLE = torch.tensor([1, 2, 3, 4])
LOWERING_OPTIONS = re.compile(r"LoweringOptions\(edge_compile_config=EdgeCompileConfig\(.*?\)\)")


class Histogram(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.histc(x, bins=4, min=0.0, max=1.0) + 1


class Several(torch.nn.Module):
    """An operator in a module, one without an out variant, one in a branch, one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Histogram()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = torch.kthvalue(x, 2)[0], torch.kthvalue(x, 3)[0]
        branch = torch.cond(x.sum() > 0, torch.special.bessel_j0, torch.neg, (x,))
        return self.head(x), torch._is_all_true(x > 0), first + second, branch


class Shift(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bitwise_left_shift(x, 2)


class Spectrum(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stft(x, 4, return_complex=True).abs()


class AllTrue(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._is_all_true(x > 0)


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
    assert caught.value.__cause__ is not None
    return message


def advised(message: str) -> LoweringOptions:
    """Return the options that a message writes down, as Python reads them."""
    (written,) = LOWERING_OPTIONS.findall(message)
    options = eval(written)  # what a reader would copy
    assert isinstance(options, LoweringOptions)
    return options


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


# -- what is not Edge dialect ----------------------------------------------------------------------


def test_an_allowed_operator_with_a_kernel_lowers_and_runs() -> None:
    program = export(Shift(), (WHOLE,))
    message = refused(
        lambda: lower(program), "'forward'", "aten.bitwise_left_shift.Tensor", line_of(Shift, "bitwise_left_shift(")
    )
    assert "no kernel" not in message and "out variant" not in message
    (result,) = run(lower(program, options=advised(message)), WHOLE)
    assert torch.equal(result, WHOLE << 2)


def test_an_operator_without_a_kernel_lowers_and_the_message_says_that_it_cannot_run_here() -> None:
    program = export(Histogram(), (X,))
    message = refused(
        lambda: lower(program),
        "aten.histc.default",
        line_of(Histogram, "torch.histc("),
        "The ExecuTorch runtime here has no kernel for aten.histc.default (aten::histc.out)",
    )
    options = advised(message)
    with pytest.raises(InputError, match=r"no kernel for aten::histc.out"):
        run(lower(program, options=options), X)
    assert delegated(program, options).report.methods[0].coverage == 1  # as advised


def test_all_operators_are_listed_at_once_with_modules_branches_and_lines() -> None:
    program = export(Several(), (X,))
    message = refused(
        lambda: lower(program),
        "aten.histc.default\n        aten_histc_default in module 'head'",
        "aten._is_all_true.default\n",
        "aten.kthvalue.default\n        aten_kthvalue_default, aten_kthvalue_default_1: ",
        ".aten_special_bessel_j0_default",
        line_of(Several, "torch.kthvalue("),
        line_of(Several, "torch.cond("),
        "There is no out variant of aten._is_all_true.default",
    )
    assert message.count(line_of(Several, "torch.kthvalue(")) == 1
    assert list(lower(program, options=advised(message))) == ["forward"]


def test_what_partitioners_keep_whole_is_not_listed() -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.histc(torch.nn.functional.hardsigmoid(self.linear(x)), bins=4)

    message = refused(lambda: lower(export(Both().eval(), (X[None],)), "xnnpack"), "aten.histc.default")
    assert [torch.ops.aten.histc.default] == advised(message).edge_compile_config._core_aten_ops_exception_list


def test_what_was_allowed_before_stays_in_the_advice() -> None:
    program = export(Several(), (X,))
    given = EdgeCompileConfig(_core_aten_ops_exception_list=[torch.ops.aten.histc.default], _skip_dim_order=True)
    message = refused(lambda: lower(program, options=LoweringOptions(edge_compile_config=given)), "aten.kthvalue")
    assert "aten.histc.default\n" not in message
    assert given._core_aten_ops_exception_list == [torch.ops.aten.histc.default]
    assert advised(message).edge_compile_config._skip_dim_order
    lower(program, options=advised(message))


def test_dtypes_that_the_check_does_not_know_lower_and_run_without_it() -> None:
    program = export(Spectrum(), (X,))
    message = refused(
        lambda: lower(program),
        "aten.abs.default (self complex64, result float32)",
        line_of(Spectrum, "torch.stft("),
        "_check_ir_validity=False",
    )
    (result,) = run(lower(program, options=advised(message)), X)
    torch.testing.assert_close(result, Spectrum()(X))


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


def test_a_static_cache_of_transformers_needs_a_strict_export() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.generation_config.cache_implementation = "static"
    cached = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=8)
    inputs = {"input_ids": torch.tensor([[3]]), "cache_position": torch.tensor([0])}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        loose, strict = (export(cached, (), inputs, strict=strict) for strict in (False, True))
        with pytest.raises(InputError, match=r"lifted_tensor_0\n +add_(.|\n)*strict=True"):
            lower(loose)
        lower(strict).emit()


# -- what has no out variant -----------------------------------------------------------------------


def test_an_operator_without_an_out_variant_is_named_with_its_line() -> None:
    allowed = EdgeCompileConfig(_core_aten_ops_exception_list=[torch.ops.aten._is_all_true.default])
    options = LoweringOptions(edge_compile_config=allowed)
    program = export(AllTrue(), (X,))
    lowered = lower({"other": export(Shift(), (WHOLE,)), "check": program}, options=both(options, Shift, WHOLE))
    refused(
        lowered.emit,
        "'check'",
        "aten._is_all_true.default\n        aten__is_all_true_default: ",
        line_of(AllTrue, "_is_all_true("),
        "let a partitioner take aten._is_all_true.default",
    )
    delegated(program, options).emit()  # as advised


def both(options: LoweringOptions, module: type[torch.nn.Module], example: torch.Tensor) -> LoweringOptions:
    """Return options that allow what another module needs too."""
    needed = advised(refused(lambda: lower(export(module(), (example,)))))
    first, second = options.edge_compile_config, needed.edge_compile_config
    operators = [*first._core_aten_ops_exception_list, *second._core_aten_ops_exception_list]
    return LoweringOptions(edge_compile_config=EdgeCompileConfig(_core_aten_ops_exception_list=operators))


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


# -- the command line ------------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Run a command that is refused, and return what it says."""
    assert cli.main([str(argument) for argument in argv]) == 2
    return capsys.readouterr().err


def test_the_command_line_names_its_own_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, file = tmp_path / "several.pt2", tmp_path / "several.pte"
    torch.export.save(export(Several(), (X,)), model)
    for command in (["plan", model], ["lower", model, "-o", file]):
        message = told(capsys, *command)
        assert "LoweringOptions" not in message
        options = re.findall(r"--allow-operator [\w.]+", message)
        assert len(options) == 4
    arguments = [word for option in options for word in option.split()]
    assert cli.main(["plan", str(model), *arguments]) == 0
    assert "no out variant" in told(capsys, "lower", model, "-o", file, *arguments)
    assert cli.main(["plan", str(model), "--no-edge-check"]) == 0


def test_the_command_line_leaves_the_check_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, file = tmp_path / "spectrum.pt2", tmp_path / "spectrum.pte"
    torch.export.save(export(Spectrum(), (X,)), model)
    assert "disable the check with --no-edge-check" in told(capsys, "lower", model, "-o", file)
    assert cli.main(["lower", str(model), "-o", str(file), "--no-edge-check"]) == 0
    torch.testing.assert_close(exir_lowering.load(file).run("forward", X)[0], Spectrum()(X))


def test_the_command_line_fuses_quantized_patterns(embedding: ExportedProgram, tmp_path: Path) -> None:
    model, file = tmp_path / "embedding.pt2", tmp_path / "embedding.pte"
    torch.export.save(embedding, model)
    tokens = torch.tensor([3, 7])
    for options in ([], ["--fuse-quantized"]):
        assert cli.main(["lower", str(model), "-o", str(file), *options]) == 0
        torch.testing.assert_close(exir_lowering.load(file).run("forward", tokens)[0], embedding.module()(tokens))


def test_an_operator_that_does_not_exist(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = tmp_path / "shift.pt2"
    torch.export.save(export(Shift(), (WHOLE,)), model)
    for name in ("aten.histk.default", "histc", "aten.histc.default.more", ""):
        assert f"--allow-operator {name!r}: torch has no such operator" in told(
            capsys, "plan", model, "--allow-operator", name
        )
    assert "Did you mean 'aten.histc.default'?" in told(capsys, "plan", model, "--allow-operator", "aten.histk.default")
