"""`.pt2` files from a stranger: what would act when torch loads it is refused, what torch.export.save writes is not."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pickle
import random
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export
from torch.utils import _pytree as pytree

from exir_lowering import InputError, cli
from exir_lowering.cli.pt2 import check_file
from exir_lowering.graphs.serialized.grammar import UnsafeFileError, check_text

MODEL = "archive/models/model.json"
SAMPLES = "archive/data/sample_inputs/model.pt"
Change = Callable[[dict[str, bytes], str], None]
"""Changes the members of an archive so that loading it creates the file of a name."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("offset", torch.ones(3))
        self.scale = torch.tensor([1.0, 2.0, 3.0])

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor, times: int = 2) -> dict[str, torch.Tensor]:
        y = self.linear(x) + self.offset * times
        return {"y": y * self.scale + shift, "rows": torch.ones(x.shape[0] * 2)}


class Nested(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,))


def saved(program: ExportedProgram) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def net() -> bytes:
    torch.manual_seed(0)
    rows = {"x": {0: Dim.DYNAMIC}, "shift": None, "times": None}
    return saved(export(Net(), (torch.randn(5, 4),), {"shift": torch.ones(3), "times": 2}, dynamic_shapes=rows))


@pytest.fixture(scope="module")
def nested() -> bytes:
    return saved(export(Nested(), (torch.ones(3),)))


def members(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as read:
        return {name: read.read(name) for name in read.namelist()}


def written(parts: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def loaded_by_torch(source: Any) -> ExportedProgram:
    logging.disable()  # what it logs after it has unpickled has a place too many
    try:
        return torch.export.load(source)
    finally:
        logging.disable(logging.NOTSET)


def read_program(path: Path) -> ExportedProgram:
    """Load what was checked."""
    with path.open("rb") as file:
        source = check_file(file)
        source.seek(0)
        return loaded_by_torch(source)


def edited(parts: dict[str, bytes], change: Callable[[Any], None], member: str = MODEL) -> None:
    tree = json.loads(parts[member])
    change(tree)
    parts[member] = json.dumps(tree).encode()


class Acts:
    """A pickle of it creates a file."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (open, (self.marker, "w"))


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def opening(marker: str) -> str:
    return f"__import__('builtins').open({marker!r},'w')"


# ---- what acts when torch.export.load reads it


def sample_inputs(parts: dict[str, bytes], marker: str) -> None:
    parts[SAMPLES] = pickled(((Acts(marker),), {}))


def legacy_weights(parts: dict[str, bytes], marker: str) -> None:
    parts["archive/data/weights/model.pt"] = pickled({"x": Acts(marker)})


def legacy_constants(parts: dict[str, bytes], marker: str) -> None:
    parts["archive/data/constants/model.pt"] = pickled({"x": Acts(marker)})


def pickled_weight(parts: dict[str, bytes], marker: str) -> None:
    edited(
        parts,
        lambda tree: tree["config"]["linear.bias"].update(use_pickle=True),
        "archive/data/weights/model_weights_config.json",
    )
    parts["archive/data/weights/weight_1"] = pickled(Acts(marker))


def opaque_constant(parts: dict[str, bytes], marker: str) -> None:
    meta = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    edited(parts, lambda tree: tree["config"].update(thing=meta), "archive/data/constants/model_constants_config.json")
    parts["archive/data/constants/opaque_obj_0"] = pickle.dumps(Acts(marker))


def expression(parts: dict[str, bytes], marker: str) -> None:
    size = {"as_expr": {"expr_str": opening(marker), "hint": None}}
    edited(parts, lambda tree: tree["graph_module"]["graph"]["tensor_values"]["x"]["sizes"].__setitem__(0, size))


def renamed(old: str, new: Callable[[str], str]) -> Change:
    def change(parts: dict[str, bytes], marker: str) -> None:
        text = parts[MODEL].decode()
        name = json.dumps(new(marker))
        parts[MODEL] = (
            text.replace(f'"name": "{old}"', f'"name": {name}').replace(f'"{old}": {{', f"{name}: {{").encode()
        )

    return change


# A parameter's default is computed when the function that torch writes is defined.
placeholder = renamed("times", lambda marker: f"times=open({marker!r},'w')")


def structure(context: str, kind: str = "builtins.dict") -> Change:
    def change(parts: dict[str, bytes], marker: str) -> None:
        def edit(tree: Any) -> None:
            leaf = {"type": None, "context": None, "children_spec": []}
            spec = {"type": kind, "context": None, "children_spec": [leaf, leaf]}
            own = json.loads(context.replace("MODULE", Path(marker).stem))
            spec["context"] = json.dumps(own) if kind == "builtins.dict" else own
            tree["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps([1, spec])

        edited(parts, edit)

    return change


enumeration = structure('[{"__enum__": true, "fqn": "MODULE:name", "name": "x"}, "rows"]')
beside = structure(
    '[{"__enum__": true, "fqn": "http:HTTPStatus", "name": "OK", "x": '
    '{"__enum__": true, "fqn": "MODULE:name", "name": "x"}}, "rows"]'
)
default_factory = structure(
    '{"default_factory_module": "MODULE", "default_factory_name": "name", "dict_context": ["y", "rows"]}',
    "collections.defaultdict",
)

ACTING: dict[str, Change] = {
    "sample_inputs": sample_inputs,
    "legacy_weights": legacy_weights,
    "legacy_constants": legacy_constants,
    "pickled_weight": pickled_weight,
    "opaque_constant": opaque_constant,
    "expression": expression,
    "placeholder": placeholder,
    "enumeration": enumeration,
    "beside": beside,
    "default_factory": default_factory,
}


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that a hostile one creates; a module of its name does too, when it is imported."""
    found = tmp_path / f"planted_{tmp_path.name}_{random.getrandbits(40):x}"
    module = tmp_path / "modules" / f"{found.name}.py"
    module.parent.mkdir()
    module.write_text(f"open({str(found)!r}, 'w').close()\nname = list\n")
    monkeypatch.syspath_prepend(str(module.parent))
    yield found
    sys.modules.pop(found.name, None)


def acted(marker: Path) -> bool:
    there = marker.exists()
    marker.unlink(missing_ok=True)
    sys.modules.pop(marker.name, None)
    return there


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(argv) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("change", ACTING.values(), ids=ACTING)
def test_what_would_act(
    change: Change, net: bytes, tmp_path: Path, marker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = members(net)
    change(parts, str(marker))
    path = tmp_path / "hostile.pt2"
    path.write_bytes(written(parts))
    with contextlib.suppress(Exception):  # it has acted then
        torch.export.load(path)
    assert acted(marker)
    for argv in (["plan", str(path)], ["lower", str(path), "-o", str(tmp_path / "out.pte")]):
        told = refusal(argv, capsys)
        assert "it could run code here" in told and "--trust" in told and not acted(marker)
    with pytest.raises(UnsafeFileError):
        read_program(path)
    assert not acted(marker) and not (tmp_path / "out.pte").exists()


def test_trust_loads_it_as_torch_does(
    net: bytes, tmp_path: Path, marker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Kept(Acts):
        def __reduce__(self) -> Any:
            return (os.mkdir, (self.marker,))

    parts = members(net)
    parts[SAMPLES] = pickled(((Kept(str(marker)), torch.ones(1)), {}))
    path, out = tmp_path / "trusted.pt2", tmp_path / "out.pte"
    path.write_bytes(written(parts))
    assert "'posix.mkdir'" in refusal(["lower", str(path), "-o", str(out)], capsys) and not marker.exists()
    assert cli.main(["lower", "--trust", str(path), "-o", str(out)]) == 0
    assert marker.is_dir() and out.exists()
    capsys.readouterr()
    for command in ("lower", "plan", "verify"):
        assert cli.main([command, "--help-all"]) == 0
        told = capsys.readouterr().out
        assert "--trust" in told and "somebody you trust" in told


# ---- what torch.export.save writes


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


pytree._register_namedtuple(Pair, serialized_type_name="tests.hostile_pt2.Pair")


class Sizes(nn.Module):
    """Symbolic integers, floats and bools, with and without a value at export."""

    def forward(self, x: torch.Tensor, n: int) -> Any:
        found = x.nonzero()
        count = x.sum().to(torch.int64).item()
        torch._check(count > 0)
        torch._check(count < 8)
        half = x.shape[0] // 2 + (x.shape[1] + 3) % 4
        flat = x.reshape(x.shape[0] * x.shape[1])[: torch.sym_min(x.shape[0] * 2, 10)]
        return found, torch.zeros(count), flat * torch.sym_float(half), x.reshape(-1)[: n * 2] * 0.5


class Kinds(nn.Module):
    """Weights that share memory, that are empty, of many dtypes and strides."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.randn(4, 6))
        self.tied = self.whole
        self.register_buffer("part", self.whole.detach()[1:3, ::2])
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("wide", torch.ones(1).expand(1000))
        self.register_buffer("windows", torch.arange(10.0).unfold(0, 4, 1))
        for number, dtype in enumerate((torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.float64)):
            self.register_buffer(f"b{number}", torch.ones(2).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.whole + self.tied.sum() + self.part.sum() + self.none.sum() + self.wide.sum() + self.windows.sum()
        return y + self.b0.sum() + self.b1.sum() + self.b2.sum() + self.b3.sum() + self.b4.sum()


class Gradless(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * 2
        return torch.vmap(lambda row: row + 1)(y)


class Takes(nn.Module):
    def forward(self, pair: Pair, table: dict[str, Any]) -> Pair:
        return Pair(pair.second + table["a"][0], pair.first)


class Quantized(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = torch.ops.quantized_decomposed.quantize_per_tensor(x, 0.1, 0, -128, 127, torch.int8)
        return torch.ops.quantized_decomposed.dequantize_per_tensor(q, 0.1, 0, -128, 127, torch.int8)


def programs() -> dict[str, Callable[[], ExportedProgram]]:
    import executorch.exir  # registers quantized_decomposed  # noqa: F401

    any_size = Dim.DYNAMIC
    x = torch.ones(5, 3)
    return {
        "arguments": lambda: export(Net(), (torch.randn(5, 4),), {"shift": torch.ones(3), "times": 2}),
        "nested": lambda: export(Nested(), (torch.ones(3),)),
        "sizes": lambda: export(Sizes(), (x, 4), dynamic_shapes=({0: any_size, 1: any_size}, any_size)),
        "kinds": lambda: export(Kinds(), (torch.randn(2, 4),)),
        "gradless": lambda: export(Gradless(), (x,)),
        "decomposed": lambda: export(Net(), (torch.randn(5, 4),), {"shift": torch.ones(3)}).run_decompositions(),
        "classes": lambda: export(Takes(), (Pair(x, x + 1), {"a": [x]})),
        "quantized": lambda: export(Quantized(), (x,)),
        "strict": lambda: export(Net(), (torch.randn(5, 4),), {"shift": torch.ones(3)}, strict=True),
        "lstm": lambda: export(nn.LSTM(4, 3), (torch.randn(2, 4),)),
    }


@pytest.mark.parametrize("name", list(programs()))
def test_an_ordinary_program_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(saved(programs()[name]()))
    found = read_program(path)
    found.validate()
    assert (found.example_inputs is None) == (name == "classes")  # unpickling a class is not safe


def old_format(archive: bytes) -> dict[str, bytes]:
    """The files of PyTorch 2.7 and before."""
    program = torch.export.load(io.BytesIO(archive))
    return {
        "version": b"8.1",
        "serialized_exported_program.json": members(archive)[MODEL],
        "serialized_state_dict.pt": pickled(dict(program.state_dict)),
        "serialized_constants.pt": pickled(dict(program.constants)),
        "serialized_example_inputs.pt": pickled(program.example_inputs),
    }


@pytest.mark.parametrize("member", ["", "state_dict", "constants", "example_inputs"])
def test_the_format_before_archives(member: str, net: bytes, tmp_path: Path, marker: Path) -> None:
    parts = old_format(net)
    path = tmp_path / "old.pt2"
    path.write_bytes(written(parts))
    if not member:
        read_program(path).validate()
        return
    parts[f"serialized_{member}.pt"] = pickled({"x": Acts(str(marker))})
    path.write_bytes(written(parts))
    with contextlib.suppress(Exception):
        torch.export.load(path)
    assert acted(marker)
    with pytest.raises(UnsafeFileError, match="open"):
        read_program(path)
    assert not acted(marker)


# ---- what is refused beside


def on_call(target: str) -> Change:
    def change(parts: dict[str, bytes], _: str) -> None:
        edited(parts, lambda tree: tree["graph_module"]["graph"]["nodes"][0].update(target=target))

    return change


def model(path: str, value: Any) -> Change:
    """Set a part of the model's JSON, by its path."""

    def edit(tree: Any) -> None:
        *way, last = [int(step) if step.isdigit() else step for step in path.split("/")]
        for step in way:
            tree = tree[step]
        tree[last] = value

    return lambda parts, _: edited(parts, edit)


def compiled(parts: dict[str, bytes], _: str) -> None:
    parts["archive/data/aotinductor/model/model.wrapper.so"] = b"\x7fELF"


def script_object(parts: dict[str, bytes], _: str) -> None:
    meta = {"path_name": "custom_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    edited(parts, lambda tree: tree["config"].update(thing=meta), "archive/data/constants/model_constants_config.json")
    parts["archive/data/constants/custom_obj_0"] = b""


GRAPH = "graph_module/graph"
SIGNATURE = "graph_module/module_call_graph/0/signature"
UNSAFE: dict[str, Change] = {
    "a function": on_call("torch.os.system"),
    "a loader": on_call("torch.ops.load_library"),
    "an operator that writes a file": on_call("torch.ops.aten.from_file.default"),
    "an operator of TorchScript": on_call("torch.ops.aten._print.default"),
    "a namespace": on_call("torch.ops.profiler._record_function_enter.default"),
    "a higher-order operator": on_call("torch.ops.higher_order.call_torchbind"),
    "an attribute of an operator": on_call("torch.ops.aten.linear.default.__class__"),
    "a node's name": model(f"{GRAPH}/nodes/0/name", "a=1;b"),
    "a parameter's name": model(f"{SIGNATURE}/forward_arg_names", ["x=print(1)", "shift", "times"]),
    "a buffer's name": model("graph_module/signature/input_specs/2/buffer/buffer_name", 'b" if print(1) else "b'),
    "quotation marks in a guard": model("guards_code", ["L['a\"b'].size()[0] > 1"]),
    "two programs": lambda parts, _: parts.update({"archive/models/other.json": parts[MODEL]}),
    "two formats": lambda parts, _: parts.update({"serialized_exported_program.json": parts[MODEL]}),
    "a list of sizes": model(f"{GRAPH}/sym_int_values/mul_2", {"as_expr": {"expr_str": ["s0"], "hint": None}}),
    "a guard": model("guards_code", ["__import__('os').abort() or L['x'].size()[0] > 1"]),
    "a symbol": model("range_constraints", {"u99999999999": {"min_val": 0, "max_val": 5}}),
    "a custom class": model(f"{GRAPH}/custom_obj_values", {"x": {"name": "x", "class_fqn": "a.b"}}),
    "compiled code": compiled,
    "an object of TorchScript": script_object,
}


@pytest.mark.parametrize("name", UNSAFE)
def test_what_is_none_of_the_ordinary(name: str, net: bytes, tmp_path: Path) -> None:
    parts = members(net)
    UNSAFE[name](parts, "")
    path = tmp_path / "hostile.pt2"
    path.write_bytes(written(parts))
    with pytest.raises(UnsafeFileError) as caught:
        read_program(path)
    assert len(str(caught.value)) < 400


def test_a_buffer_whose_name_is_code(tmp_path: Path, marker: Path) -> None:
    """It acts when the module is called, in code that torch makes."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.b

    parts = members(saved(export(Adds(), (torch.ones(3),))))
    name = json.dumps(f'b" if open("{marker}","w") else "b')
    for member in (MODEL, "archive/data/weights/model_weights_config.json"):
        text = parts[member].decode().replace('"buffer_name": "b"', f'"buffer_name": {name}')
        parts[member] = text.replace('"b": {"path_name"', f'{name}: {{"path_name"').encode()
    path = tmp_path / "hostile.pt2"
    path.write_bytes(written(parts))
    with pytest.raises(AttributeError):
        torch.export.load(path).module()(torch.ones(3))
    assert acted(marker)
    with pytest.raises(UnsafeFileError, match="weight"):
        read_program(path)
    assert not acted(marker)


def test_graphs_in_graphs_are_checked(nested: bytes, tmp_path: Path) -> None:
    parts = members(nested)
    parts[MODEL] = parts[MODEL].replace(b"torch.ops.aten.sub.Tensor", b"torch.os.system")
    path = tmp_path / "hostile.pt2"
    path.write_bytes(written(parts))
    with pytest.raises(UnsafeFileError, match=r"torch\.os\.system"):
        read_program(path)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "change",
    [
        lambda parts, _: parts.update({MODEL: DEEP.encode()}),
        lambda parts, _: parts.update({MODEL: b"\xff"}),
        model(f"{GRAPH}/nodes/0/metadata", {"custom": DEEP}),
        model(f"{GRAPH}/nodes/0/metadata", {"custom": "nonsense"}),
        model(f"{SIGNATURE}/in_spec", f"[1, {DEEP}]"),
        model(f"{GRAPH}/nodes/0/name", 7),
        model(f"{GRAPH}/tensor_values/x/dtype", "7"),
        model(f"{GRAPH}/nodes/0/target", "torch.ops.aten.no_such_operator.default"),
        lambda parts, _: parts.pop("archive/data/weights/weight_0"),
        lambda parts, _: parts.update({"archive/data/weights/weight_0": b"123"}),
        lambda parts, _: parts.update({SAMPLES: b"no pickle"}),
    ],
)
def test_damage(change: Change, net: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = members(net)
    change(parts, "")
    path = tmp_path / "damaged.pt2"
    path.write_bytes(written(parts))
    told = refusal(["plan", str(path)], capsys)
    assert "Cannot read" in told and "Traceback" not in told and len(told) < 1500


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('s77', positive=True, integer=True)",
        "Add(Mul(Integer(2), Symbol('s0', integer=True)), Integer(-3))",
        "Mod(FloorDiv(Add(Symbol('s0', integer=True), Integer(1)), Integer(2)), Integer(4))",
        "Pow(Symbol('s0', integer=True), Integer(2))",
        "Max(Integer(1), Min(Symbol('u0', integer=True), Integer(10)))",
        "FloatPow(ToFloat(Symbol('s0', integer=True)), Float('0.5', precision=53))",
        "Mul(Rational(1, 2), Symbol('s0'))",
        "Pow(Symbol('s0'), Rational(-1, 2))",
        "StrictGreaterThan(Symbol('u1', integer=True), Integer(0))",
        "And(Ne(Symbol('u1'), Integer(0)), Equality(Symbol('s0'), Integer(1)))",
        "OpaqueUnaryFn_sqrt(ToFloat(Symbol('s0')))",
        "2*s0 + s1**2 - (s0//2) % 3",
        "Max(1, s0 - 2) < 10",
        "true",
    ],
)
def test_expressions_of_torch(text: str) -> None:
    check_text("symbolic expression", text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "().__class__",
        "s0.__class__",
        "lambda: 1",
        "[1 for _ in s0]",
        "eval('1')",
        "Symbol('s0).x')",
        "Symbol(s0)",
        "Symbol('s0', name=open)",
        "Symbol(*s0)",
        "Integer('1')",
        "2^10^10",
        "'a'",
        "1j",
        "s0\n+1",
        "\uff530",
        "(" * 300 + "1" + ")" * 300,
        "s0 if s0 else s1",
        "f'{s0}'",
        "(x := 1)",
        "s0[0]",
        "0.2[1]",
        "factorial(s0)",
        "print",
    ],
)
def test_expressions_that_are_no_sizes(text: str) -> None:
    with pytest.raises(UnsafeFileError, match=r"unsafe|characters"):
        check_text("symbolic expression", text)


def test_guards() -> None:
    for text in (
        "min(10, 2*L['x'].size()[0]) <= L['x'].size()[1]*L['x'].size()[0]",
        "2*L['n'] >= 0 and 2*L['n'] <= L['x']['k'][0].stride()[1]",
        "not Mod(L['args'][0].size()[0], 2) != 0",
        "math.floor(L['x'].size()[0]) == 3",
    ):
        check_text("guard", text)
    for text in (
        "L.__class__",
        "L['x'].__class__",
        "L['x'].tofile('a')",
        "math.os",
        "print(L)",
        "L[\"'] or print(1) or L['\"]",
        "torch.load('x')",
    ):
        with pytest.raises(UnsafeFileError):
            check_text("guard", text)


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container in JSON with each key that it has."""
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    own = [(tree, key) for key in keys]
    return own + [place for _, key in own for place in places(tree[key])]


def test_devices_that_are_not_here(net: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "elsewhere.pt2"
    for member in (MODEL, "archive/data/weights/model_weights_config.json"):
        parts = members(net)
        parts[member] = parts[member].replace(b'"type": "cpu"', b'"type": "mps"')
        assert parts != members(net)
        path.write_bytes(written(parts))
        for trust in ([], ["--trust"]):
            told = refusal(["lower", str(path), "-o", str(tmp_path / "model.pte"), *trust], capsys)
            assert "the device 'mps', which this machine does not have" in told and "model.cpu()" in told
            assert "Traceback" not in told and str(path) in told


ODD = (None, True, -1, 2**70, 0.5, float("nan"), "", "x", "__class__", "os:abort", [], {}, [[]], {"as_int": 1})


def test_mutations_end_in_an_error_or_the_program(net: bytes, tmp_path: Path) -> None:
    """Parts of the JSON are replaced by others, or by odd ones: an error says what is wrong, or it is a program."""
    generator = random.Random(0)
    parts = members(net)
    path = tmp_path / "mutant.pt2"
    ends = {"program": 0, "error": 0}
    for _ in range(int(os.environ.get("EXIR_LOWERING_EXAMPLES", "100"))):
        member = generator.choice([name for name in parts if name.endswith("json")])
        tree = json.loads(parts[member])
        for _ in range(generator.randint(1, 2)):
            found = places(tree)
            (one, key), (other, where) = generator.choice(found), generator.choice(found)
            one[key] = generator.choice((*ODD, *[json.loads(json.dumps(other[where]))] * 5))
        path.write_bytes(written({**parts, member: json.dumps(tree).encode()}))
        try:
            assert isinstance(read_program(path), ExportedProgram)
            ends["program"] += 1
        except InputError:
            ends["error"] += 1
        except Exception as error:  # what torch says of a graph that does not fit together
            assert not isinstance(error, (MemoryError, SystemError)), error
            ends["error"] += 1
    assert all(ends.values()), ends
