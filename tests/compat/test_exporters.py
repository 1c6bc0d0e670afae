"""Exporters of others with this engine, as docs/guides/exporters.md has them; transformers' by a name."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from folders import ROOT

from exir_lowering import InputError
from exir_lowering.compat import register_exporter

PAGE = (ROOT / "docs" / "guides" / "exporters.md").read_text()
OTHERS = {re.findall(r"from (\w+) import", code)[-1]: code for code in re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)}
"""The exporters on the page that no extra installs, by package; the rest of the page runs as documentation does."""


@pytest.mark.parametrize("package", OTHERS)
def test_exporters_of_detectors(package: str, tmp_path: Path) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    (tmp_path / "page.py").write_text(
        OTHERS[package] + "assert [one.report.switched_off for one in lowerings] == [()]\n"
    )
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert list(tmp_path.rglob("*.pte"))


def test_options_of_the_engine_are_passed_on() -> None:
    exporters: Any = pytest.importorskip("transformers.exporters", reason="transformers 5 has exporters")
    from transformers import GPT2Config, GPT2Model

    register_exporter("ours")
    config = exporters.AutoExportConfig.from_dict({"export_format": "ours", "dynamic": False})
    model = GPT2Model(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16, use_cache=False)).eval()
    exporter = exporters.AutoHfExporter.from_config(config, rewrites="none")
    inputs = {"input_ids": torch.tensor([[3, 1, 4, 1, 5]])}
    exported = exporter.export(model, inputs, config=config)
    assert str(exported.export_format) == "executorch"
    expected = model(**inputs).last_hidden_state
    torch.testing.assert_close(exported(**inputs).last_hidden_state, expected, rtol=1e-4, atol=1e-4)
    (lowering,) = exporter.lowerings
    assert lowering.report.switched_off == () and not any(one.rewritings for one in lowering.report.methods)
    with pytest.raises(InputError, match="rewrites"):
        exporters.AutoHfExporter.from_config(config, rewrites="all").export(model, inputs, config=config)


def test_transformers_is_imported_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "sys.modules['transformers'] = None\nfrom exir_lowering.compat import register_exporter"
    done = forked.run(f"import sys\n{code}")
    assert done.returncode == 0, done.stderr
    monkeypatch.setitem(sys.modules, "transformers.exporters", None)
    with pytest.raises(InputError, match=r"has no exporters .*Install version 5\.24"):
        register_exporter()
