"""What the runtime does with an operator that stays on the host: nothing against it, or why it does not run."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.edge import lacks_out_variant, out_variant
from exir_lowering._upstream.operators import bind
from exir_lowering.graphs.measures import tensors
from exir_lowering.pte.releases import Form, Target, join_ranks

_FUSED = ("quantized_decomposed.", "torchao.", "quant.")  # `emit` fuses these, computes them plainly, or says why not


def refuse(node: Node, target: Target) -> str | None:
    """Return why a node does not run on the host of a runtime; None if nothing is known against it."""
    values = list(tensors(node.meta.get("val")))
    if not values:  # it computes sizes
        return None
    for value in values:
        if all(0 in [number for number in each if type(number) is int] for each in (value.shape, value.stride())):
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
    return why if verdict == "does not run" else None


def form_of(node: Node, kernel: str) -> Form:
    """Return what a call asks of its kernel, as `check` finds it in a file; orders of dimensions are left out."""
    types, rest, ranks = list[str](), list[str](), list[int]()
    results = [("", one) for one in tensors(node.meta.get("val"))]
    for kind, given in [*bind(node.target, node.args, node.kwargs), *results]:
        value: Any = given.meta.get("val") if isinstance(given, Node) else given
        if kind.startswith("List[") and "Tensor" in kind:
            found = [one.meta["val"] for one in value if isinstance(one, Node)]
            types.append(f"[{' '.join(sorted({str(one.dtype).removeprefix('torch.') for one in found}))}]")
            rest.append("o" * (len(found) < len(value)))
            ranks += [one.dim() for one in found]
        elif isinstance(value, torch.Tensor):
            types.append(str(value.dtype).removeprefix("torch."))
            ranks.append(value.dim())
        else:
            rest.append(_letter(value))
    return Form(kernel, " ".join(types), join_ranks(ranks), "".join(rest), "kernel")


def _letter(value: Any) -> str:
    """Return the letter by which a form tells the kind of an argument; see `inspection.compatibility`."""
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, bool) or value is None:
        return {None: "n", True: "T", False: "F"}[value]
    if isinstance(value, (list, tuple)):
        items = [one.meta.get("val") if isinstance(one, Node) else one for one in value]
        first = items[0] if items else 0
        kind = "b" if isinstance(first, bool) else "r" if isinstance(first, (float, torch.SymFloat)) else "l"
        return kind + "0" * (not items) + "-" * any(isinstance(one, int) and one < 0 for one in items)
    if isinstance(value, (float, torch.SymFloat)):
        return "d"
    return "i" + "-" * (isinstance(value, int) and value < 0)
