"""Variants: each program lowered several times into one file, with weights and state once."""

import copy
import re

import pytest
import torch
from lowering_support import TagPartitioner, by_operator
from scripted import ScriptBackend
from torch import nn
from torch.export import Dim, export
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
from torchao.quantization.granularity import PerGroup
from torchao.utils import unwrap_tensor_subclass

from exir_lowering import (
    BackendUnavailableError,
    BackendUnavailableWarning,
    InputError,
    inspect,
    load,
    lower,
    plan,
    quantize,
    verify,
)
from exir_lowering.backends.xnnpack import xnnpack
from exir_lowering.pte.manifest import BUCKET, Bucket, Crop, Size


class Add(nn.Module):
    def forward(self, x):
        return torch.sigmoid(x) + 1


@pytest.fixture(scope="module")
def program():
    return export(Add(), (torch.ones(2),))


def test_each_method_is_lowered_for_each_variant(program):
    variants = {
        "npu": {"first": [TagPartitioner(by_operator("aten.sigmoid.default")), "xnnpack"]},
        "cpu": "xnnpack",
        "host": None,
    }
    programs = {"first": program, "second": program}
    lowered = lower(programs, variants=variants)
    assert list(lowered) == [f"{name}@{variant}" for variant in variants for name in programs]
    assert lowered.constant_methods == {
        "get_manifest": "exir-lowering methods 1\n"
        "first@npu\techo XnnpackBackend\t\t\nsecond@npu\t\t\t\n"
        "first@cpu\tXnnpackBackend\t\t\nsecond@cpu\tXnnpackBackend\t\t\n"
        "first@host\t\t\t\nsecond@host\t\t\t\n"
    }
    planned = plan(programs, variants=variants)
    assert [(one.name, len(one.partitions)) for one in planned.methods] == [
        (one.name, len(one.partitions)) for one in lowered.report.methods
    ]
    loaded = load(lowered.emit().buffer)
    assert loaded.choose("first", torch.ones(2)).method == "first@cpu"
    assert loaded.choose("second", torch.ones(2)).method == "second@npu"
    assert loaded.run("get_manifest") == [lowered.constant_methods["get_manifest"]]


def test_a_module_has_the_methods(program):
    module = lower(program, variants={"cpu": "xnnpack", "host": None}).module()
    for name in ("forward@cpu", "forward@host"):
        torch.testing.assert_close(getattr(module, name)(torch.ones(2)), Add()(torch.ones(2)))


@pytest.mark.parametrize(
    ("variants", "why"),
    [
        ({}, "got {}, expected a mapping"),
        (["xnnpack"], "expected a mapping"),
        ({"a@b": None}, "got the name 'a@b'"),
        ({"a b": None}, "got the name 'a b'"),
        ({3: None}, "got the name 3"),
        ({"a": 3}, r"variants\['a'\]: got 3, expected an ExecuTorch Partitioner"),
        ({"a": {"forwards": None}}, r"variants\['a'\]: there is no method 'forwards'.*Did you mean 'forward'"),
    ],
)
def test_wrong_variants(program, variants, why):
    for function in (lower, plan):
        with pytest.raises(InputError, match=why):
            function(program, variants=variants)


def test_wrong_names(program):
    with pytest.raises(InputError, match="got partitioners and variants"):
        lower(program, "xnnpack", variants={"a": None})
    for name in ("@a", "forward@", "forward@@a"):
        with pytest.raises(InputError, match=f"got the method name '{name}', expected a name and tags"):
            lower({name: program})
    with pytest.raises(InputError, match="beside 'forward@a', 'forward' names its family"):
        lower({"forward": program, "forward@a": program})
    with pytest.raises(InputError, match="'get_manifest' names its family or the manifest"):
        lower({"get_manifest": program, "forward@a": program})
    assert list(lower({"get_manifest": program})) == ["get_manifest"]
    lowered = lower({"forward@a": program})
    with pytest.raises(InputError, match="constant_methods: 'get_manifest' is made for the families"):
        lowered.emit(constant_methods={"get_manifest": 1})


@pytest.mark.parametrize("name", ["a b", "a\tb"])
def test_an_id_that_a_manifest_cannot_have_is_refused_before_a_backend_is_called(name):
    class Never(ScriptBackend):
        backend_id = name

        def preprocess_all(self, edge_programs, compile_specs):
            raise AssertionError("it was called")

    program = export(nn.ReLU(), (torch.ones(2),))
    with pytest.raises(InputError, match=re.escape(f"is for the backend {name!r}: ids in a manifest have no spaces")):
        lower(program, variants={"x": TagPartitioner(backend=name)}, backends={name: Never})


def test_weights_are_there_once():
    """The file is as large as its largest variant, with the payloads and tables of the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 256)).eval()
    program = export(model, (torch.randn(4, 256),))
    mine = TagPartitioner(by_operator("aten.linear.default", "aten.addmm.default"), "script")
    variants = {"npu": [mine, "xnnpack"], "whole": "xnnpack", "split": xnnpack(per_op_mode=True), "host": None}
    with pytest.warns(BackendUnavailableWarning):
        together = lower(program, variants=variants, backends={"script": ScriptBackend})
        alone = [lower(program, one, backends={"script": ScriptBackend}).emit() for one in variants.values()]
    file = together.emit()
    payloads = sum(together.report.payload_bytes.values())
    assert len(file.buffer) <= 1.01 * (max(len(one.buffer) for one in alone) + payloads)
    weights = sum(tensor.nbytes for tensor in program.state_dict.values())
    assert sum(one.bytes for one in inspect(file.buffer).stored if one.kind != "payload") <= 1.01 * weights


def test_precisions_are_verified_one_against_the_other():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval()
    inputs = (torch.randn(1, 64),)
    exported, small = export(model, inputs), copy.deepcopy(model)
    quantize_(small, Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)))
    unwrap_tensor_subclass(small)
    int8 = quantize(exported, [inputs], dynamic=True).program
    programs = {"forward@8da4w": export(small, inputs), "forward@int8": int8, "forward@float": exported}
    artifact = lower(programs, "xnnpack").emit()
    found = verify(artifact, {"forward": exported}, tolerance=0.2)
    assert found.ok
    assert found.unverified == ()
    ratios = {name: method.outputs[0].sqnr for name, method in found.methods.items()}
    assert 10 < ratios["forward@8da4w"] < 30 < ratios["forward@int8"] < 60 < ratios["forward@float"]
    strict = verify(artifact, {"forward": exported}, [inputs])
    assert [method.ok for method in strict.methods.values()] == [False, False, True]
    assert verify(artifact, programs, {"forward": [inputs]}).ok


def test_a_family_is_verified_where_it_runs_at_each_size_of_a_bucket():
    dynamic = export(Add(), (torch.ones(3, 4),), dynamic_shapes={"x": {0: Dim("n", max=6)}})
    programs = {}
    for size, exact in ((2, False), (4, False), (6, True)):
        programs[f"forward@n={size}"] = export(Add(), (torch.ones(size, 4),))
        bucket = Bucket((Size(0, 0, size, exact),), (Crop(0, 0, 0, 0),))
        programs[f"forward@n={size}"].graph_module.meta[BUCKET] = bucket
    with pytest.warns(BackendUnavailableWarning):
        artifact = lower(programs, variants={"npu": TagPartitioner(), "cpu": "xnnpack"}).emit()
    found = verify(artifact, {"forward": dynamic})
    assert found.ok
    assert list(found.methods) == ["forward@n=2@cpu", "forward@n=4@cpu", "forward@n=6@cpu"]
    assert [name for name in found.unverified if name.endswith("@npu")] == list(found.unverified)
    with pytest.raises(BackendUnavailableError, match=r"'forward@n=2@npu' of .* cannot run"):
        verify(artifact, {"forward@n=2@npu": programs["forward@n=2"]})
    sizes = [any("least" in case for case in method.cases) for method in found.methods.values()]
    assert sizes == [True, True, False]
