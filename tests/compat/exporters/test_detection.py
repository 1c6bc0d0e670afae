"""Detectors through their own exporters with this engine, and through `lower`, without what those work around.

Weights are random, and spread so that all layers count.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from torch.fx.passes.infra.pass_manager import PassResult

from exir_lowering import load, lower
from exir_lowering.compat import patch_executorch

TASKS = ("", "-seg", "-pose", "-cls", "-obb")


class Exported:
    """What went through torch.export: the program, and two images with what the model returns for them."""

    def __init__(self) -> None:
        self.export = torch.export.export
        self.program: Any = None
        self.calls: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self.options: dict[str, Any] = {}
        self.prepare: Callable[[Any], None] = lambda model: None

    def __call__(self, model: torch.nn.Module, args: Any, **options: Any) -> Any:
        if self.program is not None:  # a pass of ExecuTorch's exports a pattern
            return self.export(model, args, **options)
        self.prepare(model)
        images = [picture(args[0].shape[-1], seed) for seed in (1, 2)]
        with torch.no_grad():
            expected = [[tensor.clone() for tensor in flat(model(image))] for image in images]
        self.calls = list(zip(images, expected, strict=True))
        self.program = self.export(model, args, **{**options, **self.options})
        return self.program

    def check(self, file: Any) -> None:
        """Compare a file with the model; an error is one of a channel, or of a query, by its largest value."""
        loaded, errors = load(file), []
        for image, expected in self.calls:
            got = flat(list(loaded.run("forward", image)))
            assert len(got) == len(expected)
            for one, other in zip(got, expected, strict=True):
                assert one.shape == other.shape
                scale = other.abs().flatten(min(2, other.dim() - 1)).amax(-1, keepdim=True)
                error = (one - other).flatten(min(2, other.dim() - 1)).abs() / scale
                errors.append(float(error.max()))
                assert errors[-1] < 1e-4
        print(f"error {max(errors):.1e}")


def flat(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    found = results.values() if isinstance(results, dict) else results if isinstance(results, (list, tuple)) else ()
    return [tensor for one in found for tensor in flat(one)]


def picture(size: int, seed: int) -> torch.Tensor:
    """Return an image that differs from place to place: in noise, all places have nearly the same score."""
    coarse = torch.rand(1, 3, 12, 12, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, (size, size), mode="bicubic").clamp(0, 1)


@torch.no_grad()
def spread(model: torch.nn.Module, size: int = 0) -> None:
    """Make no weight a constant, as the last layers are at first; and statistics random, or those of an image."""
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight) * (0.3 * float(weight.std(correction=0)) or 0.05))
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.add_(torch.randn_like(module.running_mean) * 0.1)
            module.running_var.mul_(1 + torch.rand_like(module.running_var))
            module.momentum = 1.0
            module.train(bool(size))
    if size:
        model(picture(size, 0))
        model.eval()


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Exported:
    monkeypatch.chdir(tmp_path)
    found = Exported()
    monkeypatch.setattr(torch.export, "export", found)
    return found


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose queries by their places more than by their scores: of these, some differ by no more than rounding."""
    topk = torch.topk

    def chosen(scores: torch.Tensor, k: int, dim: int = -1) -> Any:
        places = torch.arange(scores.shape[-1]) * 11 % scores.shape[-1]
        return topk(scores + 8.0 * places, k, dim=dim)

    monkeypatch.setattr(torch, "topk", chosen)


@pytest.mark.parametrize("patched", [False, True], ids=["as it is", "their patch"])
@pytest.mark.parametrize("task", TASKS, ids=[task.strip("-") or "detect" for task in TASKS])
@pytest.mark.parametrize("family", ["yolo11n", "yolo26n"])
def test_ultralytics(
    family: str, task: str, patched: bool, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    ultralytics: Any = pytest.importorskip("ultralytics", reason="ultralytics is not installed")
    from ultralytics.utils.export import executorch as exporter

    monkeypatch.setenv("YOLO_AUTOINSTALL", "false")
    if not patched:
        monkeypatch.setattr(exporter, "executorch_wrapper", lambda model: model)
    yolo = ultralytics.YOLO(f"{family}{task}.yaml")
    spread(yolo.model)
    with patch_executorch() as lowerings:
        folder = yolo.export(format="executorch", imgsz=64, verbose=False)
    assert [one.report.switched_off for one in lowerings] == [()]
    exported.check(Path(folder) / "model.pte")


def share(model: Any) -> None:
    """Let the levels of RTMDet's head have the same convolutions again, of which its exporter makes copies."""
    for towers in (model.head.cls_convs, model.head.reg_convs):
        for tower in list(towers)[1:]:
            for layer, first in zip(tower, towers[0], strict=True):
                layer.conv = first.conv


@pytest.mark.usefixtures("ordered")
@pytest.mark.parametrize(
    ("name", "size", "pixels"),
    [("LibreDFINE", "n", 320), ("LibreDEIM", "n", 320), ("LibreDEIMv2", "atto", 320), ("LibreRTMDet", "t", 64)],
)
def test_libreyolo(name: str, size: str, pixels: int, exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    libreyolo: Any = pytest.importorskip("libreyolo", reason="libreyolo is not installed")
    from libreyolo.export import exporter

    monkeypatch.setattr(exporter, "get_support", lambda *_: SimpleNamespace(tier="available"))  # it blocks three
    if name == "LibreDFINE":  # it reads a context variable, which torch cannot capture strictly
        exported.options["strict"] = False
    if name == "LibreRTMDet":
        exported.prepare = share
    detector = getattr(libreyolo, name)(None, size=size)
    spread(detector.model, 0 if name == "LibreRTMDet" else pixels)  # without queries, all places count as they are
    with patch_executorch() as lowerings:
        file = detector.export(format="executorch", imgsz=pixels)
    assert [one.report.switched_off for one in lowerings] == [()]
    exported.check(file)
    exported.check(lower(exported.program, XnnpackPartitioner()).emit().buffer)


@pytest.mark.usefixtures("ordered")
@pytest.mark.parametrize("name", ["RFDETRNano", "RFDETRSegNano"])
@pytest.mark.parametrize("patched", [False, True], ids=["as it is", "their pass"])
def test_rfdetr(patched: bool, name: str, exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    rfdetr: Any = pytest.importorskip("rfdetr", reason="rfdetr is not installed")
    from executorch.backends.transforms import addmm_mm_to_linear

    if not patched:
        unchanged = lambda: lambda graph_module: PassResult(graph_module, False)  # noqa: E731
        monkeypatch.setattr(addmm_mm_to_linear, "AddmmToLinearTransform", unchanged)
    detector = getattr(rfdetr, name)(pretrain_weights=None)
    spread(detector.model.model)
    with patch_executorch() as lowerings:
        file = detector.export(format="executorch", backend="xnnpack", verbose=False)
    assert [one.report.switched_off for one in lowerings] == [()]
    exported.check(file)
    exported.check(lower(exported.program, XnnpackPartitioner()).emit().buffer)
