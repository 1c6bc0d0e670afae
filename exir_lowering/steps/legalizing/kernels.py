"""What the runtime does with an operator that stays on the host: nothing against it, or why it does not run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.edge import lacks_out_variant, out_variant
from exir_lowering._upstream.operators import bind
from exir_lowering.graphs.measures import tensors
from exir_lowering.pte.releases import Form, Target, join_ranks
from exir_lowering.steps.legalizing.fatal import why_fatal

_FUSED = (
    "quantized_decomposed.",
    "torchao.",
    "quant.",
)  # `emit` fuses these, or computes them plainly, or says why not


def refuse(node: Node, target: Target) -> str | None:
    """Return why a node does not run on the host of a runtime; None if nothing is known against it."""
    if not any(True for _ in tensors(node.meta.get("val"))):  # it computes sizes
        return None
    if any(0 in _numbers(value.shape) and 0 in _numbers(value.stride()) for value in tensors(node.meta["val"])):
        return "ExecuTorch writes no tensor without elements whose strides are zero"
    name = graphs.operator_name(node)
    if lacks_out_variant(node):
        return None if name.startswith(_FUSED) else "it has no out variant, and a file cannot have others"
    kernel = out_variant(node.target)
    if kernel is None:
        return None  # it becomes something else, or there is nothing to know about it
    kernels = target.release.kernels if target.kernels is None else target.kernels
    if kernel not in kernels:
        ours = name.startswith(("aten.", "dim_order_ops."))
        return f"{target.name} has no kernel {kernel}" if ours else None
    form = form_of(node, kernel)
    built = target.kernels.get(kernel) if target.kernels is not None else None
    if built is not None and (other := {*form.types.replace("[", "").replace("]", "").split()} - built):
        return f"{target.name} has no kernel {kernel} for {', '.join(sorted(other))}"
    verdict, why = target.release.judge(form)
    return why if verdict == "does not run" else _fatal(node, kernel)


def _fatal(node: Node, kernel: str) -> str | None:
    """Return why a kernel would end the process, as `load` finds it in a file; None if it would not."""
    given = [one for _, one in bind(node.target, node.args, node.kwargs)]
    values = [(0, tuple(one) if isinstance(one, (list, tuple)) else one) for one in given]
    first = given[0].meta.get("val") if given and isinstance(given[0], Node) else None
    if not isinstance(first, torch.Tensor):
        return None
    static = all(type(size) is int for size in first.shape)
    converts = any(value.dtype is not first.dtype for value in tensors(node.meta["val"]))
    why = why_fatal(kernel.partition(".")[0], values, tuple(first.shape) if static else None, converts)
    return None if why is None else f"its kernel would end the process: {why}"


def form_of(node: Node, kernel: str) -> Form:
    """Return what a call asks of its kernel, as `check` finds it in a file; orders of dimensions are left out."""
    types, rest, ranks = list[str](), list[str](), list[int]()
    for kind, given in bind(node.target, node.args, node.kwargs):
        value: Any = given.meta.get("val") if isinstance(given, Node) else given
        if kind.startswith("List[") and "Tensor" in kind:
            found = [one.meta["val"] for one in value if isinstance(one, Node)]
            types.append(f"[{' '.join(sorted({_word(one) for one in found}))}]")
            rest.append("o" * (len(found) < len(value)))
            ranks += [one.dim() for one in found]
        elif isinstance(value, torch.Tensor):
            types.append(_word(value))
            ranks.append(value.dim())
        else:
            rest.append(_letter(value))
    for value in tensors(node.meta.get("val")):
        types.append(_word(value))
        ranks.append(value.dim())
    return Form(kernel, " ".join(types), join_ranks(ranks), "".join(rest), "kernel")


def _numbers(sizes: Iterable[Any]) -> list[int]:
    return [size for size in sizes if type(size) is int]


def _word(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _letter(value: Any) -> str:
    """Return the letter by which a form tells the kind of an argument; see `inspection.compatibility`."""
    if isinstance(value, bool) or value is None:
        return str(value)[0].lower() if value is None else repr(value)[0]
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, (list, tuple)):
        items = [one.meta.get("val") if isinstance(one, Node) else one for one in value]
        first = items[0] if items else 0
        kind = "b" if isinstance(first, bool) else "r" if isinstance(first, (float, torch.SymFloat)) else "l"
        return kind + "0" * (not items) + "-" * any(isinstance(one, int) and one < 0 for one in items)
    if isinstance(value, (float, torch.SymFloat)):
        return "d"
    return "i" + "-" * (isinstance(value, int) and value < 0)
