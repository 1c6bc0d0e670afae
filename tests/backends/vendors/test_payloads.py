"""Real compilers of vendors: the payloads are ExecuTorch's, the defaults make none worse, and the numbers are right."""

from __future__ import annotations

import os

import pytest
import torch
from tosa_delegate import TosaReferenceModel
from vendor_models import NIGHTLY, build
from vendor_shelf import VENDORS, Lowered, Vendor, programs_of, with_executorch, with_ours

import exir_lowering
from exir_lowering import LoweringError

SLOW = {("coreml", "int8")}  # Core ML's quantizer traces its patterns anew for each program: 100 CPU seconds and more

UNQUANTISED = {
    ("vulkan", "bert"): "tensors used as indices",  # it quantises them
    **dict.fromkeys((("openvino", name) for name in ("bert", "vit", "whisper_encoder")), "Dimension out of range"),
    ("openvino", "llama"): "has no attribute 'numel'",
    ("openvino", "mixture"): "has no attribute 'numel'",
    ("openvino", "lstm"): "'NoneType' object is not iterable",
}
"""Models that a vendor's quantizer fails on, or of which it makes a program that does not run, and the error."""


def installed(name: str) -> Vendor:
    """Return a vendor; the test is skipped where its compiler is not installed, except in CI."""
    if (missing := VENDORS[name].missing) and not os.environ.get("CI"):
        pytest.skip(f"needs {', '.join(missing)}: the extra vendors")
    return VENDORS[name]


APART = {("native", "llama")}
"""Where delegates keep state that methods share, in ExecuTorch's files each its own: methods are compared alone."""


def check_beside_executorch(name: str, model: str, precision: str, method: str = "") -> Lowered | None:
    """Compare with ExecuTorch, and return what the defaults make; None for what ExecuTorch cannot lower."""
    vendor = installed(name)

    def programs() -> dict[str, torch.export.ExportedProgram]:  # for each lowering: ExecuTorch changes them
        methods = build(model)
        return programs_of(vendor, {method: methods[method]} if method else methods, precision)

    given = programs()
    plain, theirs = None, None
    try:
        theirs = with_executorch(vendor, programs(), precision)
    except Exception:  # then all that is asked of ours is an error that is one
        try:
            plain = with_ours(vendor, given, precision, "none")
        except LoweringError:
            if name == "coreml":  # in the first program after an error, coremltools numbers names otherwise
                with_ours(vendor, programs_of(vendor, build("mlp")))
            return None
    plain = plain or with_ours(vendor, given, precision, "none")
    ours = with_ours(vendor, given, precision)
    if theirs is not None:
        if vendor.normalise is not None:
            assert sorted(plain.delegates) == sorted(theirs.delegates)
        assert {name: sorted(host) for name, host in plain.host.items()} == {
            name: sorted(host) for name, host in theirs.host.items()
        }
        plain = theirs
    assert len(ours.delegates) <= len(plain.delegates)
    here, there = (sum(map(len, lowered.host.values())) for lowered in (ours, plain))
    assert here <= there
    # What the host computed of constants alone may be in the payload, and its tables no longer in the file.
    moved = here < there and len(ours.buffer) <= len(plain.buffer)
    assert ours.payload_bytes <= 1.01 * plain.payload_bytes or moved
    assert ours.cycles <= plain.cycles
    return ours


@pytest.mark.parametrize(
    ("name", "model", "precision"),
    [
        ("coreml", "cnn", "float"),
        ("vulkan", "mlp", "float"),
        ("tosa", "cnn", "float"),
        ("ethos-u", "cnn", "int8"),
        ("openvino", "cnn", "float"),
        ("native", "cnn", "float"),
    ],
)
def test_a_small_model(name: str, model: str, precision: str) -> None:
    ours = check_beside_executorch(name, model, precision)
    assert ours is not None and len(ours.delegates) >= 1
    if name in ("tosa", "openvino"):
        check_numbers(name, model, ours)
    if name == "ethos-u":
        assert 0 < ours.cycles < 1e5 and 0 < ours.estimates[0].sram < 1e5


def check_numbers(name: str, model: str, lowered: Lowered) -> None:
    """Compare what the file computes with eager PyTorch; OpenVINO may compute with bfloat16."""
    program = exir_lowering.load(lowered.buffer, delegates=[TosaReferenceModel()] if name == "tosa" else None)
    for method, (module, inputs) in build(model).items():
        wanted = module.requires_grad_(False)(*inputs)
        found = program.run(method, *inputs)
        for one, right in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
            torch.testing.assert_close(
                one, right, rtol=0, atol=1e-4 if name == "tosa" else 0.02 * float(right.abs().max())
            )


@pytest.mark.parametrize("model", NIGHTLY)
@pytest.mark.parametrize(
    ("name", "precision"),
    [(name, one) for name, vendor in VENDORS.items() for one in vendor.precisions if (name, one) not in SLOW],
)
def test_a_model(name: str, model: str, precision: str) -> None:
    if precision == "int8" and (name, model) in UNQUANTISED:
        with pytest.raises((IndexError, AttributeError, TypeError), match=UNQUANTISED[name, model]):
            programs_of(installed(name), build(model), precision)
        return
    if (name, model) in APART:
        for method in build(model):
            check_beside_executorch(name, model, precision, method)
        return
    ours = check_beside_executorch(name, model, precision)
    if ours is not None and precision == "float" and name in ("tosa", "openvino"):
        check_numbers(name, model, ours)
