"""YOLO11 and YOLO26 of Ultralytics through its own exporter with this engine, and without its patch of pose models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from exir_lowering import load
from exir_lowering.compat import patch_executorch

TASKS = ("", "-seg", "-pose", "-cls", "-obb")


def flat(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    found = results.values() if isinstance(results, dict) else results if isinstance(results, (list, tuple)) else ()
    return [tensor for one in found for tensor in flat(one)]


@pytest.mark.parametrize("patched", [False, True], ids=["as it is", "their patch"])
@pytest.mark.parametrize("task", TASKS, ids=[task.strip("-") or "detect" for task in TASKS])
@pytest.mark.parametrize("family", ["yolo11n", "yolo26n"])
def test_ultralytics(family: str, task: str, patched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ultralytics: Any = pytest.importorskip("ultralytics", reason="ultralytics is not installed")
    from ultralytics.utils.export import executorch as exporter

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("YOLO_AUTOINSTALL", "false")
    if not patched:
        monkeypatch.setattr(exporter, "executorch_wrapper", lambda model: model)
    exported: list[torch.nn.Module] = []
    original = torch.export.export

    def export(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        exported.append(model)
        return original(model, *args, **kwargs)

    monkeypatch.setattr(torch.export, "export", export)
    torch.manual_seed(0)
    yolo = ultralytics.YOLO(f"{family}{task}.yaml")
    with torch.no_grad():  # classes with equal scores have no order
        for weight in yolo.model.parameters():
            weight.add_(torch.randn_like(weight) * 0.02)
    with patch_executorch() as lowerings:
        folder = yolo.export(format="executorch", imgsz=64, verbose=False)
    assert [one.report.switched_off for one in lowerings] == [()]
    loaded = load(Path(folder) / "model.pte")
    for _ in range(2):
        image = torch.rand(1, 3, 64, 64)
        with torch.no_grad():
            expected = flat(exported[0](image))
        got = flat(list(loaded.run("forward", image)))
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))
