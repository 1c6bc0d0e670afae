"""Lowered modules in files from a stranger: what their record says is data, and nothing that it names is imported."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.export import export
from torch.utils import _pytree as pytree

from exir_lowering import InputError, LoweredModule, cli, lower
from exir_lowering.graphs import treespecs
from exir_lowering.lowered_module import record
from exir_lowering.pte import assembling, container

Edit = Callable[[Any], Any]


class Color(Enum):
    RED = "r"
    BLUE = "b"


class Level(IntEnum):
    LOW = 1


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Dot:
    x: Any
    y: Any


class Tagged(list[Any]):
    """A list with a tag, which its context keeps."""

    tag: Any = None


def tagged(items: Any, tag: Any) -> Tagged:
    made = Tagged(items)
    made.tag = tag
    return made


pytree._register_namedtuple(Pair, serialized_type_name="tests.hostile.Pair")
pytree.register_dataclass(Dot, serialized_type_name="tests.hostile.Dot")
pytree.register_pytree_node(
    Tagged,
    lambda one: (list(one), one.tag),
    tagged,
    serialized_type_name="tests.hostile.Tagged",
    to_dumpable_context=lambda tag: ["tag", tag],
    from_dumpable_context=lambda context: {"tag": context[1]}["tag"],
)


STRUCTURES: Mapping[str, Any] = {
    "leaf": 0,
    "dict": {"b": 0, "a": {"": 0}, "\u00e4 \n": 0},
    "keys": {1: 0, 2.5: 0, None: 0, False: 0},
    "enumerators": {Color.BLUE: 0, Color.RED: [0], Level.LOW: 0},
    "ordered": OrderedDict([("b", 0), ("a", 0)]),
    "default": defaultdict(list, {"a": 0}),
    "deque": deque([0, 0], maxlen=3),
    "named": Pair(0, {"a": 0}),
    "data class": Dot(0, None),
    "registered": tagged([0, 0], [1, {"a": None}]),
    "size": torch.Size([1, 2]),
    "deep": [[[[[[[[[[[[[[[[[[[[0]]]]]]]]]]]]]]]]]]]],
    "return": torch.max(torch.ones(2, 2), 0),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_that_torch_writes(name: str) -> None:
    spec = pytree.tree_structure(STRUCTURES[name])
    try:
        text = pytree.treespec_dumps(spec)
    except NotImplementedError:
        assert name == "return"  # torch does not write these down
        return
    assert treespecs.loads(text) == spec == pytree.treespec_loads(text)


def text(kind: Any, context: Any, children: Any = ()) -> str:
    leaf = {"type": None, "context": None, "children_spec": []}
    children = [leaf] * children if isinstance(children, int) else list(children)
    return json.dumps([1, {"type": kind, "context": context, "children_spec": children}])


def enumerator(kind: Any, name: Any = "a") -> str:
    return json.dumps([{"__enum__": True, "fqn": kind, "name": name}])


DEEP = "[" * 5000 + "]" * 5000
LEAF = {"type": None, "context": None, "children_spec": []}


def nested(depth: int) -> str:
    tree: Any = LEAF
    for _ in range(depth):
        tree = {"type": "builtins.list", "context": "null", "children_spec": [tree]}
    return json.dumps([1, tree])


FOREIGN: Mapping[str, str] = {
    "an enumeration of a module": text("builtins.dict", enumerator("ctypes:cdll"), 1),
    "no enumeration": text("builtins.dict", enumerator("os:environ", "HOME"), 1),
    "a factory of a module": text(
        "collections.defaultdict",
        {"default_factory_module": "os", "default_factory_name": "abort", "dict_context": ["a"]},
        1,
    ),
    "a type": text("os.system", "null"),
    "types without a name": text("NO_SERIALIZED_TYPE_NAME_FOUND", "null"),
}

WRONG: Mapping[str, str] = {
    "not JSON": "nonsense",
    "deep context": text("builtins.dict", DEEP),
    "True for 1": json.dumps([True, LEAF]),
    "no node": "[1, 3]",
    "a leaf with children": text(None, None, 1),
    "deep nodes": nested(200),
    "a context that is no text": text("builtins.dict", ["a"], 1),
    "a key less": text("builtins.dict", '["a"]', 2),
    "a list as key": text("builtins.dict", '[["a"]]', 1),
    "an enumerator by number": text("builtins.dict", enumerator(f"{__name__}:Color", 7), 1),
    "a named tuple's fields": text("collections.namedtuple", "tests.hostile.Pair", 3),
    "a registered type's context": text("tests.hostile.Tagged", [], 1),
    "children that are none": json.dumps([1, {"type": "builtins.list", "context": "null", "children_spec": {}}]),
}


@pytest.mark.parametrize("name", [*FOREIGN, *WRONG])
def test_structures_that_it_does_not(name: str) -> None:
    with pytest.raises(InputError) as caught:
        treespecs.loads({**FOREIGN, **WRONG}[name])
    assert isinstance(caught.value, treespecs.UnknownTypeError) == (name in FOREIGN)
    assert len(str(caught.value)) < 300


class Rich(nn.Module):
    def forward(self, x: torch.Tensor, pair: Any, *, flag: bool = True) -> Any:
        x.mul_(2)
        return {"y": x + pair[0], "n": 3, "d": [x * pair[1]]}


@pytest.fixture(scope="module")
def module() -> LoweredModule:
    torch.manual_seed(0)
    call = (torch.ones(3), (torch.ones(3), torch.ones(3)))
    made = lower(export(Rich(), call, {"flag": True})).module()
    made.note, made.table, made.weight = "text", {"a": [1, (2.5, float("inf"))], "t": torch.ones(2)}, torch.ones(2)
    made.bundled_inputs = [{"x": torch.ones(3), "pair": (torch.ones(3), torch.ones(3))}]
    return made


@pytest.fixture(scope="module")
def saved(module: LoweredModule, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return module.save(tmp_path_factory.mktemp("saved") / "model.pte").read_bytes()


def with_record(content: bytes, edit: Edit) -> bytes:
    """Return a file whose record is another one."""
    tree, tensors = record.unpack(kept(content))
    return keeping(content, *record.pack(edit(json.dumps(tree)), [tensors]))


def kept(content: bytes) -> memoryview:
    return container.open_program(memoryview(content))[1].named[assembling.MODULE]


def keeping(content: bytes, *pieces: bytes | memoryview) -> bytes:
    return b"".join(assembling.with_module(memoryview(content), pieces))


def of_json(edit: Callable[[Any], None]) -> Edit:
    def edited(old: str) -> str:
        tree = json.loads(old)
        edit(tree)
        return json.dumps(tree)

    return edited


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """A module that creates a file when it is imported."""
    name = f"planted_{random.getrandbits(40):x}"
    folder, marker = tmp_path / "modules", tmp_path / "marker"
    folder.mkdir()
    (folder / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close()\nname = list\n")
    monkeypatch.syspath_prepend(str(folder))
    yield name, marker
    sys.modules.pop(name, None)


def spec_of(kind: str, name: str) -> str:
    if kind == "enumeration":
        return text("builtins.dict", json.dumps([{"__enum__": True, "fqn": f"{name}:name", "name": "x"}, "n", "d"]), 3)
    context = {"default_factory_module": name, "default_factory_name": "name", "dict_context": ["y", "n", "d"]}
    return text("collections.defaultdict", context, 3)


@pytest.mark.parametrize("kind", ["enumeration", "factory"])
def test_nothing_is_imported(
    kind: str,
    saved: bytes,
    planted: tuple[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, marker = planted
    spec = spec_of(kind, name)
    with contextlib.suppress(TypeError, LookupError):
        pytree.treespec_loads(spec)  # torch's own reader
    assert marker.exists()
    marker.unlink()
    sys.modules.pop(name)
    path = tmp_path / "model.pte"
    path.write_bytes(with_record(saved, of_json(lambda tree: tree["methods"][0].update(out_spec=spec))))
    with pytest.raises(InputError, match=name):
        LoweredModule.load(path)
    assert not marker.exists() and name not in sys.modules
    # The command line runs the methods, and does not ask for the record.
    argv = ["run", str(path)]
    assert cli.main(argv) == 0, capsys.readouterr().err
    assert not marker.exists() and name not in sys.modules


def attribute(value: Any) -> Edit:
    return of_json(lambda tree: tree["attributes"].update(table=value))


def method(**fields: Any) -> Edit:
    return of_json(lambda tree: tree["methods"][0].update(fields))


def other(**fields: Any) -> Edit:
    return of_json(lambda tree: tree.update(fields))


RECORDS: Mapping[str, Edit] = {
    "deep JSON": lambda old: DEEP,
    "deep value": attribute(json.loads("[" * 900 + "]" * 900)),
    "a number for a list": other(methods=3),
    "no attributes": other(attributes="note"),
    "tensors": other(tensors={}),
    "a tensor beyond the file": other(tensors=[[6, [1 << 30]]]),
    "an element type": other(tensors=[[99, [1]]]),
    "a number too large": attribute({"float": 10**400}),
    "a kind": attribute({"getattr": "x"}),
    "a key that is a list": attribute({"dict": [[[], 1]]}),
    "another method": method(name="exir_lowering.module"),
    "a parameter's name": method(positional=["x", "a b"]),
    "values": method(inputs=[None]),
    "written": method(written=[0, 0]),
    "arguments": method(in_spec=text("builtins.list", "null", 2)),
    "a structure": method(out_spec=7),
    "a case": of_json(lambda tree: tree["bundled"].update(forward=[[1]])),
    "cases of no method": of_json(lambda tree: tree["bundled"].update(other=[])),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_is_wrong(name: str, saved: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    path.write_bytes(with_record(saved, RECORDS[name]))
    with pytest.raises(InputError) as caught:
        LoweredModule.load(path)
    assert "model.pte" in str(caught.value) or "forward" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", bytes(24), bytes(7), b"\xff" * 30, *map(b"".join, map(record.pack, ("", "3", "[]", "{}"), [[]] * 4))],
)
def test_a_record_that_is_none(content: bytes, saved: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    path.write_bytes(keeping(saved, content))
    for verify in (True, False):
        with pytest.raises(InputError, match=r"model\.pte"):
            LoweredModule.load(path, verify=verify)


def test_a_type_that_has_changed(saved: bytes, tmp_path: Path) -> None:
    """The context is what the type's own function makes of it; it fails when the structure is built."""
    spec = text("tests.hostile.Dot", '[["x", "y", "z"], []]', 3)
    path = tmp_path / "model.pte"
    path.write_bytes(with_record(saved, method(out_spec=spec)))
    loaded = LoweredModule.load(path)
    with pytest.raises(InputError, match="Dot"):
        loaded(torch.ones(3), (torch.ones(3), torch.ones(3)))
