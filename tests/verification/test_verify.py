"""`verify` finds faults that normally distributed inputs miss, and none where there are none."""

from __future__ import annotations

import copy
import json
from typing import Any

import models
import pytest
import quantized_models
import torch
from planted import PLANTED, Planted
from torch.export import Dim, export

import exir_lowering
from exir_lowering import Delegate, InputError, lower, verify
from exir_lowering.testing.trial import take_fingerprint


@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_a_planted_fault_is_found_where_plain_inputs_agree(planted: Planted) -> None:
    program = planted.export()
    artifact = lower(program, "reference").emit()
    plain = verify(artifact, program, [planted.inputs()] * 2, delegates=[planted.delegate()])
    assert plain.ok, str(plain)
    found = verify(artifact, program, delegates=[planted.delegate()])
    off = {case for output in found.methods["forward"].outputs for case in output.off}
    assert not found.ok and off & set(planted.shown_by), str(found)
    assert found.methods["forward"].outputs[0].name in str(found)
    assert verify(artifact, program).ok


@pytest.mark.parametrize("name", ["mobilenet_v2", "bert"])
def test_models_have_no_fault(name: str) -> None:
    program = models.exported(name)[2]
    found = verify(lower(program, "xnnpack").emit(), program)
    assert found.ok and found.methods["forward"].skipped == 0, str(found)
    assert len(found.methods["forward"].cases) >= 10
    assert len(str(found).splitlines()) <= 25


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_quantised_model_has_no_fault(dynamic: bool) -> None:
    program = quantized_models.quantized(dynamic)
    found = verify(lower(program, quantized_models.partitioners(dynamic)).emit(), program)
    assert found.ok and found.methods["forward"].quantized, str(found)
