"""The marks that ExecuTorch's XNNPACK partitioner leaves on the nodes of a program."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from executorch.backends.xnnpack.utils.quant_utils import IS_IMPLICIT_Q_DQ_TAG
from torch.fx import Node

from exir_lowering import graphs


def clear_marks(nodes: Iterable[Node], claimed: Collection[Node]) -> None:
    """Clear the marks by which XNNPACK treats a quantize or dequantize as part of an operator that is not claimed.

    Its checks mark the neighbours of an operator before they refuse the operator. A node that is claimed by itself and
    still marked is compiled to nothing, and the results are wrong. The nodes are those of a program, inputs first.
    """
    valid: set[Node] = set()
    for node in reversed(list(nodes)):
        if IS_IMPLICIT_Q_DQ_TAG not in node.meta:
            continue
        read_by = any(user in claimed and IS_IMPLICIT_Q_DQ_TAG not in user.meta for user in node.users)
        made_by = any(source in claimed and not _quantizes(source) for source in node.all_input_nodes)
        if read_by or any(user in valid for user in node.users) or (made_by and "dequantize" not in node.name):
            valid.add(node)
        else:
            del node.meta[IS_IMPLICIT_Q_DQ_TAG]


def _quantizes(node: Node) -> bool:
    return node.op != "call_function" or graphs.operator_name(node).startswith("quantized_decomposed.")
