"""Serialised programs from anyone: one error, and nothing happens."""

from __future__ import annotations

import copy
import json
import random
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from exir_lowering import InputError
from exir_lowering.graphs.serialized import Encoded, decode, encode

_HEADER = struct.Struct("<8sIIQ")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        y = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (self.linear(x),))
        return torch.cat([x, y]).view(x.shape[0] * 2, 4), x.shape[0] // 2 + 3


@pytest.fixture(scope="module")
def encoded() -> Encoded:
    return encode(export(Model(), (torch.randn(6, 4),), dynamic_shapes=({0: Dim("b", min=4, max=64)},)))


def tree_of(encoded: Encoded) -> Any:
    return json.loads(zlib.decompress(encoded.graph[_HEADER.size :]))


def packed(tree: Any) -> bytes:
    body = json.dumps(tree).encode()
    return _HEADER.pack(b"EXIRPROG", 1, zlib.crc32(body), len(body)) + zlib.compress(body)


def refused(content: bytes, encoded: Encoded) -> str:
    with pytest.raises(InputError) as caught:
        decode(content, encoded.pieces)
    return str(caught.value)


def unpacked(content: bytes) -> tuple[bytes, bytes] | None:
    """Return the header and what is compressed after it; None if that is damaged."""
    try:
        return content[: _HEADER.size], zlib.decompress(content[_HEADER.size :])
    except zlib.error:
        return None


def test_damaged_bytes(encoded: Encoded) -> None:
    decode(packed(tree_of(encoded)), encoded.pieces)  # what the others change is sound
    graph = encoded.graph
    for length in (0, 5, _HEADER.size, len(graph) - 1):
        refused(graph[:length], encoded)
    refused(graph + b"x", encoded)
    refused(b"PK" + graph[2:], encoded)
    assert "version 99" in refused(graph[:8] + struct.pack("<I", 99) + graph[12:], encoded)
    rng = random.Random(0)
    for _ in range(200):
        changed = bytearray(graph)
        changed[rng.randrange(len(graph))] ^= 1 << rng.randrange(8)
        if unpacked(bytes(changed)) != unpacked(graph):  # the last bits of compressed content may have no meaning
            refused(bytes(changed), encoded)
    refused("text", encoded)  # type: ignore[arg-type]


def test_bombs(encoded: Encoded) -> None:
    started = time.process_time()
    zeros = zlib.compress(bytes(1 << 26))
    assert "expected at most" in refused(_HEADER.pack(b"EXIRPROG", 1, 0, 1 << 40) + zeros, encoded)
    assert "damaged" in refused(_HEADER.pack(b"EXIRPROG", 1, 0, 100) + zeros, encoded)
    for body in (b"[" * 1_000_000, b'{"a":' * 100_000, b"9" * 10_000_000):
        refused(_HEADER.pack(b"EXIRPROG", 1, zlib.crc32(body), len(body)) + zlib.compress(body), encoded)
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    tree = tree_of(encoded)
    tree["examples"] = deep
    refused(packed(tree), encoded)
    expression: Any = "s"
    for _ in range(20):
        expression = ["Pow", expression, 8]
    for hostile in (
        ["Pow", 1 << 60, 1 << 60],
        expression,
        ["Add", *["s"] * 10_000],
        ["Rational", 1, 0],
        ["Mod", 1, 0],
    ):
        tree = tree_of(encoded)
        name = tree["symbols"][0][0]
        tree["numbers"][0][2] = json.loads(json.dumps(hostile).replace('"s"', json.dumps(name)))
        refused(packed(tree), encoded)
    assert time.process_time() - started < 60  # seconds, where an unbounded one would take years


def nodes(tree: Any, kind: int) -> list[Any]:
    return [node for node in tree["graphs"][0]["nodes"] if node[0] == kind]


def first_operator(name: list[str]) -> Callable[[Any], None]:
    return lambda tree: tree["operators"].__setitem__(0, name)


@pytest.mark.parametrize(
    "change",
    [
        first_operator(["function", "os.system"]),
        first_operator(["function", "builtins.eval"]),
        first_operator(["", "os::system"]),
        first_operator(["", "aten::add.__class__"]),
        first_operator(["", "aten::from_file"]),
        first_operator(["edge", "aten::__init__"]),
        first_operator(["__class__", "aten::add.Tensor"]),
        first_operator(["higher_order", "triton_kernel_wrapper_mutation"]),
        lambda tree: nodes(tree, 2)[0].__setitem__(1, "x=__import__('os')"),
        lambda tree: nodes(tree, 2)[0].__setitem__(1, nodes(tree, 0)[0][1]),
        lambda tree: nodes(tree, 0)[0].__setitem__(2, "*args"),
        lambda tree: nodes(tree, 0)[0].__setitem__(2, "x=print(1)"),
        lambda tree: nodes(tree, 1)[0].__setitem__(2, '"); print(1); ("'),
        lambda tree: nodes(tree, 2)[0].__setitem__(3, [{"%": 10_000}]),
        lambda tree: nodes(tree, 2)[0].__setitem__(3, [{"%": -1}]),
        lambda tree: nodes(tree, 2)[0].__setitem__(4, {"x):\n  print(1)#": 1}),
        lambda tree: tree["graphs"][0]["attributes"].__setitem__(0, ["__class__", {"graph": 1}]),
        lambda tree: tree["graphs"][0]["attributes"][0].__setitem__(1, {"graph": 0}),
        lambda tree: tree["graphs"][0]["nodes"].pop(),
        lambda tree: tree.__setitem__("guards", ["__import__('os').system('true')"]),
        lambda tree: tree.__setitem__("guards", ["L['x'].__class__ == 1"]),
        lambda tree: tree.__setitem__("guards", ["(lambda: 1)() == 1"]),
        lambda tree: tree["calls"][0][1].__setitem__(4, ["x=print(1)"]),
        lambda tree: tree["calls"][0][1].__setitem__(
            2, '[1, {"type": "collections.OrderedDict", "context": "os", "children_spec": []}]'
        ),
        lambda tree: tree["tensors"][0].__setitem__(2, [1 << 40]),
        lambda tree: tree["tensors"][0].__setitem__(4, -64),
        lambda tree: tree["tensors"][0].__setitem__(0, 7),
        lambda tree: tree["tensors"][0].__setitem__(3, [0, -1]),
        lambda tree: tree["fakes"][0].__setitem__(2, [-1]),
        lambda tree: tree["fakes"][0].__setitem__(2, [1 << 61, 1 << 61]),
        lambda tree: tree["fakes"][0].__setitem__(5, "cuda"),
        lambda tree: tree["verifiers"].__setitem__(0, ["NONE", []]),
        lambda tree: tree["state"].append(["it's\"", None]),
        lambda tree: tree["signature"][0].pop(),
        lambda tree: tree.pop("texts"),
    ],
)
def test_every_field_is_checked(encoded: Encoded, change: Callable[[Any], None], capfd: Any) -> None:
    tree = tree_of(encoded)
    change(tree)
    assert "cannot be read" in refused(packed(tree), encoded)
    assert capfd.readouterr().out == ""


def test_pieces_have_to_fit(encoded: Encoded) -> None:
    first, *others = encoded.pieces
    for pieces in ([], others, [first], [*encoded.pieces, first], [first[:-1], *others], [first.float(), *others]):
        with pytest.raises(InputError, match="cannot be read"):
            decode(encoded.graph, pieces)


@pytest.mark.parametrize("seed", range(3))
def test_random_changes_give_a_program_or_the_error(encoded: Encoded, seed: int) -> None:
    rng = random.Random(seed)
    original = tree_of(encoded)
    places = list(_places(original))
    values = [None, True, -1, 0, 3, 1 << 70, 0.5, "", "x", [], {}, {"%": 0}, {"fake": 0}, {"tuple": [1]}, ["Add", 1]]
    read = 0
    for _ in range(200):
        tree = copy.deepcopy(original)
        for path in rng.sample(places, rng.choice((1, 1, 2))):
            _replace(tree, path, rng.choice([*values, _at(original, rng.choice(places))]))
        try:
            decode(packed(tree), encoded.pieces)
            read += 1
        except InputError:
            pass
    assert 7 < read < 193


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Any:
    if path:
        yield path
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield from _places(tree[key], (*path, key))


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return copy.deepcopy(tree)


def _replace(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree[key] if _has(tree, key) else None  # another change came first
    if _has(tree, path[-1]):
        tree[path[-1]] = value


def _has(tree: Any, key: Any) -> bool:
    return key in tree if isinstance(tree, dict) else isinstance(tree, list) and key in range(len(tree))
