"""What `load` and the interpreter make of a call of a kernel is what the runtime makes of it; hunt.py has many more."""

from __future__ import annotations

import pytest
import torch
from kernel_calls import compare, make_call
from torch.nn import functional

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
    for calls, kind in ((ends, "runtime died, load refused"), (runs, "right")):
        found = kinds(calls)
        assert set(found) == {kind}, found
