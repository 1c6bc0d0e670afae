"""What a file says about how it was made: true, the same each time, without a path, and not needed to run it."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import pytest
import torch
from executorch.runtime import Runtime
from pte_files import made, programs

import exir_lowering
from exir_lowering import InputError, LoweredModule, LoweringOptions, inspect, load, lower
from exir_lowering.pte import provenance
from exir_lowering.pte.provenance import Provenance


def known(content: bytes) -> Provenance:
    found = inspect(content).provenance
    assert found is not None
    return found


def test_it_says_what_made_the_file_and_the_models_names() -> None:
    found = known(made("delegates").pte)
    assert set(found.versions) == {"exir-lowering", "executorch", "torch"} and found.options == {}
    assert found.versions["torch"] == metadata.version("torch") and set(found.backends) == {"XnnpackBackend"}
    assert set(found.weights.values()) == {
        f"{layer}.{name}" for layer in ("conv", "linear", "head") for name in ("weight", "bias")
    }
    assert found.methods["net"].rewrites == {"reductions": 1}
    signature = load(made("delegates").pte).methods["net"]
    assert [repr(value) for value in (*signature.inputs, *signature.outputs)] == [
        "image: float32[2..6, 3, 8, 8]",
        "logits: float32[2..6, 6]",
    ]
    host = inspect(made("host").pte)
    assert {one.name for one in host.stored} == set(found.weights.values())
    assert [one.name for one in inspect(made("state").pte).methods[0].signature.state] == ["total", "last"]
    (first, *_) = inspect(made("written input").pte).methods[0].signature.outputs
    assert (first.name, first.of) == ("x", "x")
    assert known(made("reference").pte).options == {"keep_originals": True}
    outside = inspect(made("data file").pte)
    assert {one.name for one in outside.stored if one.start is None} == set(found.weights.values())


def test_the_runtime_that_a_file_is_for_is_told_without_its_folder(tmp_path: Path) -> None:
    target = tmp_path / "watch.json"
    target.write_text('{"name": "watch", "runtime": "1.5.1"}')
    options = LoweringOptions(target=target, unsupported="allow")
    found = known(lower(programs()["head"], "xnnpack", options=options).emit().buffer)
    assert found.options == {"target": "watch.json", "unsupported": "allow"}


def test_it_can_be_left_out(tmp_path: Path) -> None:
    without = lower(programs()["head"], "xnnpack").emit(provenance=False).buffer
    assert provenance.KEY.encode() not in without and inspect(without).provenance is None
    assert repr(load(without).methods["forward"]).startswith("forward(input 0: float32[1, 6])")


def test_it_is_the_same_however_the_work_was_done(tmp_path: Path) -> None:
    expected = lower(programs()["head"], "xnnpack").emit().buffer
    ways = [{"cache": tmp_path}, {"cache": tmp_path}, {"jobs": 2}, {"fast": False}]
    for way in ways:
        assert lower(programs()["head"], "xnnpack", options=LoweringOptions(**way)).emit().buffer == expected  # type: ignore[arg-type]
    said = known(expected).encode().decode()
    assert os.sep not in said and "test_provenance" not in said


def test_executorch_runs_the_file_and_a_module_keeps_it(tmp_path: Path) -> None:
    artifact = lower(programs()["head"], "xnnpack").emit()
    x = torch.randn(1, 6)
    (result,) = Runtime.get().load_program(artifact.save(tmp_path / "head.pte")).load_method("forward").execute([x])
    module = lower(programs()["head"], "xnnpack").module()
    torch.testing.assert_close(result, module(x))
    module.save(tmp_path / "module.pte")
    report = inspect(tmp_path / "module.pte")
    assert report.provenance == known(artifact.buffer) and report.bytes_by_kind()["module"]
    torch.testing.assert_close(LoweredModule.load(tmp_path / "module.pte")(x), result)
    exir_lowering.load(tmp_path / "module.pte", verify="full")


@pytest.mark.parametrize(
    ("old", "new"), [(b'{"backends"', b'["backends"'), (b'"version":1', b'"version":"'), (b'"least"', b'"least"')]
)
def test_a_damaged_one_is_refused(old: bytes, new: bytes) -> None:
    content = made("delegates").pte
    changed = content.replace(old, new)
    if changed == content:
        changed = content.replace(b'"bounds":[[2,6]', b'"bounds":[[6,2]')
    assert changed != content
    for read in (inspect, lambda file: load(file, verify=False)):
        with pytest.raises(InputError, match="provenance is damaged"):
            read(changed)  # type: ignore[operator]


def test_one_of_a_later_version_is_ignored() -> None:
    content = made("delegates").pte.replace(b'"version":1', b'"version":2')
    assert (
        inspect(content).provenance is None and load(content, verify=False).methods["net"].inputs[0].name == "input 0"
    )
