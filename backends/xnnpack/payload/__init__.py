"""XNNPACK's payloads, checked before the runtime gets them.

XNNPACK trusts the graph that it gets: it reads weights up to the end that their shape implies, divides by strides, and
writes results of the shape that it computes, wherever that ends. It is the one backend that every wheel of ExecuTorch
has, so its payloads are checked: their tables, not the weights.
"""

from exir_lowering.backends.xnnpack.payload.call import check_call
from exir_lowering.backends.xnnpack.payload.graph import BACKEND, Graph
from exir_lowering.backends.xnnpack.payload.reading import read_graph, weights

__all__ = ["BACKEND", "Graph", "check_call", "read_graph", "weights"]
