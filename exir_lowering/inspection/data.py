"""A report as JSON, and its kernels as ExecuTorch's selective build takes them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from exir_lowering.inspection.report import FileReport

VERSION = 1
"""Increased when a field of the JSON changes its meaning or is removed."""


def to_json(report: FileReport) -> str:
    """Return a report as JSON; equal files give equal text, but for the name.

    Returns:
        `{"version": 1, "name", "format", "size", "methods", "stored", "ranges", "provenance", "sealed", "data"}`: the
        fields of `FileReport` and of what it holds, under their names. Element types are words such as "float32", bytes
        are hexadecimal.
    """
    return json.dumps(as_data(report), indent=2, ensure_ascii=True)


def as_data(value: Any) -> Any:
    """Return what `to_json` writes."""
    made = plain(value)
    return {"version": VERSION, **made} if isinstance(made, dict) else made


def plain(value: Any) -> Any:
    """Return values as JSON can hold them."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(value[key]) for key in sorted(value)}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value.hex() if isinstance(value, bytes) else value


def kernels_yaml(report: FileReport) -> str:
    """Return the kernels of all methods as a list of operators, with the number of calls behind each.

    It is what `gen_selected_ops(OPS_SCHEMA_YAML ...)` of ExecuTorch's build takes, and `--ops_schema_yaml_path` of
    its `gen_oplist`.
    """
    counts: Counter[str] = Counter()
    for method in report.methods:
        counts.update(method.kernels)
    # JSON's strings are YAML's, whatever characters a file has in its names.
    return "".join(f"- op: {json.dumps(name)}  # {count}\n" for name, count in sorted(counts.items())) or "[]\n"
