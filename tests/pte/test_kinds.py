"""A file that was given in the place of another is named for what it is."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from executorch.exir import to_edge

from exir_lowering import InputError, load
from exir_lowering.cli import main


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def exported() -> torch.export.ExportedProgram:
    return torch.export.export(Net().eval(), (torch.ones(1, 2),))


def write(save: Callable[[io.BytesIO], object]) -> bytes:
    buffer = io.BytesIO()
    save(buffer)
    return buffer.getvalue()


def archive(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name in names:
            made.writestr(name, "")
    return buffer.getvalue()


def pt2() -> bytes:
    return write(lambda file: torch.export.save(exported(), file))


FILES: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "conv.pt2": (pt2, "a .pt2 file", "exir-lower lower MODEL.pt2"),
    "old.pt2": (lambda: archive("serialized_exported_program.json"), "a .pt2 file", "exir-lower lower MODEL.pt2"),
    "weights.ptd": (lambda: b"\x1c\0\0\0FT01" + bytes(60), "a .ptd data file", "as data="),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_pte(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, kind, advice = FILES[name]
    path = tmp_path / name
    path.write_bytes(make())
    for source in (path, path.read_bytes()):
        with pytest.raises(InputError) as caught:
            load(source)
        message = str(caught.value)
        assert f"cannot be loaded: it is {kind}" in message and "expected a .pte file" in message
        assert advice in message and "damaged" not in message
    assert main(["run", str(path)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"it is {kind}" in told and "damaged" not in told


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith(".pt2")])
def test_a_file_that_is_no_program(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, kind, _ = FILES[name]
    path = tmp_path / name
    path.write_bytes(make())
    assert main(["lower", str(path), "-o", str(tmp_path / "out.pte")]) == 2
    assert kind in " ".join(capsys.readouterr().err.split())


def test_damage_is_still_called_damage(tmp_path: Path) -> None:
    whole = to_edge(exported()).to_executorch().buffer
    pt2 = write(lambda file: torch.export.save(exported(), file))
    for content in (
        whole[: len(whole) // 2],
        whole[:40],
        b"PK\x03\x04" + bytes(9),
        pt2[: len(pt2) // 2],
        b"\x08",
        b"x",
        archive("readme.txt"),
        write(lambda file: torch.save({"w": torch.ones(2)}, file)),
    ):
        path = tmp_path / "damaged.pte"
        path.write_bytes(content)
        for source in (content, path):
            with pytest.raises(InputError, match="it is damaged, or not what ExecuTorch writes"):
                load(source)


def test_what_is_given_as_data_is_no_data_file(tmp_path: Path) -> None:
    (tmp_path / "model.pte").write_bytes(to_edge(exported()).to_executorch().buffer)
    (tmp_path / "model.pt2").write_bytes(pt2())
    for name, kind in (("model.pt2", "a .pt2 file"), ("model.pte", "a .pte file")):
        with pytest.raises(InputError, match=f"it is {kind}.*expected a .ptd data file. Give the one"):
            load(tmp_path / "model.pte", data=tmp_path / name)


def test_a_method_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["plan", "x="], ["lower", "x=", "-o", "x.pte"]):
        assert main(command) == 2
        told = " ".join(capsys.readouterr().err.split())
        assert "'x=': there is no file after the equals sign, expected x=MODEL.pt2." in told
