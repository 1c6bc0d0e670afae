"""A lowered module: called as the original, executed by its delegates, saved with what was set on it."""

import copy
import dataclasses
import gc
import inspect
import math
import os
import pickle
import textwrap
import warnings
import weakref

import forked
import pytest
import torch
from executorch.devtools import BundledProgram
from executorch.devtools.bundled_program.config import MethodTestCase, MethodTestSuite
from executorch.devtools.bundled_program.serialize import (
    deserialize_from_flatbuffer_to_bundled_program,
    serialize_from_bundled_program_to_flatbuffer,
)
from executorch.exir import ExecutorchBackendConfig
from executorch.exir._serialize._program import deserialize_pte_binary
from lowering_support import TagPartitioner, by_operator, without_address
from scripted import ScriptBackend, ScriptDelegate
from torch import nn
from torch.export import Dim, export
from torch.utils import _pytree as pytree

from exir_lowering import (
    BackendUnavailableError,
    BackendUnavailableWarning,
    InputError,
    LoweredModule,
    load,
    lower,
)
from exir_lowering.backends.reference import ReferenceDelegate
from exir_lowering.lowered_module import record
from exir_lowering.partitioners import SupportPartitioner, everything, ops
from exir_lowering.pte import assembling

ADD, MUL = "aten.add.Tensor", "aten.mul.Tensor"


class Rich(nn.Module):
    """Every kind of argument and of result."""

    def forward(self, x, flag=True, name="a", scale=2.5, pair=None, *, mask=None, table=None):
        y = x * scale if flag else x
        return {
            "y": y,
            "nothing": None,
            "count": 3,
            "rows": x.shape[0],
            "same": y,
            "given": x,
            "nested": (y + pair[0], [mask * table["b"] - table["a"]]),
            "flag": flag,
            "name": name,
        }


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return torch.cumsum(self.second(torch.erf(self.first(x))), 0)


class Count(nn.Module):
    """State that does not start at zero."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.arange(3.0))

    def forward(self, x):
        self.total.add_(x)
        return self.total * 2


class AddMul(nn.Module):
    def forward(self, x, y):
        return (x + y) * y


class Writes(nn.Module):
    """Writes into an input, and into a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x, pair):
        self.total.add_(x)
        pair[1].add_(1)
        x.mul_(2)
        return {"sum": x + pair[0], "three": 3}, self.total * 2


@dataclasses.dataclass
class Point:
    x: torch.Tensor
    y: torch.Tensor


pytree.register_dataclass(Point, serialized_type_name="tests.Point")


@dataclasses.dataclass
class Unwritable:
    x: torch.Tensor


pytree.register_pytree_node(
    Unwritable,
    lambda one: ([one.x], None),
    lambda items, _: Unwritable(*items),
    flatten_with_keys_fn=lambda one: ([(pytree.GetAttrKey("x"), one.x)], None),
)


class Points(nn.Module):
    def __init__(self, kind=Point):
        super().__init__()
        self.kind = kind

    def forward(self, p):
        return Point(p.y + 1, p.x * 2) if self.kind is Point else Unwritable(p.x + 1)


def rich_call(seed=1):
    torch.manual_seed(seed)
    table = {"a": torch.randn(3), "b": torch.randn(3)}
    return (torch.randn(2, 3), True, "q", 2.5, [torch.randn(1), 7]), {"mask": torch.randn(2, 3), "table": table}


def assert_same(got, expected):
    got_leaves, got_spec = pytree.tree_flatten(got)
    leaves, spec = pytree.tree_flatten(expected)
    assert got_spec == spec
    for one, other in zip(got_leaves, leaves, strict=True):
        assert type(one) is type(other)
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        else:
            assert one == other


def message_of(call, error=InputError):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


@pytest.fixture(scope="module")
def rich():
    args, kwargs = rich_call(0)
    return lower(export(Rich(), args, kwargs), "xnnpack")


@pytest.fixture(scope="module")
def rich_module(rich):
    return rich.module()


@pytest.fixture(scope="module")
def mixed():
    """XNNPACK, the reference delegate and portable kernels, with a dynamic batch; and a method without a delegate."""
    torch.manual_seed(0)
    model = Mixed().eval()
    program = export(model, (torch.randn(4, 4),), dynamic_shapes={"x": {0: Dim("batch", min=1, max=16)}})
    partitioners = {"forward": ["xnnpack", SupportPartitioner({"reference": ops("aten.erf")})], "plain": "xnnpack"}
    programs = {"forward": program, "plain": program, "add-mul": export(AddMul(), (torch.ones(3), torch.ones(3)))}
    return model, lower(programs, partitioners)


@pytest.fixture
def adding():
    """Two methods, one of which needs the backend of `ScriptBackend`."""
    program = export(AddMul(), (torch.ones(3), torch.ones(3)))
    partitioners = {"one": TagPartitioner(by_operator(ADD), "script")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BackendUnavailableWarning)
        return lower({"one": program, "two": program}, partitioners, backends={"script": ScriptBackend()})


class TestCalls:
    def test_arguments_and_results_have_the_structure_of_the_original(self, rich):
        module = rich.module()
        args, kwargs = rich_call()
        expected = Rich()(*args, **kwargs)
        assert_same(module(*args, **kwargs), expected)
        # In any mix; a fixed value may be left out, and a dict's keys come in any order.
        flipped = {"table": dict(reversed(kwargs["table"].items())), "mask": kwargs["mask"]}
        assert_same(module(args[0], pair=args[4], **flipped), expected)
        assert_same(module.forward(pair=args[4], name="q", x=args[0], **flipped), expected)

    def test_the_signature_shows_the_parameters(self, rich_module):
        signature = inspect.signature(rich_module.forward)
        assert str(signature) == "(x, flag=True, name='q', scale=2.5, pair, *, mask, table)"
        assert [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY] == ["mask", "table"]

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda a, k: (a[1:], k), ["missing a required argument", "'pair'"]),
            (lambda a, k: ((*a, 1, 2), k), ["too many positional arguments"]),
            (lambda a, k: (a, {**k, "other": 1}), ["unexpected keyword argument 'other'"]),
            (lambda a, k: ((a[0], False, *a[2:]), k), ["argument 'flag' is the bool False", "fixed to True"]),
            (lambda a, k: ((*a[:4], [a[4][0], 8]), k), ["argument 'pair'[1]", "fixed to 7"]),
            (lambda a, k: ((*a[:4], [a[4][0]]), k), ["argument 'pair' has a different structure"]),
            (lambda a, k: (([a[0]], *a[1:]), k), ["argument 'x' is a list, expected a single value"]),
            (lambda a, k: ((a[0].double(), *a[1:]), k), ["argument 'x'", "float64", "expected", "float32"]),
            (lambda a, k: ((a[0][:1], *a[1:]), k), ["argument 'x'", "dimension 0 is 1, not 2"]),
            (lambda a, k: (a, {**k, "table": {"a": 1, "c": 2}}), ["argument 'table'", "missing key(s): {'b'}"]),
        ],
    )
    def test_wrong_arguments_are_named(self, rich_module, change, words):
        args, kwargs = change(*rich_call())
        message = message_of(lambda: rich_module(*args, **kwargs))
        assert message.startswith("forward()") and all(word in message for word in words), message

    def test_delegates_of_three_kinds_with_a_dynamic_batch(self, mixed):
        model, lowered = mixed
        module = lowered.module()
        for size in (4, 1, 16, 7):
            x = torch.randn(size, 4)
            assert_same(module(x), model(x))
        assert "at most [16, 4]" in message_of(lambda: module(torch.randn(17, 4)))

    def test_a_name_that_nn_module_has_is_called_by_method(self):
        program = export(AddMul(), (torch.ones(3), torch.ones(3)))
        module = lower({"train": program, "save": program}).module()
        x, y = torch.randn(3), torch.randn(3)
        assert_same(module.method("train")(x, y), AddMul()(x, y))
        assert_same(module.method("save")(x, y), AddMul()(x, y))
        assert "module.method('train')" in message_of(module.train, NotImplementedError)
        assert "no method 'forward'; it has 'train', 'save'" in message_of(lambda: module(x, y))
        assert not hasattr(module, "forward")

    def test_a_registered_type_goes_in_and_comes_out(self):
        point = Point(torch.randn(3), torch.randn(3))
        lowered = lower(export(Points(), (point,)), "xnnpack")
        module = lowered.module()
        assert_same(module(point), Points()(point))
        assert "argument 'p' has a different structure" in message_of(lambda: module((point.x, point.y)))


class TestWrittenInputs:
    @pytest.fixture(scope="class", params=[None, "reference"])
    def lowered(self, request):
        return lower(export(Writes(), (torch.ones(3), [torch.ones(3), torch.ones(3)])), request.param)

    @pytest.mark.parametrize("how", ["runtime", "loaded"])
    def test_the_callers_tensors_are_written_as_in_eager(self, lowered, how, tmp_path):
        if how == "loaded":
            module = LoweredModule.load(lowered.module().save(tmp_path / "model.pte"))
        else:
            module = lowered.module()
        eager = Writes()
        mine, theirs = ([torch.arange(6.0)[::2], [torch.ones(3), torch.zeros(3)]] for _ in range(2))
        for _ in range(2):
            assert_same(module(*mine), eager(*theirs))
            assert_same(mine, theirs)

    def test_a_tensor_that_cannot_be_written_into(self, lowered):
        message = message_of(lambda: lowered.module()(torch.ones(1).expand(3), [torch.ones(3), torch.ones(3)]))
        assert "forward(): argument 'x' is" in message and "writes into" in message and ".clone()" in message


class TestState:
    @pytest.fixture(scope="class", params=["host", "delegate"])
    def lowered(self, request):
        program = export(Count(), (torch.ones(3),))
        if request.param == "host":
            return lower(program)
        lowered = lower(program, SupportPartitioner({"reference": everything()}, own_state=True))
        assert lowered.report.methods[0].coverage == 1.0
        return lowered

    def test_it_starts_as_the_models_and_is_the_modules_own(self, lowered):
        first, second, eager = lowered.module(), lowered.module(), Count()
        results = []
        for step in range(3):
            x = torch.full((3,), step + 1.0)
            results.append((first(x), eager(x).clone()))
        for got, expected in results:  # later runs do not change what was returned
            assert_same(got, expected)
        assert_same(second(torch.ones(3)), Count()(torch.ones(3)))
        assert_same(lowered.module()(torch.ones(3)), Count()(torch.ones(3)))
        first.reset()
        assert_same(first(torch.ones(3)), Count()(torch.ones(3)))


ATTRIBUTES = {
    "version": "1.2",
    "lone": "\ud800",
    "count": 3,
    "large": 2**70,
    "nan": float("nan"),
    "endless": -math.inf,
    "nothing": None,
    "labels": ["cat", "dog", None],
    "pair": (1, (2.5, False)),
    "empty": [[], (), {}],
    "sizes": {"a": [1, 2], 3: {"deep": (None, {"b": [float("inf")]})}, (1, 2): True},
    "tensor": torch.arange(6.0).reshape(2, 3),
    "zero_sized": torch.ones(0, 3),
    "flag": torch.tensor([True, False]),
    "halves": torch.ones(3, dtype=torch.bfloat16),
    "complex": torch.tensor([1 + 2j]),
    "strided": torch.arange(6.0).reshape(2, 3).T,
    "channels_last": torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last),
    "nested_tensors": [torch.ones(2), {"a": torch.arange(3)}],
}


def assert_attribute(got, expected):
    if isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(got)
    else:
        leaves, spec = pytree.tree_flatten(expected)
        got_leaves, got_spec = pytree.tree_flatten(got)
        assert spec == got_spec
        for one, other in zip(got_leaves, leaves, strict=True):
            assert type(one) is type(other)
            assert torch.equal(one, other) and one.dtype == other.dtype if torch.is_tensor(other) else one == other


class TestAttributes:
    @pytest.fixture(scope="class")
    def saved(self, mixed, tmp_path_factory):
        module = mixed[1].module()
        for name, value in ATTRIBUTES.items():
            setattr(module, name, value)
        path = module.save(tmp_path_factory.mktemp("attributes") / "model.pte")
        return path, LoweredModule.load(path)

    @pytest.mark.parametrize("name", ATTRIBUTES)
    def test_they_come_back(self, saved, name):
        assert_attribute(getattr(saved[1], name), ATTRIBUTES[name])

    def test_the_methods_are_the_same(self, saved, mixed):
        for size in (1, 5):
            x = torch.randn(size, 4)
            assert_same(saved[1](x), mixed[0](x))

    def test_they_can_be_changed_and_saved_again(self, saved, mixed, tmp_path):
        path, module = saved[0], LoweredModule.load(saved[0])
        module.version, module.tensor, module.added = "1.3", torch.ones(500), [torch.zeros(2)]
        module.sizes["new"] = 1
        del module.labels
        again = LoweredModule.load(module.save(tmp_path / "again.pte"))
        assert again.version == "1.3" and again.sizes["new"] == 1 and not hasattr(again, "labels")
        assert_attribute([again.tensor, again.added], [torch.ones(500), [torch.zeros(2)]])
        assert_attribute(again.halves, ATTRIBUTES["halves"])
        x = torch.randn(3, 4)
        assert_same(again(x), mixed[0](x))
        # What was there before goes: saved as at first, the file is the first one.
        for name in (*ATTRIBUTES, "added"):
            if hasattr(again, name):
                delattr(again, name)
        for name, value in ATTRIBUTES.items():
            setattr(again, name, value)
        assert again.save(tmp_path / "third.pte").read_bytes() == path.read_bytes()

    def test_payloads_and_weights_are_those_of_emit(self, saved, mixed):
        before, after = (deserialize_pte_binary(c) for c in (mixed[1].emit().buffer, saved[0].read_bytes()))
        assert before.program == after.program
        # The last ones are what the module keeps, and the digests.
        assert list(after.named_data.pte_data)[-2:] == ["exir_lowering.module", "exir_lowering.digests"]
        assert after.named_data.pte_data.keys() - before.named_data.pte_data.keys() == {"exir_lowering.module"}
        assert before.named_data.buffers[:-1] == after.named_data.buffers[:-2]

    def test_it_can_take_the_place_of_the_file_that_it_was_loaded_from(self, mixed, tmp_path):
        module = mixed[1].module()
        module.version = "1"
        loaded = LoweredModule.load(module.save(tmp_path / "model.pte"))
        loaded.version = "2"
        loaded.save(tmp_path / "model.pte")
        loaded.version = "3"
        loaded.save(tmp_path / "model.pte")
        assert LoweredModule.load(tmp_path / "model.pte").version == "3"
        assert sorted(os.listdir(tmp_path)) == ["model.debug.json", "model.pte"]
        x = torch.randn(3, 4)
        assert_same(loaded(x), mixed[0](x))

    @pytest.mark.parametrize(
        ("value", "kind"),
        [
            (object(), "builtins.object"),
            ({"a": [1, {2}]}, "['a'][1] is a builtins.set"),
            (nn.Parameter(torch.ones(1)), "torch.nn.parameter.Parameter"),
            (torch.ones(2, device="meta"), "on meta"),
            (torch.float32, "torch.dtype"),
        ],
        ids=without_address,
    )
    def test_what_cannot_be_stored_is_named_and_nothing_is_written(self, rich, tmp_path, value, kind):
        module = rich.module()
        module.sizes = value
        message = message_of(lambda: module.save(tmp_path / "model.pte"))
        assert "'sizes'" in message and kind in message
        assert not list(tmp_path.iterdir())

    def test_a_name_that_is_taken_is_refused_when_it_is_set(self, rich_module):
        assert "has a method of that name" in message_of(lambda: setattr(rich_module, "forward", 1))
        for name in ("to", "save", "state_dict", "method_names"):
            assert "a name of nn.Module" in message_of(lambda name=name: setattr(rich_module, name, 1))

    @pytest.mark.parametrize("name", ["register_buffer", "register_parameter", "add_module", "register_module"])
    def test_what_a_module_would_not_save_is_refused(self, rich_module, name):
        message = message_of(lambda: getattr(rich_module, name)("mean", None))
        assert message.startswith("'mean' cannot be registered") and "set an attribute" in message

    def test_a_missing_one(self, rich_module):
        assert "no method or attribute 'nope'; it has forward" in message_of(lambda: rich_module.nope, AttributeError)
        with pytest.raises(AttributeError):
            del rich_module.nope


class TestFiles:
    def test_a_process_that_knows_nothing_of_the_model(self, rich, tmp_path):
        module = rich.module()
        module.labels = ["a", "b"]
        args, kwargs = rich_call()
        module.bundled_inputs = {"forward": [{"x": args[0], "pair": args[4], **kwargs}]}
        module.save(tmp_path / "model.pte")
        script = """
            import inspect, sys, torch
            from exir_lowering import LoweredModule
            module = LoweredModule.load("model.pte")
            print(module.labels, inspect.signature(module.forward))
            (call,) = module.bundled_inputs["forward"]
            result = module(**call)
            assert torch.equal(result["nested"][0], call["x"] * 2.5 + call["pair"][0])
            print({key: value for key, value in result.items() if not torch.is_tensor(value) and key != "nested"})
            assert "pickle" not in str(type(module)) and "test_lowered_module" not in sys.modules
        """
        done = forked.run(textwrap.dedent(script), cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.splitlines()[-2:] == [
            "['a', 'b'] (x, flag=True, name='q', scale=2.5, pair, *, mask, table)",
            "{'nothing': None, 'count': 3, 'rows': 2, 'flag': True, 'name': 'q'}",
        ]

    def test_weights_in_a_data_file(self, tmp_path):
        torch.manual_seed(0)
        model = Mixed().eval()
        lowered = lower(export(model, (torch.randn(4, 4),)))
        module = lowered.module(config=ExecutorchBackendConfig(external_constants=True))
        module.version = "1"
        x = torch.randn(4, 4)
        assert_same(module(x), model(x))
        path = module.save(tmp_path / "model.pte")
        (data,) = tmp_path.glob("*.ptd")
        assert "data=" in message_of(lambda: LoweredModule.load(path))
        loaded = LoweredModule.load(path, data=data)
        assert loaded.version == "1"
        assert_same(loaded(x), model(x))
        (tmp_path / "copy").mkdir()
        loaded.save(tmp_path / "copy" / "model.pte")
        again = LoweredModule.load(tmp_path / "copy" / "model.pte", data=tmp_path / "copy" / data.name)
        assert_same(again(x), model(x))

    def test_the_debug_information_goes_with_it(self, mixed, tmp_path):
        def lines(path):
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # one of another file would be said
                debug = load(path)._file.debug.methods["forward"]
            return [debug.lines(delegate.handles) for delegate in debug.delegates]

        path = mixed[1].module().save(tmp_path / "model.pte")
        assert any("torch.erf" in line for found in lines(path) for line in found)
        loaded = LoweredModule.load(path)
        loaded.version = "1"
        first, again = lines(path), loaded.save(tmp_path / "again.pte")
        assert path.read_bytes() != again.read_bytes() and lines(again) == first
        loaded.version = "2"
        assert lines(loaded.save(path)) == first
        # Without it nothing is known, and what lies there from another file goes.
        path.with_suffix(".debug.json").unlink()
        LoweredModule.load(path).save(again)
        assert sorted(os.listdir(tmp_path)) == ["again.pte", "model.pte"]

    def test_a_file_that_no_module_wrote(self, rich, mixed, tmp_path):
        path = mixed[1].emit().save(tmp_path / "model.pte")
        assert "not saved by LoweredModule.save" in message_of(lambda: LoweredModule.load(path))
        assert "no such file" in message_of(lambda: LoweredModule.load(tmp_path / "other.pte"))
        assert "got a int" in message_of(lambda: LoweredModule.load(3))
        content = memoryview(mixed[1].module().save(path).read_bytes())
        for text, words in (("{", "damaged"), ('{"version": 2}', "version 2"), ('{"version": 1}', "damaged")):
            path.write_bytes(b"".join(assembling.with_module(content, record.pack(text, []))))
            assert words in message_of(lambda: LoweredModule.load(path))


class TestBundledInputs:
    def test_they_are_saved(self, mixed, tmp_path):
        model, lowered = mixed
        module = lowered.module()
        calls = [(torch.randn(3, 4),), (torch.randn(5, 4),)]
        module.bundled_inputs = {"forward": calls, "add-mul": [{"y": torch.ones(3), "x": torch.randn(3)}]}
        loaded = LoweredModule.load(module.save(tmp_path / "model.pte"))
        assert_same(loaded.bundled_inputs["forward"], tuple(calls))
        loaded.version = "2"
        again = LoweredModule.load(loaded.save(tmp_path / "again.pte"))
        assert_same(dict(again.bundled_inputs), dict(module.bundled_inputs))
        for call in again.bundled_inputs["forward"]:
            assert_same(again(*call), model(*call))
        # ExecuTorch's own bundled program takes the file.
        suite = MethodTestSuite("forward", [MethodTestCase(call, [model(*call)]) for call in calls])
        path = tmp_path / "model.pte"
        bundle = serialize_from_bundled_program_to_flatbuffer(BundledProgram(None, [suite], str(path)))
        assert deserialize_from_flatbuffer_to_bundled_program(bundle).program == (tmp_path / "model.pte").read_bytes()

    def test_they_are_copies(self, mixed):
        module = mixed[1].module()
        module.bundled_inputs = [(torch.ones(2, 4),)]
        module.bundled_inputs["forward"][0][0].zero_()
        assert_same(module.bundled_inputs["forward"], ((torch.ones(2, 4),),))
        with pytest.raises(TypeError):
            module.bundled_inputs["plain"] = []
        with pytest.raises(AttributeError):
            module.bundled_inputs["forward"].append(())

    def test_they_are_checked_when_they_are_set(self, rich_module):
        def setting(value):
            return message_of(lambda: setattr(rich_module, "bundled_inputs", value))

        assert "no method 'other'" in setting({"other": []})
        assert "missing a required argument: 'x'" in setting([()])
        assert "a list of calls" in setting({"forward": (torch.ones(3))})
        assert rich_module.bundled_inputs == {}


class TestAvailability:
    def test_making_the_module_warns_once_and_the_other_method_runs(self, adding, tmp_path):
        x, y = torch.randn(3), torch.randn(3)
        with pytest.warns(BackendUnavailableWarning) as caught:
            module = adding.module()
        caught = [one for one in caught if one.category is BackendUnavailableWarning]
        assert len(caught) == 1 and caught[0].filename == __file__
        text = str(caught[0].message)
        assert "'one'" in text and "'script'" in text
        assert text.endswith("execution is still possible by saving and loading where the backend is available.")
        assert_same(module.two(x, y), AddMul()(x, y))
        assert "'script'" in message_of(lambda: module.one(x, y), BackendUnavailableError)
        assert "cannot be executed here" in repr(module)
        # Saved here, and loaded where the backend is.
        module.bundled_inputs = {"one": [(x, y)]}
        path = module.save(tmp_path / "model.pte")
        message_of(lambda: LoweredModule.load(path), BackendUnavailableError)
        loaded = LoweredModule.load(path, delegates=[ScriptDelegate()])
        assert_same(loaded.one(x, y), AddMul()(x, y))
        assert_same(loaded.one(*loaded.bundled_inputs["one"][0]), AddMul()(x, y))

    def test_the_original_graphs_that_the_file_keeps(self, adding, tmp_path):
        x, y = torch.randn(3), torch.randn(3)
        with pytest.warns(BackendUnavailableWarning):
            module = adding.module(keep_originals=True)
        module.version = "1"
        path = module.save(tmp_path / "model.pte")
        message_of(lambda: LoweredModule.load(path), BackendUnavailableError)
        with pytest.warns(BackendUnavailableWarning, match="executed by PyTorch"):
            loaded = LoweredModule.load(path, unavailable="fallback")
        assert_same(loaded.one(x, y), AddMul()(x, y))
        assert loaded.version == "1"


class TestModule:
    def test_it_is_for_inference(self, rich_module):
        assert rich_module.eval() is rich_module.train(False) is rich_module and not rich_module.training
        message_of(rich_module.train, NotImplementedError)
        assert rich_module.state_dict() == {} and list(rich_module.parameters()) == []
        assert rich_module.to("cpu") is rich_module
        assert "torch.float16" in message_of(rich_module.half)
        assert "on meta" in message_of(lambda: rich_module.to("meta"))

    @pytest.mark.parametrize("call", [pickle.dumps, copy.copy, copy.deepcopy])
    def test_no_pickle(self, rich_module, call):
        assert "module.save(path)" in message_of(lambda: call(rich_module), TypeError)

    def test_everything_goes_with_it(self, tmp_path):
        lowered = lower(export(AddMul(), (torch.ones(3), torch.ones(3))), TagPartitioner(by_operator(ADD), "reference"))
        delegate = ReferenceDelegate()
        module = lowered.module(delegates=[delegate])
        module(torch.ones(3), torch.ones(3))
        module.save(tmp_path / "model.pte")
        loaded = LoweredModule.load(tmp_path / "model.pte")
        loaded(torch.ones(3), torch.ones(3))
        gone = [weakref.ref(one) for one in (module, loaded, delegate, lowered["forward"], module.forward)]
        del module, loaded, delegate, lowered
        gc.collect()
        assert [one() for one in gone] == [None] * len(gone)
        assert not [name for name in os.listdir(tmp_path) if name not in ("model.pte", "model.debug.json")]
