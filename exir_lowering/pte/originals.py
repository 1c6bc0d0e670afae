"""Where a file keeps the original graphs of its partitions: shared by what writes them and what reads them."""

from __future__ import annotations

BACKEND = "reference"
"""The backend whose payloads they are."""


def key(method: str, number: int) -> str:
    """Return the key of the named data that holds the original graph of a method's delegate, by its number."""
    return f"exir_lowering.original/{method}/{number}"
