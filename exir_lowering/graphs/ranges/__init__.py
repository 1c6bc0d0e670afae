from dataclasses import dataclass

from torch.fx import Node


@dataclass(frozen=True)
class Doubt:
    node: Node
    reason: str
    advice: str = ""


class ValueRanges:
    def __init__(self, program, assume={}):
        self.c = {}

    def note_constant(self, node, t):
        self.c[node] = t

    def constant(self, node):
        return self.c.get(node)

    def uniform(self, node):
        from exir_lowering import graphs

        n = graphs.operator_name(node) if node.op == "call_function" else ""
        if n == "aten.full_like.default" or n == "aten.full.default":
            return float(node.args[1])
        if n == "aten.scalar_tensor.default":
            return float(node.args[0])
        return None

    def bounded(self, node):
        return None

    def rows_doubt(self, node, dim):
        return Doubt(node, "x", "y")
