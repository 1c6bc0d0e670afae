"""What XNNPACK allocates for a payload: weights in the order of its kernels, and a workspace. An estimate.

Weights of linear layers and convolutions are packed: the channels of tiles lie side by side, each with its bias and, of
integers, its sum and its scale. The workspace has what flows between operators, where memory is used again as soon as
nothing reads it, and what an operator needs for itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PayloadMemory:
    """What XNNPACK allocates for a payload, in bytes."""

    packed: int  # when it is loaded
    workspace: int  # for a call; payloads share it


@dataclass(frozen=True, slots=True)
class Value:
    """A value in a payload."""

    element: str
    dims: Sequence[int]  # in XNNPACK's order, the largest ones
    size: int  # in bytes
    constant: bool
    outside: bool  # whether its memory is the caller's: it is constant, or an input or output of the payload

    def __str__(self) -> str:
        return f"{'constant ' * self.constant}{self.element}{list(self.dims)}"


@dataclass(frozen=True, slots=True)
class Node:
    """An operator in a payload."""

    name: str
    inputs: Mapping[str, int]  # the values that it takes, by what it calls them
    outputs: tuple[int, ...]


_TILE = 16  # channels; 8 to 32 by the kernel
_POINTER = 8
_OF_A_CHANNEL = 4, 12  # bytes beside its weights: the bias; of integers the sum of its weights and a scale too
_OTHERS = """
    Softmax StaticTranspose StaticSlice BatchMatrixMultiply FullyConnected Conv2d DepthwiseConv2d ConvTranspose2d
    AvgPooling2d MaxPooling2d ArgMaxPooling2d GlobalAvgPooling2d StaticConstantPad StaticResizeBilinear2D
    Concatenate2 Concatenate3 Concatenate4 Concatenate5
"""
"""Operators whose result cannot be written over an input. Those of elements can."""


def estimate(nodes: Sequence[Node], values: Mapping[int, Value]) -> PayloadMemory:
    """Estimate what XNNPACK allocates for a payload."""
    return PayloadMemory(sum(_packed(node, values) for node in nodes), _workspace(nodes, values))


def _packed(node: Node, values: Mapping[int, Value]) -> int:
    weight = values[node.inputs["filter"]] if "filter" in node.inputs else None
    if weight is None or not weight.constant or not weight.dims:
        return 0
    channels = weight.dims[-1 if node.name == "DepthwiseConv2d" else 0]
    padded = -(-channels // _TILE) * _TILE
    return padded * (weight.size // max(channels, 1) + _OF_A_CHANNEL["int" in weight.element])


def _workspace(nodes: Sequence[Node], values: Mapping[int, Value]) -> int:
    """Return the most bytes in use at once."""
    last = {id_: number for number, node in enumerate(nodes) for id_ in (*node.outputs, *node.inputs.values())}
    held, total, most = dict[int, int](), 0, 0  # the bytes of values that are in use, by value
    for number, node in enumerate(nodes):
        made = {id_: values[id_].size for id_ in node.outputs if not values[id_].outside}
        ends = {id_ for id_ in node.inputs.values() if id_ in held and last[id_] == number}
        if node.name not in _OTHERS.split() and len(made) == 1:  # written over an input
            total -= held.pop(next((id_ for id_ in ends if held[id_] in made.values()), -1), 0)
        held |= made
        total += sum(made.values())
        most = max(most, total + _own(node, values))
        for id_ in ends | {id_ for id_ in made if last[id_] == number}:
            total -= held.pop(id_, 0)
    return most


def _own(node: Node, values: Mapping[int, Value]) -> int:
    """Return what an operator needs for itself: pointers to the pixels of windows, or a packed operand."""
    if node.name == "BatchMatrixMultiply" and not values[node.inputs["input2"]].constant:
        return values[node.inputs["input2"]].size
    if "filter" not in node.inputs or len(values[node.inputs["filter"]].dims) != 4:
        return 0
    window, pixels = values[node.inputs["filter"]].dims[1:3], values[node.outputs[0]].dims[:3]
    return math.prod(window) * math.prod(pixels) * _POINTER * (math.prod(window) > 1)
