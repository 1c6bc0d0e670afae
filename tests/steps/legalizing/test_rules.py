"""Rules compute what the operators do: on PyTorch's own samples, on corners, and in the runtime."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import operator_database
import pytest
import torch
from torch.export import Dim, export
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import exir_lowering
from exir_lowering.steps.legalizing.fragments import RULES
from exir_lowering.steps.legalizing.registry import MASK, Failed

NAN, INF = float("nan"), float("inf")
OPERATORS = (
    "^(argsort|bitwise_..*_shift|bucketize|ceil|constant_pad_nd|copysign|cummax|cummin|digamma|div_.*|erfc|floor.*|fmod|"
    "hist.*|hypot|index_reduce_.*|kthvalue|lgamma|linalg.*|logcumsumexp|log_softmax|masked_median|masked_select|median|"
    "mode|msort|nanmedian|polygamma.*|pow|remainder|__rmod__|__rpow__|rou.*|scatter_reduce_.*|searchsorted|sign|signbit|"
    "sort|topk|trunc|special_.*|i0|erfinv|grid_sampler_3d|cholesky.*|qr|lu.*|logdet|inverse|"
    "put|scatter|diagonal_scatter|as_strided_scatter|fmax|fmin|angle|addbmm|triangular_solve|"
    "nn_functional_(adaptive.*|bilinear|grid_sample|avg_.*|conv.*|embedding_bag|max_pool.*|pad.*|rrelu))$"
)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Recorder(TorchDispatchMode):
    """Keeps the calls of operators that have rules, with copies of what they read and what they returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        given = tree_map(
            lambda value: value.clone() if isinstance(value, torch.Tensor) else value, (args, kwargs or {})
        )
        result = func(*args, **(kwargs or {}))
        if name in RULES:
            self.calls.append((name, func, *given, result))
        return result


def calls(info: Any, dtype: torch.dtype, count: int) -> Iterator[tuple[str, Any, tuple[Any, ...], dict[str, Any], Any]]:
    """Yield the calls that the samples of an operator make."""
    for module in operator_database.samples(info, dtype, count):
        with Recorder() as recorder:
            try:
                module(*[each.clone() for each in module.given])
            except Exception:  # the sample is not for this machine
                continue
        yield from recorder.calls


def compute(name: str, args: Any, kwargs: Any, want: Sequence[Any]) -> list[Any] | None:
    """Return what a rule computes, as a file has it: in the operator's types; None if it refuses."""
    try:
        got = RULES[name](*args, **kwargs)
    except Failed:
        return None
    if got is NotImplemented:
        return None
    found = list(got) if isinstance(got, (list, tuple)) else [got]
    return [None if one is None else one.to(like.dtype) for one, like in zip(found, want, strict=True)]


def differences(name: str, operator: Any, args: Any, kwargs: Any, want: Any) -> list[str] | None:
    """Return how what a rule computes differs from what the operator did; None if it refuses."""
    want, exact = tree_leaves(want), [None]
    got = compute(name, args, kwargs, want)
    if got is None:
        return None
    got, want = (operator_database.told(name, args, kwargs, found) for found in (got, want))
    with contextlib.suppress(Exception):  # of what takes no float64
        wide = tree_map(_wide, (args, kwargs))
        exact = tree_leaves(operator(*wide[0], **wide[1]))
    exact = exact if len(exact) == len(want) else [None] * len(want)
    told = [
        "" if each[0] is None else operator_database.difference(*each) for each in zip(got, want, exact, strict=True)
    ]
    return [f"result {number}: {found}" for number, found in enumerate(told) if found]


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("dtype", operator_database.DTYPES, ids=str)
def test_rules_do_what_the_operators_do(dtype: torch.dtype) -> None:
    told, computed = [], Counter[str]()
    for info in operator_database.choose(OPERATORS):
        if dtype not in info.supported_dtypes("cpu"):
            continue
        for name, operator, args, kwargs, want in calls(info, dtype, 3):
            found = differences(name, operator, args, kwargs, want)
            computed[name] += found is not None
            told += [f"{name} {args} {kwargs}: {each}"[:500] for each in found or ()]
    assert not told
    assert len(computed) > (10 if dtype is torch.bool else 20)


def _corners(dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        info: Any = torch.finfo(dtype)
        some = [
            0.0,
            -0.0,
            1,
            -1,
            2,
            -3,
            0.5,
            1.5,
            2.5,
            -2.5,
            NAN,
            INF,
            -INF,
            info.max,
            info.min,
            info.tiny,
            7.25,
            1,
            2.5,
        ]
        return torch.tensor(some, dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    return torch.tensor(
        [0, 1, 2, 3, 5, 7, 100, info.max, info.min, info.max // 3, 1, 2] + [-1, -2, -5] * dtype.is_signed, dtype=dtype
    )


def _differences(name: str, *args: Any, **kwargs: Any) -> str:
    packet, _, overload = name.removeprefix("aten.").partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload)
    found = differences(name, operator, args, kwargs, operator(*args, **kwargs))
    return f"{name} {args}: {found}"[:400] if found else ""


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_have_the_extremes_of_their_types(dtype: torch.dtype) -> None:
    some = _corners(dtype)
    a, b = some.repeat_interleave(len(some)), some.repeat(len(some))
    whole = (b != 0) & ~((a == torch.iinfo(dtype).min) & (b == -1) & dtype.is_signed)
    divided, divisor = a[whole], b[whole]
    told = [_differences(f"aten.{name}", divided, divisor) for name in ("remainder.Tensor", "fmod.Tensor")]
    modes = ("floor", "trunc")
    told += [_differences("aten.div.Tensor_mode", divided, divisor, rounding_mode=mode) for mode in modes]
    told.append(_differences("aten.pow.Tensor_Tensor", a, b))
    told += [_differences("aten.pow.Tensor_Scalar", some, exponent) for exponent in (0, 1, 2, 3, 7, 65)]
    told += [_differences(f"aten.bitwise_{way}_shift.Tensor", a, b) for way in ("left", "right")]
    told += [_differences(f"aten.__{way}shift__.Scalar", some, count) for way in "lr" for count in (0, 1, 7)]
    told += [_differences(f"aten.{name}.Scalar", some, 3) for name in ("remainder", "fmod")]
    told.append(_differences("aten.sign.default", some))
    assert not [each for each in told if each]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_keep_nan_infinities_and_the_sign_of_zero(dtype: torch.dtype) -> None:
    some = _corners(dtype)
    a, b = some.repeat_interleave(len(some)), some.repeat(len(some))
    a, b = a[b == b], b[b == b]  # the sign of NaN cannot be seen in the runtime
    for name, args in (("aten.copysign.Tensor", (a, b)), ("aten.copysign.Scalar", (a, -0.0))):
        want = getattr(torch, name.split(".")[1])(*args)
        (got,) = compute(name, args, {}, [want])
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)), name
        assert torch.equal(torch.signbit(got) & (got == got), torch.signbit(want) & (want == want)), name
    signs = torch.signbit(some[some == some])
    assert torch.equal(compute("aten.signbit.default", (some[some == some],), {}, [signs])[0], signs)
    unary = ("sign", "erfc", "lgamma", "digamma")
    told = [_differences(f"aten.{name}.default", some[some.abs() < 1e30]) for name in unary]
    told += [_differences(f"aten.{name}.default", torch.tensor([NAN, INF], dtype=dtype)) for name in unary]
    told += [_differences("aten.hypot.default", a, b)]
    assert not [each for each in told if each]


def test_functions_of_floats_are_right_to_the_last_places() -> None:
    x = torch.cat([torch.linspace(-30, 30, 4001), torch.linspace(-1e-3, 1e-3, 101), 10 ** torch.linspace(-30, 30, 241)])
    probabilities = torch.cat([torch.rand(1000), 10 ** torch.linspace(-30, 0, 99), 1 - 10 ** torch.linspace(-7, 0, 99)])
    names = "erfc lgamma digamma i0 special_i0e special_i1 special_i1e special_erfcx special_ndtri erfinv"
    bessel = [f"special_{scaled}modified_bessel_k{order}" for scaled in ("", "scaled_") for order in "01"]
    for name in [*names.split(), *bessel]:
        given = probabilities if name in ("special_ndtri", "erfinv") else x
        exact = getattr(torch.ops.aten, name)(given.double())
        (got,) = compute(f"aten.{name}.default", (given,), {}, [given])
        error = (got.double() - exact).abs() / exact.abs().clamp(min=1e-37)
        assert error[exact.isfinite() & (exact.abs() < 3e38)].max() < 2e-7, name
        assert torch.equal(got.isnan(), exact.isnan())


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_order_is_stable_with_nan_last(dtype: torch.dtype) -> None:
    some = _corners(dtype)
    for shape in ((len(some),), (1,), (), (0,), (3, 0), (2, len(some)), (3, 2, len(some))):
        count = torch.Size(shape).numel()
        x = some.repeat(1 + count // len(some))[:count].reshape(shape)
        for dim, descending in itertools.product(range(-1, max(x.dim() - 1, 0)), (False, True)):
            want = torch.sort(x, stable=True, dim=dim, descending=descending)
            got = compute("aten.sort.stable", (x,), {"stable": True, "dim": dim, "descending": descending}, want)
            assert all(torch.equal(*pair) for pair in zip(got[1:], want[1:], strict=True))
            assert torch.equal(got[0].nan_to_num(7), want[0].nan_to_num(7))
            if x.numel() and x.dim():
                running = [_differences(f"aten.{name}.default", x, dim) for name in ("cummax", "cummin")]
                kth = [_differences("aten.kthvalue.default", x, k, dim) for k in (1, x.shape[dim])]
                middle = [_differences(f"aten.{name}.dim", x, dim) for name in ("median", "nanmedian")]
                assert not [each for each in (*running, *kth, *middle) if each]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_pooling_takes_the_last_nan_and_the_first_of_equal_elements(dtype: torch.dtype) -> None:
    some = torch.tensor([1, 5, 5, -1, 0, 2, 5, 5], dtype=dtype)
    x = some.repeat(2 * 4 * 5 * 6)[: 2 * 4 * 5 * 6].reshape(1, 2, 4, 5, 6).clone()
    if dtype.is_floating_point:
        x[0, 0, 1:3, 2, 2:5], x[0, 1, 0] = NAN, -INF
    told = []
    for kernel, stride, padding, dilation, ceil in ((2, [], 0, 1, False), (3, 2, 1, 1, True), (2, 1, 1, 2, False)):
        rest = ([stride] * 3 if stride else [], [padding] * 3, [dilation] * 3, ceil)
        told.append(_differences("aten.max_pool3d_with_indices.default", x, [kernel] * 3, *rest))
        flat = [each[:2] if isinstance(each, list) else each for each in rest]
        told.append(_differences("aten.max_pool2d_with_indices.default", x[0], [kernel] * 2, *flat))
    if dtype.is_floating_point:
        told.append(_differences("aten.adaptive_max_pool3d.default", x, [3, 4, 5]))
    assert not [each for each in told if each]


@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int32], ids=str)
def test_scattered_reductions(reduce: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    told = []
    for include, dim in itertools.product((True, False), (0, 1, -1)):
        x, src = torch.randint(-9, 9, (4, 5), dtype=dtype), torch.randint(-9, 9, (6, 7), dtype=dtype)
        if dtype.is_floating_point:
            src[0, 0], src[1, 1], x[0, 0] = INF, NAN, -0.0
        index = torch.randint(0, 4, (3, 4))
        told.append(_differences("aten.scatter_reduce.two", x, dim, index, src, reduce, include_self=include))
    assert not [each for each in told if each]


def test_what_would_take_too_much_memory_is_refused() -> None:
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, int(MASK**0.5) + 1)
        for name, args in (("sort", (x,)), ("cummax", (x, 1)), ("histc", (x, MASK))):
            assert compute(f"aten.{name}.default", args, {}, []) is None


@pytest.mark.parametrize("sizes", [(4, 4, 4), (2, 3, 3), (1, 1), (0, 0, 0), (2, 0, 0)], ids=str)
def test_matrices_in_batches_are_no_vectors(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(sizes) + 4 * torch.eye(sizes[-1]), torch.randn(sizes)
    factors, pivots, _ = torch.linalg.lu_factor_ex(a)
    told = [_differences("aten.linalg_inv_ex.default", a), _differences("aten._linalg_det.default", a)]
    for left, adjoint in itertools.product((True, False), (True, False)):
        told.append(_differences("aten.linalg_lu_solve.default", factors, pivots, b, left=left, adjoint=adjoint))
        told.append(_differences("aten._linalg_solve_ex.default", a, b, left=left))
    assert not [each for each in told if each]


class _Model(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def _run(function: Callable[..., Any], *calls: tuple[torch.Tensor, ...], dims: Any = None) -> None:
    """Lower a function for the host, with the first call as the example, and compare each call with eager mode."""
    model = _Model(function)
    program = export(model, calls[0], dynamic_shapes=None if dims is None else {"inputs": dims}, strict=False)
    loaded = exir_lowering.load(exir_lowering.lower(program).emit().buffer)
    for call in calls:
        for got, want in zip(loaded.run("forward", *call), torch.utils._pytree.tree_leaves(model(*call)), strict=True):
            torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_signs_are_copied_and_floats_floored_in_the_runtime(dtype: torch.dtype) -> None:
    some = _corners(dtype)
    some = some[some == some]
    a, b = some.repeat_interleave(len(some)), some.repeat(len(some))
    small = (a.abs() < 1e4) & (b.abs() > 1e-4)  # eager mode's fmod of others is NaN
    _run(lambda a, b: (a // b, torch.signbit(a // b), a // torch.zeros_like(b)), (a[small], b[small]))
    _run(lambda a, b: (copied := torch.copysign(a, b), torch.signbit(copied), torch.copysign(a, -0.0)), (a, b))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8], ids=str)
def test_integers_in_the_runtime(dtype: torch.dtype) -> None:
    some = _corners(dtype)
    a, b = some.repeat_interleave(len(some)), some.repeat(len(some))
    whole = (b != 0) & ~((a == torch.iinfo(dtype).min) & (b == -1) & dtype.is_signed)

    def divide(a: torch.Tensor, b: torch.Tensor) -> Any:
        return a % b, torch.fmod(a, b), a // b, torch.div(a, b, rounding_mode="trunc"), a % -3, 7 % a.clamp(min=1)

    _run(divide, (a[whole], b[whole]))
    _run(lambda a, b: (a**b, a**3, a << b, a >> b, a << 2, a >> 1, torch.floor(a), torch.sign(a)), (a, b))


def test_what_is_checked_before_a_value_is_used_runs_too() -> None:
    def checked(x: torch.Tensor) -> Any:
        torch._assert_async(torch.ops.aten._is_all_true(x > -9), "too small")
        return x * 2, torch.ops.aten._is_all_true(x > 0), torch.ops.aten._is_any_true(x > 0)

    _run(checked, (torch.ones(3),), (torch.tensor([1.0, -1.0, 2.0]),), (-torch.ones(3),))


def test_order_and_windows_of_dynamic_sizes_in_the_runtime() -> None:
    torch.manual_seed(0)
    n = {0: Dim("n", min=2, max=9)}
    rows = [torch.randint(-3, 3, (size, 6)).float() for size in (4, 2, 9)]
    rows[1][0, :2] = NAN
    _run(
        lambda x: (*x.sort(dim=0, stable=True), *x.cummax(0), *x.T.sort(dim=-1, descending=True, stable=True)),
        *[(x,) for x in rows],
        dims=(n,),
    )
    volumes = [(torch.randn(size, 4, 5, 6, 7),) for size in (4, 2, 9)]
    weight, back = torch.randn(6, 2, 2, 3, 2), torch.randn(4, 3, 2, 3, 2)

    def space(x: torch.Tensor) -> Any:
        convolved = F.conv3d(x, weight, stride=(1, 2, 1), padding=1, groups=2, dilation=(2, 1, 1))
        grown = F.conv_transpose3d(x, back, torch.ones(6), stride=2, padding=1, output_padding=1, groups=2)
        pooled = (
            F.max_pool3d(x, 2, padding=1),
            F.avg_pool3d(x, 3, 2, 1, True, False),
            F.adaptive_avg_pool3d(x, (3, 2, 5)),
        )
        return convolved, grown, *pooled, F.pad(x, (-1, 2, 0, -2))

    _run(space, *volumes, dims=(n,))


def test_what_draws_random_numbers_in_training_only_runs_otherwise() -> None:
    _run(lambda x: (F.rrelu(x), F.rrelu(x, 0.1, 0.4)), (torch.randn(3, 4),))
    noisy = export(_Model(lambda x: F.rrelu(x, training=True)), (torch.randn(3, 4),))
    with pytest.raises(exir_lowering.InputError, match="other operators would draw other random numbers"):
        exir_lowering.lower(noisy)


def test_an_embedding_bag_in_the_runtime() -> None:
    torch.manual_seed(0)
    weight = torch.randn(10, 3)
    calls = [(torch.tensor([1, 2, 4, 5, 2, 9]), torch.tensor(offsets)) for offsets in ([0, 2, 2], [0, 0, 5], [0, 6, 6])]
    for mode in ("sum", "mean", "max"):
        _run(lambda index, offsets, m=mode: F.embedding_bag(index, weight, offsets, mode=m, padding_idx=2), *calls)
