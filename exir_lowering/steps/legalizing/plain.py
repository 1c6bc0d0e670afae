"""Quantisation by torchao that no backend took, in plain operators: there are no out variants of its own, nor kernels.

It stays as it is until a file is made, since the file's configuration says whether ExecuTorch fuses embeddings.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from exir_lowering import graphs
from exir_lowering._upstream import conversion
from exir_lowering._upstream.edge import edge_operator
from exir_lowering._upstream.operators import is_overload
from exir_lowering._upstream.programs import fake_mode_of, pytree
from exir_lowering._upstream.tracing import enable_python_dispatcher
from exir_lowering.steps.legalizing.torchao_rules import RULES, look_up

_DEQUANTIZE, _EMBEDDING = "torchao.dequantize_affine.default", "aten.embedding.default"
_COPY = "dim_order_ops._to_dim_order_copy.default"


def compute_plainly(program: ExportedProgram, *, fusing: bool) -> None:
    """Replace torchao's operators in a private copy in Edge dialect, if `fusing` not those of embeddings."""
    for _, module in graphs.walk(program.graph_module):
        found = [node for node in module.graph.nodes if graphs.operator_name(node) in RULES]
        for node in reversed(found):  # so that what reads a table is replaced before it
            if graphs.operator_name(node) == _DEQUANTIZE:
                lookups = [user for user in node.users if _looks_up(user, node)]
                if fusing and len(lookups) == len(node.users):
                    continue
                for user in lookups:
                    _replace(module, user, look_up, (node.args[0], user.args[1], *node.args[1:]), node.kwargs)
            if node.users:
                _replace(module, node, RULES[graphs.operator_name(node)], node.args, node.kwargs)
            else:
                module.graph.erase_node(node)


def _looks_up(user: Node, table: Node) -> bool:
    """Return whether rows of a table are taken, whose scales can be taken too."""
    if graphs.operator_name(user) != _EMBEDDING or user.args[0] is not table:
        return False
    block: Any = table.args[1]
    return block[0] in (1, table.meta["val"].shape[0])


def _replace(module: GraphModule, node: Node, rule: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Replace a node by what a rule computes."""
    operands = list(dict.fromkeys(each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Node)))
    mode: Any = fake_mode_of(module)

    def call(*values: Any) -> Any:
        given = dict(zip(operands, values, strict=True))
        return rule(*map_arg(args, given.__getitem__), **map_arg(kwargs, given.__getitem__))

    suppressed = mode.shape_env.suppress_guards() if mode.shape_env is not None else nullcontext()
    with mode, suppressed, enable_python_dispatcher(), torch.no_grad():
        traced: GraphModule = make_fx(call)(*(operand.meta["val"] for operand in operands))
    env: dict[Node, Node] = dict(zip(traced.graph.find_nodes(op="placeholder"), operands, strict=True))
    meta = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}
    with module.graph.inserting_before(node):
        for step in traced.graph.nodes:
            if step.op == "call_function":
                target, given, options = _edge_call(step, env)
                env[step] = module.graph.call_function(target, given, options)
                env[step].meta = {**meta, "val": step.meta["val"]}
    results: Any = map_arg(traced.graph.output_node().args[0], env.__getitem__)
    if isinstance(results, (tuple, list)):
        for user in list(node.users):
            place: Any = user.args[1]
            user.replace_all_uses_with(results[place])
            module.graph.erase_node(user)
    else:
        node.replace_all_uses_with(results)
    module.graph.erase_node(node)


def _edge_call(step: Node, env: dict[Node, Node]) -> tuple[Any, Any, Any]:
    """Return what a traced call is in Edge dialect."""
    args, kwargs = map_arg((step.args, dict(step.kwargs)), env.__getitem__)
    target: Any = step.target
    if not is_overload(target) or target is torch.ops.aten.sym_size.int:
        return target, args, kwargs
    name = graphs.operator_name(step)
    if name == "aten._to_copy.default":
        order = [*range(step.meta["val"].dim())]
        return edge_operator(_COPY), args, {"dtype": step.meta["val"].dtype, "dim_order": order}
    if name.endswith(".Tensor") and not isinstance(args[1], Node):
        return edge_operator(f"{name.removesuffix('Tensor')}Scalar"), args, kwargs
    return conversion.aten_to_edge(conversion.view_copy_of(target) or target), args, kwargs
