"""Models of transformers, exported as its exporter for ExecuTorch does, with its patches and without, are right."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

pytest.importorskip("transformers.exporters.exporter_executorch", reason="the extra 'exporters' is not installed")

import class_table
import exported_classes


def _outcome(name: str, shapes: str, way: str) -> str:
    """What a row of the table says of a class."""
    entry = exported_classes.entries()[name]
    blank = class_table.Row(name, entry.kind, entry.skipped, shapes, way, "")
    with ExitStack() as patches:
        model, program = class_table.export(entry, shapes == "dynamic", patches, way == "plain")
        return class_table.run(blank, entry, model, program).outcome


@pytest.mark.parametrize("way", ["patched", "plain"])
def test_a_small_class_is_right(way: str) -> None:
    assert _outcome("SpeechT5HifiGan", "static", way) == "right"


CASES = (
    ("FlavaModel", "static", "patched"),  # cycles between partitions
    ("PPDocLayoutV3ForObjectDetection", "static", "plain"),  # heads that are shared
    ("JetMoeModel", "static", "plain"),  # sizes that depend on data
    ("Lfm2VlModel", "static", "plain"),
    ("Siglip2VisionModel", "static", "plain"),  # checks of data
    ("UnivNetModel", "static", "patched"),  # tensors of seven dimensions
    ("MuseGlimmerModel.image_encoder", "static", "plain"),
    ("LlamaForCausalLM", "dynamic", "patched"),
)
"""Classes, most of which the exporter's own tests skip."""


@pytest.mark.parametrize(("name", "shapes", "way"), CASES)
def test_several_classes_are_right(name: str, shapes: str, way: str) -> None:
    assert _outcome(name, shapes, way) == "right"


def test_each_class_is_listed_once() -> None:
    listed = [name for names in exported_classes.KINDS.values() for name in names.split()]
    assert len(listed) == len(set(listed)) and len(exported_classes.entries()) > 150
