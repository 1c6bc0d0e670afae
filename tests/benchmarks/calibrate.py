"""Measure the figures of the default cost model, or compare predictions with latencies: `calibrate.py [--models]`.

Without arguments it prints, for each operator, the nanoseconds per unit of work of ExecuTorch's host kernel and, where
XNNPACK takes it, of a delegate that has nothing else; `exir_lowering/plugins/costs.py` has the figures. A
delegate of several operators fuses some, and its caches are in another state, so the figures of delegates are then
changed until predictions meet the latency of models. With `--models` it prints predicted and measured latency of the
models of `lowering_models.py`, and the same for their host operators and delegates.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lowering_models import MODELS, export_model
from torch.export import export

import exir_lowering
from exir_lowering import graphs
from exir_lowering.plugins.costs import count_work

aten = torch.ops.aten
_SIDES = (32, 512)
"""Each operator runs on a square of each side; the slope between the two is its cost per unit of work."""

_REPEAT = 15


def _square(side: int) -> torch.Tensor:
    return torch.rand(side, side) + 0.5


def _image(side: int) -> torch.Tensor:
    return torch.rand(1, 16, side // 4, side // 4)


def _whole(side: int) -> torch.Tensor:
    return torch.randint(0, side, (side, side))


def _flag(side: int) -> torch.Tensor:
    return _square(side) > 1


_UNARY = (
    "abs", "ceil", "cos", "erf", "exp", "floor", "gelu", "hardtanh", "leaky_relu", "log", "neg", "reciprocal",
    "relu", "round", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "tanh",
)  # fmt: skip
_BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "pow", "eq", "ne", "ge", "gt", "le", "lt", "remainder")
_FLAGS = ("logical_and", "logical_or", "bitwise_and")
_REDUCING = ("sum", "mean", "amax", "amin", "any", "var", "argmax", "cumsum")

Case = Callable[[int], tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]


def _cases() -> dict[str, Case]:
    """Return, for each operator and form, the function and the inputs of a side."""
    found: dict[str, Case] = {}
    for name in _UNARY:
        found[name] = _apply(lambda op, n: (lambda x: op(x), (_square(n),)), name)
    for name in _BINARY:
        found[name] = _apply(lambda op, n: (op, (_square(n), _square(n))), name)
        found[f"{name} broadcast"] = _apply(lambda op, n: (op, (_square(n), _square(n)[:, :1])), name)
        found[f"{name} number"] = _apply(lambda op, n: (lambda x: op(x, 1.5), (_square(n),)), name)
        found[f"{name} int64"] = _apply(lambda op, n: (op, (_whole(n), _whole(n) + 1)), name)
    for name in _FLAGS:
        found[name] = _apply(lambda op, n: (op, (_flag(n), _flag(n))), name)
    for name in _REDUCING:
        dim: Any = -1 if name in ("any", "argmax", "cumsum") else [-1]
        found[name] = _apply(lambda op, n, dim=dim: (lambda x: op(x, dim), (_square(n),)), name)
    return {**found, **_other_cases()}


def _apply(make: Callable[..., tuple[Callable[..., Any], tuple[torch.Tensor, ...]]], name: str) -> Case:
    return lambda side: make(getattr(aten, name), side)


def _other_cases() -> dict[str, Case]:
    return {
        "logical_not": lambda n: (torch.logical_not, (_flag(n),)),
        "where": lambda n: (torch.where, (_flag(n), _square(n), _square(n))),
        "where broadcast": lambda n: (torch.where, (_flag(n)[:, :1], _square(n), _square(n))),
        "where number": lambda n: (lambda c, x: torch.where(c, x, 0.0), (_flag(n), _square(n))),
        "_softmax": lambda n: (lambda x: torch.softmax(x, -1), (_square(n),)),
        "_log_softmax": lambda n: (lambda x: torch.log_softmax(x, -1), (_square(n),)),
        "native_layer_norm": lambda n: (lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]), (_square(n),)),
        "native_group_norm": lambda n: (lambda x: torch.nn.functional.group_norm(x, 4), (_image(n),)),
        "_native_batch_norm_legit_no_training": lambda n: (_batch_norm, (_image(n), torch.rand(16), torch.rand(16))),
        "embedding": lambda n: (torch.nn.functional.embedding, (_whole(n)[0], _square(n))),
        "index": lambda n: (lambda x, i: x[i], (_square(n), _whole(n)[0])),
        "index_put": lambda n: (lambda x, i, v: aten.index_put(x, [i], v), (_square(n), torch.arange(n), _square(n))),
        "index_select": lambda n: (lambda x, i: torch.index_select(x, 0, i), (_square(n), _whole(n)[0])),
        "gather": lambda n: (lambda x, i: torch.gather(x, 1, i), (_square(n), _whole(n))),
        "scatter": lambda n: (lambda x, i: torch.scatter(x, 1, i, x), (_square(n), _whole(n))),
        "expand_copy": lambda n: (lambda x: x.expand(n, n) + 0, (_square(n)[:, :1],)),
        "expand_copy same": lambda n: (lambda x: x[None].expand(1, n, n), (_square(n),)),
        "permute_copy": lambda n: (lambda x: x.permute(1, 0), (_square(n),)),
        "permute_copy heads": lambda n: (lambda x: x.view(n // 4, 4, n).permute(1, 0, 2), (_square(n),)),
        "slice_copy": lambda n: (lambda x: x[:, 1:], (_square(n),)),
        "select_copy": lambda n: (lambda x: x[:, 1], (_image(n),)),
        "unsqueeze_copy": lambda n: (lambda x: x.unsqueeze(0), (_square(n),)),
        "cat": lambda n: (lambda x, y: torch.cat([x, y], 1), (_square(n), _square(n))),
        "repeat": lambda n: (lambda x: x.repeat(2, 1), (_square(n),)),
        "flip": lambda n: (lambda x: torch.flip(x, [1]), (_square(n),)),
        "constant_pad_nd": lambda n: (lambda x: torch.nn.functional.pad(x, (1, 1)), (_square(n),)),
        "split_with_sizes_copy": lambda n: (lambda x: torch.split(x, n // 2, 1), (_square(n),)),
        "full_like": lambda n: (lambda x: torch.full_like(x, 2.0), (_square(n),)),
        "_to_dim_order_copy": lambda n: (lambda x: x.to(torch.float32), (_whole(n),)),
        "arange": lambda n: (lambda x: x + torch.arange(n * n), (_whole(n).view(-1),)),
        "linear": lambda n: (torch.nn.Linear(n, n), (_square(n),)),
        "mm": lambda n: (torch.mm, (_square(n), _square(n))),
        "bmm": lambda n: (torch.bmm, (_square(n)[None], _square(n)[None])),
        "addmm": lambda n: (torch.addmm, (_square(n)[0], _square(n), _square(n))),
        "convolution": lambda n: (torch.nn.Conv2d(16, 16, 3), (_image(n),)),
        "convolution depthwise": lambda n: (torch.nn.Conv2d(16, 16, 3, groups=16), (_image(n),)),
        "convolution depthwise 7 x 7": lambda n: (torch.nn.Conv2d(16, 16, 7, groups=16, padding=3), (_image(n),)),
        "avg_pool2d": lambda n: (lambda x: torch.nn.functional.avg_pool2d(x, 3), (_image(n),)),
        "max_pool2d_with_indices": lambda n: (lambda x: torch.nn.functional.max_pool2d(x, 3), (_image(n),)),
        "upsample_bilinear2d": lambda n: (_upsample("bilinear"), (_image(n),)),
        "upsample_nearest2d": lambda n: (_upsample("nearest"), (_image(n),)),
    }  # fmt: skip


def _batch_norm(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.batch_norm(x, mean, var)


def _upsample(mode: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.nn.functional.interpolate(x, scale_factor=2, mode=mode)


class _Apply(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Apply it."""
        return self.function(*inputs)


def _measure(operator: str, case: Case, partitioner: str | None) -> tuple[float, float] | None:
    """Return the nanoseconds of an operator per unit of work, and those for little work; None if it is not there."""
    found = []
    for side in _SIDES:
        function, inputs = case(side)
        lowered = exir_lowering.lower(export(_Apply(function), inputs), partitioner)
        kind, graph = "kernel", lowered["forward"].graph
        if partitioner is not None:
            if lowered.report.methods[0].host or len(lowered.report.methods[0].partitions) != 1:
                return None
            ((_, owner, attribute),) = graphs.delegates(lowered["forward"].graph_module)
            kind, graph = "delegate", graphs.attribute(owner, attribute).original_module.graph
        work = sum(count_work(node) for node in graph.nodes if _is_called(node, operator))
        file = exir_lowering.load(lowered.emit().buffer)
        least = math.inf
        for _ in range(_REPEAT):
            rows = [row for row in file.profile("forward", *inputs, runs=1).rows if row.kind == kind]
            taken = [row.milliseconds for row in rows if kind == "delegate" or row.name.split(".")[1] == operator]
            least = min(least, sum(taken) or math.inf)
        if not work or least == math.inf:
            return None
        found.append((work, least * 1e6))
    (less, short), (more, long) = found
    return (long - short) / (more - less), short


def _is_called(node: torch.fx.Node, operator: str) -> bool:
    return graphs.is_operator(node) and graphs.operator_name(node).split(".")[1] == operator


def print_figures() -> None:
    """Measure each operator on its own, on the host and in a delegate."""
    print(f"{'operator':40} {'host':>25} {'delegate':>25}")
    for name, case in _cases().items():
        columns = []
        for partitioner in (None, "xnnpack"):
            try:
                figures = _measure(name.partition(" ")[0], case, partitioner)
            except (exir_lowering.LoweringError, RuntimeError):  # torch has no such form, or the runtime no kernel
                figures = None
            columns.append(f"{figures[0]:9.3f} ns, {figures[1] / 1e3:9.2f} us" if figures else "-")
        print(f"{name:40} {columns[0]:>25} {columns[1]:>25}", flush=True)


def print_models(names: list[str]) -> None:
    """Predict and measure models."""
    for name in names:
        program, built = export_model(name)
        compare(name, program, built.inputs)


def compare(name: str, program: Any, inputs: tuple[Any, ...]) -> None:
    """Print predicted and measured milliseconds of one model."""
    lowered = exir_lowering.lower(program, "xnnpack")
    predicted = lowered.report.methods[0].prediction
    file = exir_lowering.load(lowered.emit().buffer)
    host, delegates, whole = [math.inf] * 3
    for _ in range(_REPEAT):
        rows = file.profile("forward", *inputs, runs=1).rows
        host = min(host, sum(row.milliseconds for row in rows if row.kind == "kernel"))
        delegates = min(delegates, sum(row.milliseconds for row in rows if row.kind == "delegate"))
        whole = min(whole, rows[0].milliseconds)
    said, delegated = predicted.seconds * 1e3, (predicted.delegate_seconds + predicted.crossing_seconds) * 1e3
    print(
        f"{name:16} predicted {said:9.2f} ms, measured {whole:9.2f}: {said / whole:.2f}; host "
        f"{predicted.host_seconds * 1e3:.2f} / {host:.2f}, delegates {delegated:.2f} / {delegates:.2f}",
        flush=True,
    )


def main() -> None:
    """Print the figures, or predictions for models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", help="compare predictions of these models, or all, instead")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if given.models is None:
        print_figures()
    else:
        print_models(given.models or list(MODELS))


if __name__ == "__main__":
    main()
