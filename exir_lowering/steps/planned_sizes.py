"""The sizes that a file has for tensors of dynamic sizes: their memory, and what the runtime lets them grow to.

ExecuTorch takes the greatest size of each dimension, however they depend on each other. The runtime compares numbers of
elements only. So a file has sizes of as many elements as the largest possible value: their product is bounded as a
whole, by what was declared of the sizes of inputs, and by what a view is of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import sympy
import torch
from executorch.exir import ExecutorchBackendConfig, memory, sym_util
from executorch.exir.tensor import TensorSpec, stride_from_dim_order
from torch.fx import GraphModule, Node

from exir_lowering._upstream.bounds import largest_shape
from exir_lowering._upstream.edge import VIEWS
from exir_lowering._upstream.fakes import expression, limits_of
from exir_lowering._upstream.programs import pytree
from exir_lowering.steps.file import File


def bound_together(file: File) -> None:
    """Bound the sizes of tensors as a whole, before the pass of the configuration that bounds each of them."""
    given, usual = file.config.sym_shape_eval_pass, ExecutorchBackendConfig().sym_shape_eval_pass
    passes = {name: _before(given.get(name, usual) if isinstance(given, dict) else given) for name in file.programs}
    file.config = replace(file.config, sym_shape_eval_pass=passes)


def _before(bounding: Callable[[GraphModule], Any]) -> Callable[[GraphModule], Any]:
    def run(graph_module: GraphModule) -> Any:
        for module in graph_module.modules():
            known: dict[Any, int] = {}
            for node in module.graph.nodes if isinstance(module, GraphModule) else ():
                for spec in pytree.tree_leaves(node.meta.get("spec")):
                    if isinstance(spec, TensorSpec):
                        _bound(spec, node, known)
        return bounding(graph_module)

    return run


def _bound(spec: TensorSpec, node: Node, known: dict[Any, int]) -> None:
    """Give a tensor a shape of its greatest number of elements; `known` has products of sizes that were viewed."""
    dynamic = [size for size in spec.shape if isinstance(size, torch.SymInt)]
    if not dynamic:
        return
    sizes, environment = [*map(expression, spec.shape)], dynamic[0].node.shape_env
    factor, product = sympy.Mul(*sizes).as_coeff_Mul()
    if node.target is memory.view or node.target in VIEWS:
        base = node.all_input_nodes[0].meta["spec"].shape
        if not any(isinstance(size, torch.SymInt) for size in base):
            known[product] = min(math.prod(base) // int(factor), known.get(product, 1 << 62))
    limits = limits_of(environment)
    if not (limits or product in known or (len(dynamic) > 1 and node.op != "placeholder")):
        return
    try:
        upper = [int(sym_util.eval_upper_bound(size)) for size in spec.shape]
        most = int(factor) * known[product] if product in known else math.prod(upper)
        shape = largest_shape(sizes, upper, environment.var_to_range, limits, most)
    except (RuntimeError, OverflowError, AttributeError):  # a size without a bound
        return
    if shape != upper:
        spec.shape, spec.stride = shape, tuple(stride_from_dim_order(shape, list(spec.dim_order)))
