"""Makes the files of `tests/pte/frozen`, which later revisions must load.

PYTHONPATH=tests/support:tests/house python tests/pte/record_frozen.py

They are not made again: a new one gets another name. `cases.json` has the calls of each file, with what they return in
eager PyTorch, and how the file is opened.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import quantized_models
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from fingerprinted import CACHE, Call, X, cache_programs, exported
from torch import nn
from torch.utils import _pytree as pytree

from exir_lowering import buckets, lower
from exir_lowering.backends.reference import reference_partitioner
from exir_lowering.partitioners import SupportPartitioner, ops

FOLDER = Path(__file__).parents[1] / "pte" / "frozen"
LINEAR = SupportPartitioner({"reference": ops("aten.add.Tensor", "aten.mul.Tensor")})
CASES: dict[str, Any] = {}


def plain(value: torch.Tensor) -> dict[str, Any]:
    """Return a tensor as JSON."""
    values = [float(f"{one:.9g}") if isinstance(one, float) else one for one in value.detach().flatten().tolist()]
    return {"dtype": str(value.dtype)[6:], "shape": list(value.shape), "values": values}


def record(name: str, made: Any, calls: Iterable[tuple[str, Any, tuple[Any, ...]]], kind: str = "program") -> None:
    """Save a file, with calls: the method, the model that is called, and its inputs."""
    made.save(FOLDER / f"{name}.pte")
    (FOLDER / f"{name}.debug.json").unlink(missing_ok=True)
    found = []
    for method, model, inputs in calls:
        given = [plain(one) for one in inputs]
        results = [plain(one) for one in pytree.tree_leaves(model(*inputs)) if isinstance(one, torch.Tensor)]
        found.append({"method": method, "inputs": given, "results": results})
    CASES[name] = {"kind": kind, "calls": found}


def simple(name: str, function: Any, partitioners: Any, *inputs: Any, dynamic: bool = False, **emit: Any) -> None:
    """Record a function of a model and its inputs, called twice."""
    program = exported(function, *copy.deepcopy(inputs), dynamic=dynamic)
    second = tuple((one[:3] if dynamic else one) * 0.5 for one in inputs)
    model = Call(function)
    record(name, lower(program, partitioners).emit(**emit), [("forward", model, inputs), ("forward", model, second)])


def cache(name: str, partitioners: Any, own: bool = False, **emit: Any) -> None:
    """Record two methods over one state."""
    model = Call(CACHE["write"])
    read = Call(CACHE["read"])
    read.weight, read.state = model.weight, model.state
    calls = [("write", model, (X,)), ("read", read, (X,)), ("write", model, (X * 2,)), ("read", read, (X,))]
    record(name, lower(cache_programs(), partitioners).emit(**emit), calls)


def main() -> None:
    """Make all files."""
    FOLDER.mkdir(exist_ok=True)
    relu: Any = lambda m, x: torch.relu(x @ m.weight + 1) * m.state  # noqa: E731
    counted: Any = lambda m, x: m.state.add_(x.sum(0)) @ m.weight  # noqa: E731
    branches: Any = lambda m, x: torch.cond(x.sum() > 10, lambda v: v @ m.weight + 1, lambda v: v * 3, (x,))  # noqa: E731
    norm: Any = lambda m, x: nn.functional.layer_norm(x, (4,))  # noqa: E731
    simple("host", relu, None, X)
    simple("xnnpack", relu, "xnnpack", X)
    simple("reference", relu, "reference", X)
    simple("external", relu, "xnnpack", X, external_weights="external")
    simple("external_host", relu, None, X, external_weights="external_host")
    simple("originals", relu, "xnnpack", X, keep_originals=True)
    simple("unsaid", relu, "xnnpack", X, provenance=False)
    simple("dynamic", relu, "xnnpack", X, dynamic=True)
    simple("dynamic_host", norm, None, X, dynamic=True)
    simple("half", norm, "xnnpack", X.half())
    simple("sort", lambda m, x: torch.sort(x, dim=0), None, X)
    simple("branches", branches, "xnnpack", X + 1)
    simple("state", counted, None, X)
    simple("own_state", counted, reference_partitioner(own_state=True), X)
    cache("shared_state", None)
    cache("shared_state_xnnpack", "xnnpack")
    cache("shared_state_by_name", "xnnpack", share_state=["state"])
    program = exported(relu, X)
    made = lower({"a": program}, variants={"demo": LINEAR, "cpu": "xnnpack", "host": None})
    record("variants", made.emit(), [(name, Call(relu), (X,)) for name in ("a", "a@host", "a@cpu")])
    sized = buckets(exported(relu, X, dynamic=True), {"n": [2, 4, 8]})
    record("buckets", lower(sized, "xnnpack").emit(), [("forward", Call(relu), (X[:size],)) for size in (4, 2)])
    once = [("forward", Call(relu), (X,))]
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    image = (torch.linspace(-1, 1, 108).view(1, 3, 6, 6),)
    for name, dynamic in (("static", False), ("dynamic", True)):
        quantized = quantized_models.quantize(copy.deepcopy(layers), image, dynamic)
        call = [("forward", quantized.module(), image)]
        record(f"quantized_{name}", lower(quantized, quantized_models.partitioners(dynamic)).emit(), call)
        if not dynamic:
            record("quantized_host", lower(quantized).emit(), call)
    upstream = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
    record("executorch", _Upstream(upstream), once)
    other = lambda m, x: {"y": x * 2, "z": (m.weight, 3)}  # noqa: E731
    module = lower({"forward": program, "other": exported(other, X)}, "xnnpack").module()
    module.vocabulary = {"a": [1, 2.5, None, torch.arange(3)]}
    record("module", module, [*once, ("other", Call(other), (X,))], "module")
    lines = (f"{json.dumps(name)}: {json.dumps(case)}" for name, case in CASES.items())
    (FOLDER / "cases.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


class _Upstream:
    """A file that ExecuTorch made."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def save(self, path: Path) -> None:
        path.write_bytes(self._manager.buffer)


if __name__ == "__main__":
    main()
