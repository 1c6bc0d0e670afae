"""Tables of costs: what counts for an operator, and files of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lowering_support import edge_program

from exir_lowering import InputError
from exir_lowering.graphs import operator_name
from exir_lowering.partitioners import CostTable
from exir_lowering.partitioners.cost_table import signature


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + y)


def test_a_signature_counts_before_the_name() -> None:
    program = edge_program(Net(), (torch.ones(3, 4), torch.ones(4)))
    add, relu = (n for n in program.graph.nodes if n.op == "call_function")
    assert operator_name(add) == "aten.add.Tensor"
    assert signature(add) == "aten.add.Tensor(float32[3, 4], float32[4])"
    places = {"host": {signature(add): 3, "aten.add": 2}, "echo": {"aten.add.Tensor": 1, "aten.add": 5}}
    table = CostTable(places, per_byte=0, default={"echo": 7})
    assert [table.node_cost(add, place) for place in ("host", "echo", "other")] == [3, 1, None]
    assert [table.node_cost(relu, place) for place in ("host", "echo", "other")] == [None, 7, None]


def test_tables_round_trip(tmp_path: Path) -> None:
    table = CostTable(
        {"host": {"aten.mul.Tensor": 2e-6, "aten.add.Tensor": 1.5}, "echo": {"aten.add.Tensor(float32[1])": 0}},
        per_byte=1e-10,
        per_call={"echo": 1e-6},
        unit="cycles",
        default={"host": 3},
    )
    first = table.save(tmp_path / "a.json").read_bytes()
    assert CostTable.load(tmp_path / "a.json") == table
    turned = CostTable({"echo": table.places["echo"], "host": dict(reversed(table.places["host"].items()))}, 1e-10)
    turned = CostTable(turned.places, 1e-10, table.per_call, "cycles", table.default)
    assert turned.save(tmp_path / "b.json").read_bytes() == first


GOOD = {"format": "exir-lowering costs", "version": 1, "per_byte": 0, "places": {"host": {"aten.add.Tensor": 1}}}


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "cannot be read as JSON"),
        ("[]", "has the format None, version None"),
        (json.dumps({**GOOD, "version": 2}), "version 2; expected 'exir-lowering costs', version 1"),
        (json.dumps({**GOOD, "more": 1}), "has the entries more, per_byte, places; expected"),
        (json.dumps({"format": GOOD["format"], "version": 1, "per_byte": 1}), "has the entries per_byte; expected"),
        (json.dumps({**GOOD, "places": {"host": {"aten.add.Tensor": -1}}}), r"places\['host'\]\['aten.add.Tensor'\]"),
        (json.dumps({**GOOD, "places": {"host": {"aten.add.Tensor": float("nan")}}}), "is nan, expected a finite"),
        (json.dumps({**GOOD, "per_byte": float("inf")}), "per_byte is inf"),
        (json.dumps({**GOOD, "per_byte": "much"}), "per_byte is 'much'"),
        (json.dumps({**GOOD, "places": {"host": {"aten.add.Tensor": True}}}), "is True"),
        (json.dumps({**GOOD, "places": {"host": {"aten.add.Tensr": 1}}}), "Did you mean 'aten.add.Tensor'"),
        (json.dumps({**GOOD, "places": {"host": {"aten.ad(float32[1])": 1}}}), "Operator 'aten.ad' does not exist"),
        (json.dumps({**GOOD, "places": {"echo": {}}}), "'host' is missing"),
        (json.dumps({**GOOD, "places": []}), r"places is \[\], expected a mapping"),
        (json.dumps({**GOOD, "places": {"host": 3}}), r"places\['host'\] is 3"),
        (json.dumps({**GOOD, "per_call": {"echo": 1}}), "per_call names 'echo', expected some of none"),
        (json.dumps({**GOOD, "default": {"other": 1}}), "default names 'other', expected some of 'host'"),
        (json.dumps({**GOOD, "unit": 1}), "unit is 1"),
        (
            '{"format": "exir-lowering costs", "version": 1, "per_byte": 1' + "0" * 400 + ', "places": {"host": {}}}',
            "per_byte",
        ),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        CostTable.load(path)
    assert "table.json" in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        CostTable.load(tmp_path / "missing.json")
    with pytest.raises(InputError, match="cannot be written"):
        CostTable({"host": {}}, 0.0).save(tmp_path / "missing" / "a.json")
