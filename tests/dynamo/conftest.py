"""What is imported before a file's tests is set aside: `torch._dynamo.reset()` collects garbage, after each of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _imported_is_no_garbage() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
