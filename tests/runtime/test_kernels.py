"""What `load` makes of a call of a kernel is what the runtime makes of it; hunt.py has many more."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge
from kernel_calls import compare, make_call
from quantized_calls import kernel_calls, program_calls, quantized_kernels
from torch.export import export
from torch.nn import functional

from exir_lowering import InputError, load, lower
from exir_lowering.pte.quantized import UNKNOWN, Layout, why_wrong

HALVES = (torch.float16, torch.bfloat16)


def kinds(calls):
    """Return which of the calls, by name, are of which kind."""
    found = {}
    for outcome in compare(calls):
        found.setdefault(outcome.kind, []).append((outcome.name, outcome))
    return found


def norms(dtype):
    x, one = torch.randn(2, 4, 3, 3).to(dtype), torch.rand(4).to(dtype)
    yield make_call("batch norm", functional.batch_norm, x, one, one, one, one)
    yield make_call("instance norm", functional.instance_norm, x)
    yield make_call("group norm", functional.group_norm, x, 2, one, one)
    yield make_call("layer norm", functional.layer_norm, x, [3, 3])
    yield make_call("softmax", torch.softmax, x, 1)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_floats_are_not_refused(dtype):
    """The runtime has the mean and the deviation in the type of what they are of, torch in float32."""
    found = kinds(list(norms(dtype)))
    assert set(found) == {"right"}, found


def test_types_that_kernels_take_are_not_refused():
    whole, real = torch.arange(6).reshape(2, 3), torch.randn(2, 3)
    calls = [make_call(f"sum as {dtype}", torch.sum, whole, dim=1, dtype=dtype) for dtype in (torch.int32, *HALVES)]
    calls += [make_call("where", torch.where, whole > 2, whole, torch.tensor(0.5))]
    calls += [make_call("amax", torch.amax, each, 1) for each in (whole, real.half(), whole.to(torch.uint8), whole > 2)]
    calls += [make_call("power", torch.pow, whole.int(), real), make_call("bool", torch.add, whole > 1, whole < 5)]
    image, weight = torch.randn(1, 2, 3, 3), torch.randn(2, 1, 2, 2)
    biases = [torch.ones(1, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.int8)]
    calls += [make_call("transposed", functional.conv_transpose2d, image, weight, bias) for bias in biases]
    found = kinds(calls)
    assert set(found) == {"right"}, found


def test_strides_count_from_where_a_tensor_starts():
    x = torch.arange(1.0, 17.0)
    found = kinds([make_call("as_strided", lambda x: torch.as_strided(x + 1, [2, 2, 3], [1, 4, 2], 3) * 2, x)])
    assert set(found) == {"right"}, found


def test_a_kernel_that_would_end_the_process_is_refused():
    """Where PyTorch returns; other kernels, or other dimensions, are not refused."""
    x = torch.empty(3, 0, 2)
    ends = [make_call(each.__name__, each, torch.empty(0, 3), 1) for each in (torch.amax, torch.amin)]
    ends += [make_call("log_softmax", torch.log_softmax, x, dim) for dim in (0, 1, -2)]
    ends += [make_call("narrow_copy", torch.narrow_copy, torch.ones(3, 2), -1, 0, 1)]
    ends += [make_call("transposed", functional.conv_transpose1d, *torch.ones(2, 1, 1, 1), torch.ones(1).bool())]
    number = torch.tensor(2.0)
    ends += [make_call("sum", torch.sum, number, 0), make_call("unfold", torch.unfold_copy, number, 0, 1, 1)]
    runs = [make_call("sum", torch.sum, number, []), make_call("mean", torch.mean, number, 0)]
    runs += [make_call("converting sum", torch.sum, number.int(), 0, dtype=torch.int64)]
    runs += [make_call("resized", functional.interpolate, torch.ones(0, 1, 2, 2), scale_factor=2)]
    runs += [make_call("narrow_copy", torch.narrow_copy, torch.ones(3, 2), 1, 0, 1)]
    runs += [make_call("log_softmax", torch.log_softmax, x, dim) for dim in (2, -1)]
    runs += [make_call(each.__name__, each, torch.empty(0, 3), 1) for each in (torch.sum, torch.argmax, torch.softmax)]
    found = kinds(runs)
    assert set(found) == {"right"}, found
    config = EdgeCompileConfig(_check_ir_validity=False)
    for call in ends:
        edge = to_edge(export(call.module, call.inputs, strict=False), compile_config=config)
        with pytest.raises(InputError, match=r"would end the process|is called with tensors of"):
            load(edge.to_executorch().buffer)


@pytest.mark.parametrize("kernel", quantized_kernels())
def test_kernels_of_quantised_programs(kernel: str) -> None:
    """These end the process on nearly each call that they do not take, so each has to be refused."""
    calls = kernel_calls(kernel, 1)
    right = [call for call in calls if call.name.endswith("[right]") and call.expected is not None]
    wrong = [call for call in calls if not call.name.endswith("[right]")]
    found = kinds([*right[:: len(right) // 4 or 1], *wrong[:: len(wrong) // 6]])
    assert "right" in found
    assert not [kind for kind, outcomes in found.items() if any(outcome.defect for _, outcome in outcomes)], found


def test_what_is_known_only_at_run_time_is_not_refused():
    """Sizes of dynamic tensors and computed numbers; but a result needs room, and its type is known."""
    x, out = Layout(torch.float32, (None, 5), 20), Layout(torch.int8, (None, 5), 20)
    quantize = "quantized_decomposed::quantize_per_tensor.out"
    assert why_wrong(quantize, [x, UNKNOWN, UNKNOWN, UNKNOWN, 127, 1, out]) is None
    assert why_wrong(quantize, [x, 0.5, 0, -128, 127, UNKNOWN, out]) is not None
    small = why_wrong(quantize, [x, 0.5, 0, -128, 127, 1, Layout(torch.int8, (None, 5), 15)])
    assert small == "the result has room for 15 elements, not for 20"
    scale = Layout(torch.float64, (4,), 4)
    channels = [x, scale, Layout(torch.int64, (4,), 4), 0, -128, 127, 1, out]
    assert why_wrong("quantized_decomposed::quantize_per_channel.out", channels) is None
    channels[3] = 1
    assert "got 4 elements, expected 5" in str(why_wrong("quantized_decomposed::quantize_per_channel.out", channels))


def test_operators_of_quantised_programs():
    """As PyTorch has them, through the compiler; what ExecuTorch's kernels do not take is refused."""
    found = kinds(list(program_calls())[::37])
    assert not [kind for kind, outcomes in found.items() if any(outcome.defect for _, outcome in outcomes)], found
    assert len(found["right"]) > 10, found


WITHOUT_COMPILER = """
import sys, torch, exir_lowering
program = exir_lowering.load(sys.argv[1])
print(program.run("forward", torch.tensor([[1, 0]]))[0].tolist())
try:
    exir_lowering.load(sys.argv[2])
except exir_lowering.InputError as error:
    print(error)
print([name for name in sys.modules if name.startswith("executorch.exir")])
"""


class Rows(torch.nn.Module):
    def forward(self, indices):
        weight, scale = torch.tensor([[0x8F], [0x97]], dtype=torch.uint8), torch.tensor([1.0, 2.0])
        return torch.ops.quantized_decomposed.embedding_4bit(weight, scale, None, -8, 7, indices)


def test_quantised_embeddings_need_no_compiler(tmp_path: Path) -> None:
    """Only the compiler registers them with torch; a file is checked, and runs, without it too."""
    lower(export(Rows(), (torch.tensor([[1, 0]]),))).emit().save(tmp_path / "rows.pte")
    wrong = next(call for call in kernel_calls("quantized_decomposed::embedding_4bit.out") if "of int8]" in call.name)
    assert wrong.content is not None
    (tmp_path / "wrong.pte").write_bytes(wrong.content)
    done = forked.run(WITHOUT_COMPILER, tmp_path / "rows.pte", tmp_path / "wrong.pte", fresh=True)
    assert done.returncode == 0, done.stderr[-2000:]
    first, refusal, modules = done.stdout.splitlines()
    assert first == "[[[2.0, -2.0], [0.0, 7.0]]]" and modules == "[]"
    assert "would end the process" in refusal and "got a tensor of int8, expected uint8" in refusal
