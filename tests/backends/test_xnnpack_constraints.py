"""What `xnnpack` leaves on the host: ExecuTorch's preprocess fails on it, or XNNPACK would compute other numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
from torch.export import Dim, ExportedProgram, export
from torch.nn import functional
from torch.nn.functional import conv1d, conv2d, linear
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import exir_lowering
from exir_lowering import LoweredMethods
from exir_lowering.backends.xnnpack import xnnpack

IMAGE = torch.linspace(-3, 3, 4 * 8 * 8).sin().mul(4).view(1, 4, 8, 8)
MATRIX = torch.linspace(-2, 2, 48).cos().view(8, 6)
LAST = {"memory_format": torch.channels_last}


class Model(torch.nn.Module):
    """A function of its inputs and of weights."""

    def __init__(self, function: Callable[..., Any], weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.function, self.count = function, len(weights)
        for position, weight in enumerate(weights):
            self.register_buffer(f"weight{position}", weight)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs, *(getattr(self, f"weight{position}") for position in range(self.count)))


def w(*shape: int) -> torch.Tensor:
    """Return a weight, whose elements all differ."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).add(1).sin().view(shape)


def run(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> LoweredMethods:
    """Lower a function for XNNPACK, and compare what it computes with eager PyTorch."""
    model = Model(function, weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lowered = exir_lowering.lower(export(model, tuple(inputs)), "xnnpack")
    (got,) = exir_lowering.load(lowered.emit().buffer).run("forward", *inputs)
    torch.testing.assert_close(got, model(*inputs), atol=1e-4, rtol=1e-4)
    return lowered


def reasons(lowered: LoweredMethods) -> str:
    return lowered.report.to_text(width=10_000, everything=True)


def conv(x: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(x, w(4, 4, 1, 1))


Case = tuple[Callable[..., Any], Sequence[torch.Tensor], Sequence[torch.Tensor]]


def together(cases: Sequence[Any], rewrites: str = "safe") -> tuple[LoweredMethods, exir_lowering.LoadedProgram]:
    """Lower a method for each case, in one file: that takes little longer than for one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        programs = {f"m{n}": export(Model(case[0], case[2]), tuple(case[1])) for n, case in enumerate(cases)}
        options = exir_lowering.LoweringOptions(rewrites=rewrites)
        lowered = exir_lowering.lower(programs, "xnnpack", options=options)
    return lowered, exir_lowering.load(lowered.emit().buffer)


LEFT: Sequence[tuple[Any, ...]] = [
    (lambda a, b, m: torch.addmm(b, a, m, beta=2, alpha=0.5), [MATRIX], [w(3), w(6, 3)], "addmm", "alpha and beta"),
    (lambda a, b, m: torch.addmm(b, a, m, beta=0), [MATRIX], [w(3), w(6, 3)], "addmm", "alpha and beta"),
    (lambda a, b, m: torch.addmm(b, a, m), [MATRIX], [w(8, 3), w(6, 3)], "addmm", "one element for each output"),
    (lambda a, b, m: torch.addmm(b, a, m), [MATRIX], [w(8, 1), w(6, 3)], "addmm", "one element for each output"),
    (lambda a, b, m: torch.addmm(b, a, m), [MATRIX], [w(), w(6, 3)], "addmm", "one element for each output"),
    (lambda a, m, b: functional.linear(a, m, b), [MATRIX], [w(3, 6), w(8, 3)], "linear", "for each output"),
    (lambda a, m: functional.linear(a, m), [MATRIX], [w(6)], "linear", "two dimensions"),
    (lambda a: functional.max_pool2d(a, 3), [IMAGE[0]], [], "max_pool2d", "four dimensions"),
    (lambda a: functional.avg_pool2d(a, 2), [IMAGE[0]], [], "avg_pool2d", "four dimensions"),
    (lambda a, p: functional.prelu(a, p), [MATRIX], [w(6)], "prelu", "four dimensions"),
    (lambda a: a.max(-1)[0], [IMAGE], [], "max", "`keepdim`"),
    (lambda a: a.max(1, keepdim=True)[0], [IMAGE], [], "max", "`dim` 2 or 3"),
    (
        lambda a: functional.interpolate(a, scale_factor=1.7, mode="bilinear", recompute_scale_factor=False),
        *([IMAGE[..., :6]], [], "upsample_bilinear2d", "scale factors"),
    ),
    (
        lambda a, m: functional.conv2d(a, m),
        [IMAGE],
        [w(4, 4, 3, 3).contiguous(**LAST)],
        "convolution",
        "channels-last",
    ),
    (
        lambda a, m, mean, var: functional.batch_norm(functional.conv_transpose2d(a, m, groups=2), mean, var),
        *([IMAGE], [w(4, 4, 3, 3), w(8), w(8).abs()], "_native_batch_norm_legit_no_training", "in groups"),
    ),
    (lambda a, b: a * b, [w(1, 2, 1, 3, 1, 2, 2), w(4, 1, 5, 1, 2)], [], "mul", "at most 6 dimensions"),
    (lambda a: (a + 1)[:, -10:2], [MATRIX], [], "slice_copy", "before the first element"),
    (lambda a: conv(a).softmax(-1), [IMAGE], [], "_softmax", "channels-last order after aten_convolution"),
    (lambda a: (conv(a).relu() + 1).softmax(-1), [IMAGE], [], "_softmax", "channels-last order"),
    (lambda a: functional.max_pool2d(a, 2).softmax(-1), [IMAGE], [], "_softmax", "channels-last order"),
    (
        lambda a, mean, var: functional.batch_norm(a, mean, var).relu().softmax(-1),
        *([IMAGE], [w(4), w(4).abs()], "_softmax", "channels-last order after aten__native_batch_norm"),
    ),
    (lambda a: a.softmax(-1), [IMAGE.contiguous(**LAST)], [], "_softmax", "channels-last order"),
    (lambda a: a.max(3, keepdim=True)[0], [IMAGE.contiguous(**LAST)], [], "max", "input in channels-last order"),
]


@pytest.fixture(scope="module")
def left() -> Any:
    return together(LEFT, "none")


@pytest.mark.parametrize("number", range(len(LEFT)))
def test_left_on_the_host(number: int, left: Any) -> None:
    """It is computed as in eager PyTorch, and the report says why it was left."""
    function, inputs, weights, operator, words = LEFT[number]
    lowered, loaded = left
    (got,) = loaded.run(f"m{number}", *inputs)
    torch.testing.assert_close(got, Model(function, weights)(*inputs), atol=1e-4, rtol=1e-4)
    host = lowered.report.methods[number].host
    if operator not in ("linear", "max_pool2d", "prelu"):  # the conversion decomposes these when no backend takes them
        assert operator in {node.operator.removeprefix("aten.").partition(".")[0] for node in host}
        assert any(words in node.reason for node in host)


WHOLE: Sequence[Case] = [
    (lambda a, b, m: torch.addmm(b, a, m), [MATRIX], [w(3), w(6, 3)]),
    (lambda a, b, m: torch.addmm(b, a, m), [MATRIX], [w(1, 3), w(6, 3)]),
    (lambda a, m, b: functional.linear(a, m, b), [MATRIX], [w(3, 6), w(1, 3)]),
    (lambda a: a.max(3, keepdim=True)[0] + a.max(2, keepdim=True)[0], [IMAGE], []),
    (lambda a: a.relu().max(3, keepdim=True)[0], [IMAGE.contiguous(**LAST)], []),
    (lambda a, p: functional.prelu(a, p), [IMAGE], [w(4)]),
    (lambda a: functional.interpolate(a, scale_factor=1.5, mode="bilinear"), [IMAGE], []),
    (lambda a: functional.interpolate(a, scale_factor=1.7, mode="bilinear", align_corners=True), [IMAGE], []),
    (lambda a: functional.interpolate(a, size=(13, 5), mode="bilinear"), [IMAGE], []),
    (lambda a: conv(a).reshape(1, 8, 4, 8).softmax(-1), [IMAGE], []),
    (lambda a: (a + 1).softmax(-1), [IMAGE], []),
    (lambda a: (a + 1)[:, -4:4], [MATRIX], []),
    (lambda q, k: (q @ k.transpose(2, 3)).softmax(-1) @ k, [IMAGE, IMAGE + 1], []),
]


@pytest.fixture(scope="module")
def whole() -> Any:
    return together(WHOLE)


@pytest.mark.parametrize("number", range(len(WHOLE)))
def test_delegated_whole(number: int, whole: Any) -> None:
    """The siblings that XNNPACK computes right are not left on the host."""
    function, inputs, weights = WHOLE[number]
    lowered, loaded = whole
    (got,) = loaded.run(f"m{number}", *inputs)
    torch.testing.assert_close(got, Model(function, weights)(*inputs), atol=1e-4, rtol=1e-4)
    assert not lowered.report.methods[number].host and lowered.report.methods[number].partitions


def test_a_model_in_channels_last() -> None:
    """ExecuTorch's preprocess fails on its weights; its convolutions stay on the host, with what to do."""
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3)).eval().to(**LAST)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lowered = exir_lowering.lower(export(model, (IMAGE,)), "xnnpack")
    (got,) = exir_lowering.load(lowered.emit().buffer).run("forward", IMAGE)
    torch.testing.assert_close(got, model(IMAGE), atol=1e-4, rtol=1e-4)
    assert "model.to(memory_format=torch.contiguous_format)" in reasons(lowered)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda a: functional.conv1d(a, w(4, 3, 3)), {0: Dim("batch", min=2, max=32), 2: Dim("length", min=8, max=32)}),
        (
            lambda a: functional.batch_norm(a, w(3), w(3).abs()),
            {0: Dim("batch", min=2, max=32), 2: Dim("length", min=8, max=32)},
        ),
        (lambda a: (a + 1).unsqueeze(-1) * 2, {0: Dim("batch", min=2, max=32), 1: Dim("length", min=2, max=32)}),
        (lambda a: functional.conv1d(a, w(4, 3, 3)), {2: Dim("length", min=8, max=32)}),
    ],
)
def test_dynamic_dimensions(function: Callable[..., Any], shapes: dict[int, Any]) -> None:
    model = Model(function, [])
    given = export(model, (torch.ones(4, 3, 16),), dynamic_shapes=((shapes,),))
    program = exir_lowering.load(exir_lowering.lower(given, "xnnpack").emit().buffer)
    for size in (9, 12):  # torch exports a convolution for fewer than 16 examples, or for more
        x = w(*(size if dim in shapes else fixed for dim, fixed in enumerate((4, 3, 16))))
        torch.testing.assert_close(program.run("forward", x)[0], model(x), atol=1e-4, rtol=1e-4)


class Quantised(torch.nn.Module):
    def __init__(self, function: Callable[..., Any], **order: Any) -> None:
        super().__init__()
        self.conv, self.function = torch.nn.Conv2d(4, 4, 1).to(**order), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self.conv)


def test_activations_in_a_row() -> None:
    """Each of them is computed: ExecuTorch fuses them with the operator before, one over the other."""

    def chains(a: torch.Tensor, m: torch.Tensor) -> Sequence[torch.Tensor]:
        first, wide = functional.relu(a * 2), functional.hardtanh(a - 1, -4, 2)
        return (
            functional.relu(functional.relu6(conv2d(a, m))),
            functional.hardtanh(functional.relu(a + 1), -0.5, 0.7),
            functional.hardtanh(functional.relu(functional.relu6(a * 3)), -1, 4),
            torch.ops.aten.hardtanh(wide),
            functional.relu(wide).relu(),
            functional.relu(functional.hardtanh(a * 3, -1, -0.5)) + a,
            functional.relu(first),
            first,
        )

    model = Model(chains, [w(4, 4, 1, 1)])
    lowered = exir_lowering.lower(export(model, (IMAGE,)), "xnnpack")
    assert not lowered.report.methods[0].host
    torch.testing.assert_close(
        exir_lowering.load(lowered.emit().buffer).run("forward", IMAGE), chains(IMAGE, w(4, 4, 1, 1))
    )


@pytest.mark.parametrize("order", [{}, LAST], ids=["contiguous", "channels last"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, conv: (conv(x), x.softmax(-1)),
        lambda x, conv: (conv(x.relu()), x.sigmoid()),
        lambda x, conv: conv(x.relu()) + x.relu(),
        lambda x, conv: (lambda y: (conv(y), y.sigmoid()))(x * 1.5),
        lambda x, conv: (lambda y: conv(y) + y)(x.relu()),
        lambda x, conv: (lambda y: conv(y) + conv(y + 1))(x.relu()),
        lambda x, conv: conv(x.softmax(-1)) + 1,
        lambda x, conv: conv(conv(x) * w(4, 1, 1).abs()) + 1,
        lambda x, conv: conv(functional.pad(x, [1, 0, 2, 1])) + 1,
        lambda x, conv: conv(x.reshape(1, 4, 4, 16).relu()) + 1,
        lambda x, conv: conv(torch.minimum(w(4, 1, 1), x)) + 1,
    ],
)
def test_convolutions_quantised_dynamically(function: Callable[..., Any], order: dict[str, Any]) -> None:
    """What reads the input of one, too, has it in its own order."""
    torch.manual_seed(0)
    given = quantise(Quantised(function, **order), IMAGE, dynamic=True)
    lowered = exir_lowering.lower(given, "xnnpack")
    expected = given.module()(IMAGE)
    got = exir_lowering.load(lowered.emit().buffer).run("forward", IMAGE)
    torch.testing.assert_close(
        tuple(got), expected if isinstance(expected, tuple) else (expected,), atol=0.05, rtol=0.05
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x, conv: conv(conv(x * 2).relu()),
        lambda x, conv: conv(functional.pad(conv(x), [1, 0, 2, 1])[..., 1:].transpose(2, 3)),
        lambda x, conv: conv(functional.max_pool2d(x, 2).sigmoid()),
        lambda x, conv: (lambda y: conv(y.relu()) + y)(conv(x)),
        lambda x, conv: linear(conv(x).relu(), conv.weight.view(2, 8)),
        lambda x, conv: linear(
            linear(functional.max_pool2d(x, 3, 1, 1), conv.weight.view(2, 8)), conv.weight.view(8, 2)
        ),
        lambda x, conv: linear(conv(x).permute(0, 2, 3, 1), conv.weight.view(4, 4)),
    ],
)
def test_convolutions_after_others(function: Callable[..., Any]) -> None:
    """What is in channels-last order already needs no other one, so these are delegated."""
    given = quantise(Quantised(function), IMAGE, dynamic=True)
    lowered = exir_lowering.lower(given, "xnnpack")
    assert not lowered.report.methods[0].host
    (got,) = exir_lowering.load(lowered.emit().buffer).run("forward", IMAGE)
    torch.testing.assert_close(got, given.module()(IMAGE), atol=0.1, rtol=0.05)


def test_one_quantised_input_of_two_kinds_of_layers() -> None:
    """Neither is delegated: what a partition returned as the dequantised input was never written."""

    class Both(Quantised):
        def forward(self, x: torch.Tensor) -> Any:
            return self.conv(x), functional.linear(x, self.conv.weight.view(2, 8))

    given = quantise(Both(None), IMAGE, dynamic=True)
    got = exir_lowering.load(exir_lowering.lower(given, "xnnpack").emit().buffer).run("forward", IMAGE)
    torch.testing.assert_close(tuple(got), given.module()(IMAGE), atol=0.05, rtol=0.05)


def quantise(model: torch.nn.Module, *inputs: torch.Tensor, dynamic: bool) -> ExportedProgram:
    config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=dynamic)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare_pt2e(export(model.eval(), inputs).module(), XNNPACKQuantizer().set_global(config))
        prepared(*inputs)
        return export(convert_pt2e(prepared), inputs)


@pytest.mark.parametrize("function", [torch.mul, torch.add, lambda a, b: (b + a).relu()])
def test_a_quantised_operand_without_dimensions(function: Callable[..., Any]) -> None:
    inputs = (MATRIX, torch.tensor(0.5))
    given = quantise(Model(function, []), *inputs, dynamic=False)
    assert "quantize_per_tensor" in str(given.graph)
    lowered = exir_lowering.lower(given, "xnnpack")
    assert lowered.report.methods[0].partitions and "without dimensions that is quantised" in reasons(lowered)
    (got,) = exir_lowering.load(lowered.emit().buffer).run("forward", *inputs)
    torch.testing.assert_close(got, given.module()(*inputs), atol=0.02, rtol=0)
    whole = exir_lowering.lower(quantise(Model(function, []), MATRIX, inputs[1].view(1), dynamic=False), "xnnpack")
    assert not whole.report.methods[0].host


@pytest.mark.parametrize(
    "function",
    [
        lambda y, p: (functional.prelu(y, p), y.softmax(-1)),
        lambda y, p: (y.softmax(-1), functional.prelu(y, p)),
        lambda y, p: (functional.prelu(y, p), y @ w(8, 8)),
        lambda y, p: (functional.prelu(y, p), y.exp(), y),
    ],
)
def test_a_quantised_value_of_two_orders(function: Callable[..., Any]) -> None:
    """An operator over channels has it in another order than the others."""
    given = quantise(Model(lambda a, p: function(a + 1, p), [w(4).abs()]), IMAGE, dynamic=False)
    got = exir_lowering.load(exir_lowering.lower(given, "xnnpack").emit().buffer).run("forward", IMAGE)
    torch.testing.assert_close(tuple(got), given.module()(IMAGE), atol=0.05, rtol=0.02)


class Twice(torch.nn.Module):
    """A layer that is called twice, with inputs of different scales."""

    def __init__(self, layer: torch.nn.Module, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.between = layer, between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.between(self.layer(x)))


class Tied(torch.nn.Module):
    """Two layers with one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.second.bias = self.first.bias

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x) * 3) + self.first.bias


ROW = IMAGE.view(1, 4, 64)


@pytest.mark.parametrize(
    ("make", "x", "whole"),
    [
        (lambda: Twice(torch.nn.Linear(6, 6), lambda y: y * 3), MATRIX, True),
        (lambda: Twice(torch.nn.Linear(6, 6), torch.relu), MATRIX, True),
        (lambda: Twice(torch.nn.Conv2d(4, 4, 3, padding=1), lambda y: y * 3), IMAGE, True),
        (lambda: Twice(torch.nn.Conv2d(4, 4, 3, padding=1), torch.relu), IMAGE, True),
        (lambda: Twice(torch.nn.Conv1d(4, 4, 3, padding=1), lambda y: y * 3), ROW, False),
        (lambda: Twice(torch.nn.Conv1d(4, 4, 3, padding=1), torch.relu), ROW, False),
        (Tied, MATRIX, True),
    ],
)
def test_each_layer_has_a_bias_rounded_for_it(make: Any, x: torch.Tensor, whole: bool) -> None:
    torch.manual_seed(0)
    program = quantise(make(), x, dynamic=False)
    lowered = exir_lowering.lower(program, "xnnpack")
    assert whole == (not lowered.report.methods[0].host)
    (got,) = exir_lowering.load(lowered.emit().buffer).run("forward", x)
    torch.testing.assert_close(got, program.module()(x), atol=0.02, rtol=0)


@pytest.mark.parametrize("first", [False, True])
def test_a_quantised_result_is_read_inside_too(first: bool) -> None:
    class Returned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.conv(x)
            return (y.abs(), y)[:: -1 if first else 1]

    program = quantise(Returned(), IMAGE, dynamic=False)
    lowered = exir_lowering.lower(program, "xnnpack")
    assert not lowered.report.methods[0].host
    got = exir_lowering.load(lowered.emit().buffer).run("forward", IMAGE)
    torch.testing.assert_close(tuple(got), program.module()(IMAGE), atol=0.03, rtol=0)


@pytest.mark.parametrize(("after", "host"), [(torch.tanh, True), (torch.nn.Conv2d(4, 4, 3), False)])
def test_zeros_around_a_quantised_value(after: Callable[[torch.Tensor], torch.Tensor], host: bool) -> None:
    class Padded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.after = torch.nn.Conv2d(4, 4, 3), after

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(functional.pad(self.conv(x), (1, 1, 1, 1)))

    program = quantise(Padded(), IMAGE, dynamic=False)
    lowered = exir_lowering.lower(program, "xnnpack")
    assert ("would quantise what" in reasons(lowered)) == host
    (got,) = exir_lowering.load(lowered.emit().buffer).run("forward", IMAGE)
    torch.testing.assert_close(got, program.module()(IMAGE), atol=0.03, rtol=0)


def normalise(number: int, x: torch.Tensor, gamma: torch.Tensor | None = None) -> torch.Tensor:
    mean, scale = (torch.arange(x.shape[1]) + number + each for each in (0.0, 1.5))
    return functional.batch_norm(x, mean, scale, scale if gamma is None else gamma, mean)


def plain(x: torch.Tensor) -> torch.Tensor:
    return functional.batch_norm(x, *(torch.arange(x.shape[1]) + each for each in (0.5, 1.5)))


@pytest.mark.parametrize(
    ("function", "x", "weights"),
    [
        # A layer with a normalization of its own for each call, as detectors have one for each size.
        (lambda x, a: normalise(2, conv2d(normalise(1, conv2d(x, a)), a)), IMAGE, [w(4, 4, 3, 3)]),
        (lambda x, a, b: normalise(2, linear(normalise(1, linear(x, a, b)), a, b)), MATRIX, [w(6, 6), w(6)]),
        (lambda x, g: normalise(2, normalise(1, x.relu(), g).relu(), g), IMAGE, [w(4)]),
        # Normalizations without factors, which are given some.
        (lambda x, a, c: plain(conv2d(plain(conv2d(x, a)).relu(), c)), IMAGE, [w(4, 4, 3, 3), w(6, 4, 3, 3)]),
        (lambda x, a, b: plain(linear(plain(linear(x, a, b)).relu(), a, b)), MATRIX, [w(6, 6), w(6)]),
        (lambda x: plain(plain(x.relu()).relu()), IMAGE, []),
        # The weight of a convolution over one dimension becomes one over two.
        (lambda x, a, b: conv1d(conv1d(x, a, b).relu(), a, b), ROW, [w(4, 4, 3), w(4)]),
        (lambda x, a: normalise(2, conv1d(normalise(1, conv1d(x, a)), a)), ROW, [w(4, 4, 3)]),
        # One weight in different orders.
        (lambda x, a: functional.conv_transpose2d(conv2d(x, a), a, padding=1), IMAGE, [w(4, 4, 3, 3)]),
        (lambda x, a: functional.conv_transpose2d(conv2d(x, a, groups=4), a, groups=4), IMAGE, [w(4, 1, 3, 3)]),
        (lambda x, a: conv2d(x, a)[:, :, :3, :3] + a, IMAGE, [w(4, 4, 3, 3)]),
    ],
)
def test_layers_share_weights(function: Callable[..., Any], x: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    """ExecuTorch's preprocess has each weight once: as the first layer needs it, or the last one."""
    assert not run(function, [x], weights).report.methods[0].host


def test_names_that_become_one() -> None:
    """ExecuTorch's preprocess names a folded weight after the weight, with underscores instead of dots."""

    class Names(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Conv2d(4, 4, 1)])
            self.layers_0 = torch.nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return normalise(2, self.layers_0(normalise(1, self.layers[0](x))))

    model = Names()
    lowered = exir_lowering.lower(export(model, (IMAGE,)), "xnnpack")
    assert not lowered.report.methods[0].host
    (got,) = exir_lowering.load(lowered.emit().buffer).run("forward", IMAGE)
    torch.testing.assert_close(got, model(IMAGE), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("channels", [4, 6])
def test_a_normalization_over_another_dimension_than_a_linear_layer(channels: int) -> None:
    lowered = run(lambda x, a: normalise(1, linear(x, a)), [w(2, channels, 6)], [w(6, 6)])
    assert "along the last dimension" in reasons(lowered)


def test_a_normalization_of_what_is_made_of_a_linear_layer() -> None:
    def function(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return normalise(1, normalise(1, linear(x, a) + x).view(2, 4, 3, 2) * 1).relu()

    assert not run(function, [w(2, 4, 6)], [w(6, 6)]).report.methods[0].host


def test_a_reshaped_linear_layer_is_normalised() -> None:
    """As in a generator of images."""
    assert (
        not run(lambda x, a: normalise(1, linear(x, a).view(8, 6, 2, 2)), [MATRIX], [w(24, 6)]).report.methods[0].host
    )


def test_a_normalization_of_rows_beside_quantisation() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        steps, scale = torch.ops.quantized_decomposed, (0.04, 0, -128, 127, torch.int8)
        return normalise(1, steps.dequantize_per_tensor(steps.quantize_per_tensor(x, *scale), *scale))

    assert "beside quantisation" in reasons(run(function, [ROW], []))


def test_a_normalization_right_after_another_one() -> None:
    assert "right after another one" in reasons(run(lambda x: normalise(2, normalise(1, x)), [IMAGE], []))


@pytest.mark.parametrize("strict", [False, True])
def test_a_linear_layer_that_is_a_batched_product(strict: bool) -> None:
    """Beside a partitioner that takes no linear layers, those of an expanded input are decomposed to such products."""

    class Expanded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.unsqueeze(1).expand(-1, 4, 6)) @ torch.ones(8, 3, 3)

    model = Expanded()
    lowered = exir_lowering.lower(export(model, (MATRIX,), strict=strict), ["xnnpack", "reference"])
    (got,) = exir_lowering.load(lowered.emit().buffer).run("forward", MATRIX)
    torch.testing.assert_close(got, model(MATRIX), atol=1e-5, rtol=1e-4)
    assert {one.backend_id for one in lowered.report.methods[0].partitions} == {"XnnpackBackend", "reference"}


def test_what_is_not_in_its_partition_does_not_matter_to_a_softmax() -> None:
    """After a convolution or a maximum on the host, or each in a partition of its own, XNNPACK computes it right."""
    for function, options in (
        (lambda a: conv(a).softmax(-1), {"operators": ["aten._softmax"]}),
        (lambda a: conv(a).softmax(-1), {"per_op_mode": True}),
        (lambda a: (a + a.max(1, keepdim=True)[0]).softmax(-1), {}),
    ):
        model = Model(function, [])
        lowered = exir_lowering.lower(export(model, (IMAGE,)), xnnpack(**options))
        (got,) = exir_lowering.load(lowered.emit().buffer).run("forward", IMAGE)
        torch.testing.assert_close(got, model(IMAGE), atol=1e-4, rtol=1e-4)
        assert "_softmax" not in {node.operator.split(".")[1] for node in lowered.report.methods[0].host}


@pytest.mark.parametrize("fast", [True, False])
def test_what_a_branch_computes(fast: bool) -> None:
    """Linear layers in a branch are decomposed: ExecuTorch's partitioner takes those of the outermost graph only."""

    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (torch.nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return torch.cond(x.sum() > 0, self.second, lambda y: functional.hardswish(self.third(y)), (y,))

    model = Branches()
    options = exir_lowering.LoweringOptions(fast=fast)
    lowered = exir_lowering.lower(export(model, (MATRIX,)), "xnnpack", options=options)
    program = exir_lowering.load(lowered.emit().buffer)
    for x in (MATRIX, MATRIX - 9):
        torch.testing.assert_close(program.run("forward", x)[0], model(x), atol=1e-5, rtol=1e-4)
    assert len(lowered.report.methods[0].partitions) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (lambda y: (y.clone().cumsum(0), y.cumsum(1)))(x + 1),
        lambda x: (lambda y: (y, y.clone().clone()))(x + 1),
        lambda x: (lambda y: (y.clone() * 2, y.clone().cumsum(0), y - 1))(x * 3),
        lambda x: (lambda c: (lambda d: (d, c, d.clone(), c * 2))(c.clone()))(x.clone()),
        lambda x: (lambda y, copy: ((copy * copy).cumsum(0) * copy, y - x))(*(lambda y: (y, y.clone()))(x + x)),
    ],
)
def test_copies_of_what_is_read_elsewhere(function: Callable[..., Any]) -> None:
    """ExecuTorch's preprocess removes copies, and then refuses a value that leaves the partition twice."""
    model = Model(function, [])
    options = exir_lowering.LoweringOptions(rewrites="none")
    lowered = exir_lowering.lower(export(model, (MATRIX,)), "xnnpack", options=options)
    assert lowered.report.methods[0].partitions
    got = exir_lowering.load(lowered.emit().buffer).run("forward", MATRIX)
    torch.testing.assert_close(tuple(got), model(MATRIX), atol=1e-5, rtol=1e-5)
