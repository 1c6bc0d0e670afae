"""The conformance suite on vendors' backends: what they do not do is listed here, and in docs/guides/vendors.md."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from test_payloads import installed
from tosa_delegate import TosaReferenceModel
from vendor_shelf import VENDORS

from exir_lowering.testing import CASES, ConformanceError, check_backend


def coreml(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """Core ML's backend, without the identifiers that it draws for each model."""
    from executorch.backends.apple.coreml.compiler import CoreMLBackend

    preprocess, normalise = CoreMLBackend.preprocess_multimethod, VENDORS["coreml"].normalise

    def normalised(*given: Any, **named: Any) -> Any:
        results = preprocess(*given, **named)
        for result in (one for each in results.values() for one in each):
            result.processed_bytes = normalise(result.processed_bytes)
        return results

    monkeypatch.setattr(CoreMLBackend, "preprocess_multimethod", staticmethod(normalised))
    return CoreMLBackend, None


def tosa(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    from executorch.backends.arm.tosa.backend import TOSABackend

    return TOSABackend, TosaReferenceModel()


def vulkan(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """Vulkan's backend, which traces its patterns once, instead of anew for each program."""
    from executorch.backends.vulkan.patterns import fusable_patterns
    from executorch.backends.vulkan.vulkan_preprocess import VulkanBackend

    for entry in fusable_patterns.values():
        if entry.get_graphs_fn is not None:
            monkeypatch.setattr(entry, "get_graphs_fn", functools.cache(entry.get_graphs_fn))
    return VulkanBackend, None


FAILS = {
    coreml: {
        # No check of what its compiler takes: a pooling without its stride, element types, an order of dimensions.
        *("ops/max-pool", "dtype/bfloat16", "dtype/int8", "dtype/uint8", "layout/channels-last"),
        # Weights are shared by the position of partitions, of which each method needs as many.
        "methods/several-partitions",
        # What methods share is stored under an identifier that is drawn.
        *("methods/two", "methods/shared-weight", "methods/same-name-other-weight", "state/two-methods"),
    },
    tosa: {
        "dtype/int8",  # in a profile of floats
        "dtype/int64",  # a check of its partitioner raises, which `lower` takes for a reason
        # Its payloads return these in another order, and of one dimension; the delegate of these tests does not know.
        *("layout/channels-last", "nested/cond"),
    },
    vulkan: {
        "ops/layer-norm",  # in a program whose layer norm has been decomposed, its pass fails
        "dynamic/size-as-number",  # a partition that returns a number only
    },
}
"""Cases that fail for a vendor."""

LEFT_OUT = {tosa: ("dynamic/", "degenerate/empty-tensor")}
"""Cases that are not tried, by the beginning of their names: the reference model of TOSA dies of dynamic sizes."""


@pytest.mark.parametrize("make", FAILS, ids=lambda make: make.__name__)
def test_what_a_vendor_does_not_do(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vendor = installed(make.__name__)
    partitioner = vendor.partitioner("float")
    backend, delegate = make(monkeypatch)
    cases = [case for case in CASES if not case.name.startswith(LEFT_OUT.get(make, ("-",)))]
    try:
        report = check_backend(backend, delegate, partitioner=partitioner, cases=cases)
    except ConformanceError as error:
        report = error.report
    print(report)
    assert {result.name for result in report.results if result.status == "failed"} == FAILS[make]
