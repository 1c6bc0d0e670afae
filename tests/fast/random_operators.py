"""What random programs are made of: functions of a random generator, three operands and the module."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from functorch.experimental.control_flow import map as torch_map
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F


def _names(text: str) -> list[str]:
    return text.split()


LAYERS = _names(
    """
    linear no_bias conv1 conv2 deconv norm1 norm2 layer_norm group_norm instance rms lstm gru rnn cell embedding
    attention encoder dropout dropout2 prelu bilinear
    """
)
Step = Callable[[random.Random, list[Any], nn.Module], Any]

UNARY = _names(
    """
    abs acos add_one ceil cos erf exp exp2 expm1 floor frac log1p neg reciprocal relu round rsqrt sigmoid sign sin
    sqrt square tan tanh trunc logical_not isnan isinf signbit sgn deg2rad lgamma digamma i0 sinc nan_to_num
    positive contiguous clone detach bool int long float half double flatten t mT matrix_exp zeros_like ones_like
    empty_like rand_like cumsum0 logcumsumexp0 softmax1 log_softmax1 argmax argmin amax0 amin1 sum mean0 std var
    prod any all norm max0 min0 median0 mode0 sort topk2 kthvalue unique nonzero cummax0 diagonal tril triu flip0
    roll1 rot90 squeeze unsqueeze0 unbind chunk2 split1 tensor_split2 expand_as_self ravel diag trace logsumexp0
    count_nonzero narrow view_last numpy_T adjoint item_add type_as_self to_channels_last erfinv nansum std_mean
    var_mean aminmax movedim swapaxes unflatten repeat2 tile repeat_interleave unfold as_strided stride_view select0
    index0 diff
    """
)

_SPECIAL: dict[str, Callable[[Any], Any]] = {
    "add_one": lambda x: 1 + x,
    "cumsum0": lambda x: x.cumsum(0),
    "logcumsumexp0": lambda x: x.logcumsumexp(0),
    "softmax1": lambda x: F.softmax(x, -1),
    "log_softmax1": lambda x: F.log_softmax(x, -1, dtype=torch.float32),
    "amax0": lambda x: x.amax(0),
    "amin1": lambda x: x.amin(-1, keepdim=True),
    "mean0": lambda x: x.mean((0, -1), keepdim=True),
    "max0": lambda x: x.max(0),
    "min0": lambda x: x.min(-1)[0],
    "median0": lambda x: x.median(0).values,
    "mode0": lambda x: x.mode(0),
    "topk2": lambda x: x.topk(2),
    "kthvalue": lambda x: x.kthvalue(1),
    "cummax0": lambda x: x.cummax(0),
    "flip0": lambda x: x.flip(0),
    "roll1": lambda x: x.roll(1, 0),
    "unsqueeze0": lambda x: x.unsqueeze(0),
    "chunk2": lambda x: x.chunk(2, -1),
    "split1": lambda x: x.split(1, -1)[:2],
    "tensor_split2": lambda x: x.tensor_split(2, 0),
    "expand_as_self": lambda x: x[..., :1].expand_as(x),
    "logsumexp0": lambda x: x.logsumexp(0),
    "narrow": lambda x: x.narrow(-1, 1, 2),
    "view_last": lambda x: x.view(x.shape[0], -1),
    "numpy_T": lambda x: x.permute(*reversed(range(x.dim()))),
    "item_add": lambda x: x + x.flatten()[0].item(),
    "type_as_self": lambda x: x.type_as(x),
    "to_channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "movedim": lambda x: x.movedim(0, -1),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "unflatten": lambda x: x.unflatten(-1, (2, -1)),
    "repeat2": lambda x: x.repeat(2, *[1] * (x.dim() - 1)),
    "tile": lambda x: x.tile((1, 2)),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2)),
    "stride_view": lambda x: x[::2, ..., 1:],
    "select0": lambda x: x[0] if x.dim() > 1 else x[-1:],
    "index0": lambda x: x[[0, 1, 1]],
    "std": lambda x: x.std(0),
    "var": lambda x: x.var(-1, unbiased=False),
    "to_half": lambda x: x.half(),
}


def unary(r: random.Random, v: list[Any], m: nn.Module) -> Any:
    name = r.choice(UNARY)
    return _SPECIAL[name](v[0]) if name in _SPECIAL else getattr(v[0], name, getattr(torch, name, None))()


BINARY = _names(
    """
    add sub mul div maximum minimum pow remainder fmod atan2 eq ne lt le gt ge logical_and logical_or logical_xor
    bitwise_and bitwise_or bitwise_xor floor_divide matmul copysign hypot xlogy logaddexp heaviside rsub mm bmm mv
    dot outer kron cross fmax fmin true_divide subtract multiply float_power dist inner isclose squared_difference
    """
)


def binary(r: random.Random, v: list[Any], m: nn.Module) -> Any:
    name = r.choice(BINARY[:12] * 2 + BINARY)
    b = r.choice([v[0], v[1], v[1], v[1], 2, 0.5, True, v[1].to(v[0].dtype)])
    if name == "squared_difference":
        return (v[0] - b) ** 2
    return getattr(torch, name)(v[0], b) if r.random() < 0.8 else getattr(torch, name)(b, v[0])


def scalar(r: random.Random, v: list[Any], m: nn.Module) -> Any:
    number = r.choice([0, 1, 2, -3, 0.0, 0.5, 1e-6, 2.5, float("inf"), True])
    x = v[0]
    return r.choice(
        [
            lambda: x + number,
            lambda: number - x,
            lambda: x * number,
            lambda: x / number,
            lambda: number / x,
            lambda: x**number,
            lambda: number**x,
            lambda: x // number,
            lambda: x % number,
            lambda: x > number,
            lambda: torch.add(x, v[1], alpha=number),
            lambda: torch.sub(x, number, alpha=2),
            lambda: torch.rsub(x, number),
            lambda: x.clamp(min=number),
            lambda: x.clamp(number, 3),
            lambda: torch.full_like(x, number),
            lambda: x.masked_fill(x > 0, number),
            lambda: torch.where(x > 0, x, number),
            lambda: torch.where(v[1] > 0, number, x),
            lambda: x == number,
            lambda: torch.div(x, 2, rounding_mode=r.choice(["floor", "trunc", None])),
            lambda: x.new_full((4,), number),
            lambda: torch.clamp(x, v[1], v[2]),
            lambda: torch.lerp(x, v[1], 0.5),
            lambda: F.threshold(x, 0.1, number),
            lambda: torch.addcmul(x, v[1], v[2], value=0.5),
            lambda: torch.addcdiv(x, v[1], v[2], value=2),
            lambda: torch.isclose(x, v[1]),
        ]
    )()


ACTIVATIONS = _names(
    """
    gelu silu relu6 hardswish hardsigmoid hardtanh elu selu celu leaky_relu softplus softsign mish logsigmoid
    tanhshrink softshrink hardshrink glu relu softmin dropout alpha_dropout feature_alpha_dropout normalize
    """
)


def activation(r: random.Random, v: list[Any], m: nn.Module) -> Any:
    name = r.choice(ACTIVATIONS)
    if "dropout" in name:
        return getattr(F, name)(v[0], 0.25, training=r.random() < 0.5)
    inplace = (
        {"inplace": True}
        if name in ("silu", "relu6", "hardswish", "elu", "leaky_relu", "relu") and r.random() < 0.3
        else {}
    )
    x = v[0].clone() if inplace else v[0]
    made = getattr(F, name)(x, **({"approximate": "tanh"} if name == "gelu" and r.random() < 0.5 else inplace))
    return (made, x) if inplace else made


def layer(r: random.Random, v: list[Any], m: nn.Module) -> Any:
    name = r.choice(LAYERS)
    call, x = m.layer(name), v[0].float()
    if name == "embedding":
        return call(v[0].long().abs() % 10)
    if name == "attention":
        return call(x, x, x, need_weights=r.random() < 0.5)[0]
    if name == "bilinear":
        return call(x, v[1].float())
    if name in ("lstm", "gru", "rnn"):
        out, state = call(x)
        return [out, *(state if isinstance(state, tuple) else [state])]
    if name == "cell":
        return call(x, (x, x))
    return call(x)


def function(r: random.Random, v: list[Any], m: nn.Module) -> Any:
    x, y = v[0], v[1]
    return r.choice(
        [
            lambda: F.max_pool2d(x, 2),
            lambda: F.avg_pool2d(x, 2, ceil_mode=True),
            lambda: F.adaptive_avg_pool2d(x, r.choice([1, 2, (1, 3)])),
            lambda: F.adaptive_max_pool2d(x, 2),
            lambda: F.avg_pool1d(x, 2),
            lambda: F.max_pool1d(x, 2),
            lambda: F.lp_pool2d(x, 2, 2),
            lambda: F.interpolate(x, scale_factor=2, mode=r.choice(["nearest", "bilinear"])),
            lambda: F.interpolate(x, size=(3, 5), mode="bicubic"),
            lambda: F.interpolate(x, size=(2, 2), mode="bilinear", align_corners=True),
            lambda: F.pixel_shuffle(x, 2),
            lambda: F.pixel_unshuffle(x, 2),
            lambda: F.pad(x, (1, 1)),
            lambda: F.pad(x, (1, 1), mode=r.choice(["reflect", "replicate", "circular"])),
            lambda: F.pad(x, (-1, 2), value=3.0),
            lambda: F.one_hot(x, 10),
            lambda: F.mse_loss(x, y),
            lambda: F.cross_entropy(x, x.argmax(-1)),
            lambda: F.cosine_similarity(x, y, dim=-1),
            lambda: F.scaled_dot_product_attention(
                x[None, None], x[None, None], y[None, None], is_causal=r.random() < 0.5
            ),
            lambda: F.scaled_dot_product_attention(
                x[None], x[None], x[None], attn_mask=torch.ones(4, 4, dtype=torch.bool).tril()
            ),
            lambda: F.linear(x, m.weight, m.vector),
            lambda: F.linear(x, m.small),
            lambda: F.linear(x, m.kept),
            lambda: F.linear(x, m.tied, None),
            lambda: torch.cat([x, y], r.choice([0, -1])),
            lambda: torch.cat([x, x, y, x], -1),
            lambda: torch.stack([x, y, x], r.choice([0, -1])),
            lambda: torch.hstack([x, y]),
            lambda: torch.einsum("ij,jk->ik", x, y),
            lambda: torch.einsum("...i,...i->...", x, y),
            lambda: torch.baddbmm(x, x, x),
            lambda: torch.addmm(m.vector, x, y, beta=0.5),
            lambda: torch.addmv(m.vector, x, y),
            lambda: torch.tensordot(x, y, dims=1),
            lambda: torch.gather(x, -1, y.long().abs() % 3),
            lambda: x.index_select(0, y.long().abs().flatten() % 2),
            lambda: torch.scatter(x, 0, y.long().abs() % 2, 1.5),
            lambda: x.scatter_add(0, y.long().abs() % 2, x),
            lambda: x.index_add(0, torch.tensor([0, 1]), x[:2]),
            lambda: x[y > 0],
            lambda: x[y.long().abs() % 2],
            lambda: torch.take_along_dim(x, x.argsort(-1), -1),
            lambda: torch.bucketize(x, m.plain.sort()[0]),
            lambda: torch.searchsorted(m.plain, x),
            lambda: torch.meshgrid(m.vector, y, indexing="ij"),
            lambda: torch.cdist(x, y),
            lambda: F.unfold(x, 2),
            lambda: F.fold(F.unfold(x, 2), (4, 4), 2),
            lambda: F.grid_sample(x, x[:, :, :, :2]),
            lambda: F.batch_norm(x, None, None, training=True),
            lambda: F.layer_norm(x, x.shape[-2:]),
            lambda: F.instance_norm(x),
            lambda: F.local_response_norm(x, 2),
            lambda: torch.fft.rfft(x).abs(),
            lambda: torch.bincount(x.long().abs().flatten(), minlength=4),
            lambda: torch.histc(x, 4),
            lambda: torch.linalg.norm(x, dim=-1),
            lambda: torch.linalg.vector_norm(x, 3),
            lambda: torch.linalg.inv(x),
            lambda: torch.broadcast_tensors(x, y),
            lambda: x.expand(3, *x.shape),
            lambda: x.reshape(-1),
            lambda: x.reshape(*reversed(x.shape)),
            lambda: x.view(-1, 2),
            lambda: x.view(torch.int32),
            lambda: x.permute(*r.sample(range(x.dim()), x.dim())),
            lambda: x.permute(*r.sample(range(x.dim()), x.dim())).contiguous().view(-1, 4),
            lambda: x.transpose(0, -1).reshape(x.shape),
            lambda: x.to(
                r.choice([torch.float32, torch.float16, torch.int64, torch.bool, torch.float64, torch.bfloat16])
            ),
            lambda: x.to(y),
            lambda: x.to("cpu"),
            lambda: x.to(torch.float32, copy=True),
            lambda: x.type(torch.float),
            lambda: x.sum(dtype=torch.float64),
            lambda: x.new_zeros(y.shape),
            lambda: torch.complex(x, y).abs(),
            lambda: torch.view_as_real(torch.complex(x, y)),
            lambda: torch.view_as_complex(x.reshape(-1, 2)).conj().real,
            lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8).dequantize(),
            lambda: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
            lambda: torch.vmap(torch.dot)(x, y),
            lambda: torch._foreach_add([x, y], 1),
            lambda: torch.block_diag(x, y),
            lambda: torch.cartesian_prod(m.vector, m.vector),
            lambda: torch.combinations(m.vector),
            lambda: torch.tril_indices(3, 3),
            lambda: torch.trapezoid(x),
            lambda: F.embedding(x.long().abs() % 4, m.weight),
            lambda: F.embedding_bag(x.long().abs() % 4, m.weight, mode="mean"),
            lambda: F.nll_loss(x.log_softmax(-1), x.argmax(-1)),
            lambda: F.conv2d(x, x[:, :, :2, :2]),
            lambda: F.conv1d(x, x[:, :, :1]),
            lambda: F.huber_loss(x, y),
            lambda: F.kl_div(x, y),
            lambda: F.gumbel_softmax(x),
        ]
    )()


def constant(r: random.Random, v: list[Any], m: nn.Module) -> Any:
    x = v[0]
    return r.choice(
        [
            lambda: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
            lambda: x * torch.tensor(2.0),
            lambda: x * torch.tensor(2),
            lambda: torch.arange(4) + x,
            lambda: torch.arange(x.shape[0]),
            lambda: torch.zeros(4, 4) + x,
            lambda: torch.ones(x.shape),
            lambda: torch.full((2, 4), 3),
            lambda: torch.full((), 2.0) * x,
            lambda: torch.eye(4) @ x,
            lambda: torch.linspace(0, 1, 4) * x,
            lambda: torch.rand(4) + x,
            lambda: torch.randn(4, 4),
            lambda: torch.randn_like(x),
            lambda: torch.randint(0, 4, (4,)),
            lambda: torch.empty(2, 4).fill_(1.5),
            lambda: torch.scalar_tensor(2.0) + x,
            lambda: torch.bernoulli(x.sigmoid()),
            lambda: m.plain + x,
            lambda: m.plain,
            lambda: x + m.temporary,
            lambda: m.view_of_kept + x,
            lambda: x + m.vector,
            lambda: m.vector + 1,
            lambda: m.weight * m.tied,
            lambda: m.weight.t(),
            lambda: m.weight[0],
            lambda: m.small + x,
            lambda: m.vector.detach() + x,
            lambda: torch.tensor([[1, 2], [3, 4]]),
            lambda: torch.tensor([], dtype=torch.float32),
            lambda: torch.zeros(0, 4),
            lambda: torch.cat([torch.zeros(0, 4), x]),
            lambda: torch.tensor(3.0).item() * x,
            lambda: torch.zeros(3).new_ones(2),
            lambda: torch.nn.Parameter(m.plain) + x,
            lambda: torch.hann_window(4) * x,
            lambda: x + torch.tensor(1.0, dtype=torch.float64),
            lambda: torch.triu(torch.full((4, 4), float("-inf")), 1) + x,
        ]
    )()


def in_place(r: random.Random, v: list[Any], m: nn.Module) -> Any:
    x, y = v[0], v[1]
    own = x.clone() if r.random() < 0.6 else x
    target = r.choice(
        [
            own,
            own,
            own.view(own.shape),
            own[0:1],
            own[..., 1:],
            own.t() if own.dim() == 2 else own,
            m.kept,
            m.count,
            own.reshape(-1),
            own.flatten()[::2],
            m.kept[0],
            m.kept.t(),
        ]
    )
    r.choice(
        [
            lambda: target.add_(1),
            lambda: target.add_(y),
            lambda: target.mul_(2.0),
            lambda: target.relu_(),
            lambda: target.zero_(),
            lambda: target.fill_(3),
            lambda: target.copy_(y),
            lambda: target.clamp_(min=0),
            lambda: target.sub_(target),
            lambda: target.masked_fill_(target > 0, 0),
            lambda: target.index_fill_(0, torch.tensor([0]), 1.0),
            lambda: target.__setitem__(0, 5),
            lambda: target.__setitem__((..., slice(0, 1)), 2.0),
            lambda: target.__setitem__(target > 0, 1.0),
            lambda: target.div_(3),
            lambda: target.transpose_(0, 1),
            lambda: target.unsqueeze_(0),
            lambda: target.squeeze_(),
            lambda: target.sigmoid_(),
            lambda: target.index_copy_(0, torch.tensor([0]), target[:1]),
            lambda: target.scatter_(0, torch.zeros_like(target, dtype=torch.int64), 1.0),
            lambda: target.normal_(),
            lambda: target.uniform_(),
            lambda: target.bernoulli_(),
            lambda: target.cumsum_(0),
            lambda: target.swapaxes_(0, 1),
            lambda: target.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
            lambda: target.set_(y),
            lambda: target.resize_(2),
            lambda: target.lerp_(target, 0.5),
            lambda: target.logical_not_(),
            lambda: torch.add(y, 1, out=target),
            lambda: m.count.add_(1),
            lambda: target.addcmul_(target, target),
            lambda: target.exp_(),
        ]
    )()
    return [own, target] if r.random() < 0.5 else [own + 1]


def nested(r: random.Random, v: list[Any], m: nn.Module) -> Any:
    x, y = v[0], v[1]
    return r.choice(
        [
            lambda: torch.cond(x.sum() > 0, lambda a: a.sin() + 1, lambda a: a.cos(), (x,)),
            lambda: torch.cond(x.sum() > 0, lambda a, b: F.linear(a, m.weight) + b, lambda a, b: a * b, (x, y)),
            lambda: torch_map(lambda a, b: a + b * 2, x, y),
            lambda: torch_map(lambda a: F.softmax(a, -1), x),
            lambda: scan(lambda c, a: (c + a, c * a), torch.zeros_like(x[0]), x),
            lambda: while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * 2), (torch.tensor(0), x)),
            lambda: while_loop(
                lambda i, a: (i < 3) & (a.sum() < 10), lambda i, a: (i + 1, F.relu(a) + m.vector), (torch.tensor(0), x)
            ),
            lambda: associative_scan(torch.add, x, 0),
            lambda: _no_grad(x),
            lambda: _autocast(x, y),
            lambda: torch.utils.checkpoint.checkpoint(lambda a: a.sin() * 2, x, use_reentrant=False),
            lambda: _enable_grad(x, m),
            lambda: torch.cond(
                torch.tensor(True),
                lambda a: torch.cond(a.mean() > 0, lambda b: b + 1, lambda b: b - 1, (a,)),
                lambda a: a.clone(),
                (x,),
            ),
            lambda: _no_grad(x),
            lambda: torch.func.functional_call(m.layer("linear"), {"weight": m.weight * 2}, (x,)),
            lambda: torch.vmap(lambda a: a.sin() + 1)(x),
        ]
    )()


def _no_grad(x: Any) -> Any:
    with torch.no_grad():
        y = x * 2 + 1
    return y + x


def _enable_grad(x: Any, m: nn.Module) -> Any:
    with torch.enable_grad():
        return F.linear(x, m.weight)


def _autocast(x: Any, y: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ y + 1


def sizes(r: random.Random, v: list[Any], m: nn.Module) -> Any:
    """Use sizes as values: they are symbols where an axis is dynamic."""
    x, y = v[0], v[1]
    return r.choice(
        [
            lambda: x * x.shape[0],
            lambda: x.view(x.shape[0], -1),
            lambda: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]),
            lambda: torch.arange(x.shape[0]) + 1,
            lambda: x[: x.shape[0] // 2],
            lambda: x[:, : x.shape[0] - 1],
            lambda: x.new_zeros(x.shape[0], 2),
            lambda: torch.full((x.shape[0],), x.shape[-1]),
            lambda: x / x.shape[-1] ** 0.5,
            lambda: x.expand(2, *x.shape),
            lambda: torch.cat([x, x[:1]]),
            lambda: F.pad(x, (0, x.shape[0])),
            lambda: x.sum() / x.numel(),
            lambda: x.repeat(x.shape[0], *[1] * (x.dim() - 1)),
            lambda: x.split(x.shape[0] // 2),
            lambda: torch.ones(x.shape[0], x.shape[0]).tril(),
            lambda: x.mean(0) * float(x.shape[0]),
            lambda: torch.tensor(x.shape[0]) + x,
            lambda: x.unsqueeze(1).expand(-1, 3, *[-1] * (x.dim() - 1)),
            lambda: x[-1:],
            lambda: x.narrow(0, 0, x.shape[0] - 1),
            lambda: torch.zeros(x.shape[0] + y.shape[0]),
            lambda: x.flatten(0, 1),
            lambda: F.interpolate(x, size=(x.shape[-1] * 2, 4)),
            lambda: x.unflatten(0, (-1, 1)),
        ]
    )()


ALL: list[Step] = [
    *[unary] * 7,
    *[binary] * 5,
    *[scalar] * 4,
    *[activation] * 3,
    *[layer] * 3,
    *[function] * 8,
    *[constant] * 3,
    *[in_place] * 3,
    *[nested],
    *[sizes] * 2,
]
