"""Operators of PyTorch's own database, one of each kind: right in the runtime, or refused by `lower`."""

from __future__ import annotations

import re
from pathlib import Path

import forked
import operator_database

OPERATORS = [
    "addmm",
    "argmax",
    "cumsum",
    "masked_scatter",
    "remainder",
    "scatter_reduce_amax",
    "sort",
    "nn_functional_conv2d",
    "nn_functional_layer_norm",
    "nn_functional_pad_constant",
]
PATTERN = f"^({'|'.join(OPERATORS)})$"


def test_operators_are_right_or_refused() -> None:
    script = Path(operator_database.__file__)
    ended = forked.run(script, "--ops", PATTERN, "--dtypes", "float32,int64", "--samples", 1, "--jobs", 1)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "right" in ended.stdout


def test_all_of_them_are_there() -> None:
    assert {one.formatted_name for one in operator_database.choose(PATTERN)} == {*OPERATORS}
    slices = [operator_database.choose("", f"{part}/7") for part in range(1, 8)]
    assert sum(map(len, slices)) == len(operator_database.choose()) > 690


def test_what_differs_is_told() -> None:
    torch = operator_database.torch
    nan, inf, half = torch.nan, torch.inf, torch.float16
    want = torch.tensor([1.0, nan, inf, -inf])
    told = operator_database.difference
    assert told(want.clone(), want, None) == ""
    assert re.match("error 0.1", told(torch.tensor([1.1, nan, inf, -inf]), want, None))
    for place, other in enumerate((nan, 1.0, -inf, 3e38)):
        assert "NaN or infinite" in told(want.index_fill(0, torch.tensor(place), other), want, None)
    assert "int32" in told(torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.int64), None)
    assert told(torch.tensor([1, 2]), torch.tensor([1, 3]), None) == "1 of 2 elements differ"
    exact = torch.tensor([100.0, 1e6]).double()  # eager mode is off by one, and overflows
    assert told(torch.tensor([103.0, inf]).to(half), torch.tensor([101.0, inf]).to(half), exact) == ""
    assert "error 5" in told(torch.tensor([105.0, inf]).to(half), torch.tensor([101.0, inf]).to(half), exact)
