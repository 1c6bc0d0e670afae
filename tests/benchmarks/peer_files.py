"""The files of the comparisons: `python tests/benchmarks/peer_files.py MODEL ENGINE FILE` makes one.

LiteRT's converter and ONNX's want other versions of some packages, so they may be in an environment of their own, which
has torch and transformers too: the comparisons start this script there for the files of those two.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from lowering_models import Built, export_model
from peer_models import MODELS, OTHERS, TRANSFORMERS

_SUFFIXES = {"executorch": "pte", "ours": "pte", "ours_openvino": "pte", "litert": "tflite", "onnx": "onnx"}
_CONVERTED = ("litert", "onnx")


def _executorch(program: Any, path: Path) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    manager = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    path.write_bytes(manager.to_executorch().buffer)


def _ours(partitioner: str) -> Callable[[Any, Path], None]:
    def make(program: Any, path: Path) -> None:
        import exir_lowering

        path.write_bytes(exir_lowering.lower(program, partitioner).emit().buffer)

    return make


_MAKERS = {"executorch": _executorch, "ours": _ours("xnnpack"), "ours_openvino": _ours("openvino")}


def _convert(name: str, engine: str, path: Path) -> None:
    built = load_model(name)
    if engine == "litert":
        import litert_torch

        litert_torch.convert(built.model, built.inputs).export(str(path))
    else:
        import torch

        torch.onnx.export(built.model, built.inputs, str(path), dynamo=True, external_data=False, verbose=False)


def load_model(name: str) -> Built:
    """Build a model, with the same weights and inputs in every process."""
    import torch

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MODELS[name]()


def compute_expected(built: Built) -> list[Any]:
    """Return what PyTorch computes in float64; the model is no longer in float32 then."""
    import torch

    inputs = [one.double() if one.is_floating_point() else one for one in built.inputs]
    with torch.no_grad():
        outputs = built.model.double()(*inputs)
    return [outputs] if isinstance(outputs, torch.Tensor) else [*outputs]


def largest_error(outputs: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest error as a share of the largest value of an output; infinity for other shapes or no number."""
    worst = 0.0
    for got, right in zip(outputs, expected, strict=True):
        if got.shape != right.shape:
            return math.inf
        error = (got.double() - right).abs().nan_to_num(nan=math.inf).max()
        worst = max(worst, float(error / right.abs().max()))
    return worst


def make_file(name: str, engine: str, path: Path) -> None:
    """Make the file of a model in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if engine in _CONVERTED:
            _convert(name, engine, path)
        else:
            _MAKERS[engine](export_model(name, MODELS)[0], path)


def make_files(
    name: str, engines: Sequence[str], own: Path, arguments: argparse.Namespace
) -> tuple[dict[str, Path], dict[str, str]]:
    """Make the files of a model, each in a process of its own.

    Args:
        name: The model.
        engines: Whose files.
        own: Where ours are made. Those of others are kept in the folder of the arguments while the models are the same.
        arguments: What `read_arguments` returned.

    Returns:
        The files, and for engines that make none, why.
    """
    files: dict[str, Path] = {}
    failures: dict[str, str] = {}
    arguments.files.mkdir(parents=True, exist_ok=True)
    for engine in engines:
        ours = engine.startswith("ours")
        path = (own if ours else arguments.files) / f"{name}-{engine}-{_version()}.{_SUFFIXES[engine]}"
        if ours or arguments.again or not path.exists():
            made = path.with_name(f"new-{os.getpid()}-{path.name}")
            python = arguments.converter if engine in _CONVERTED else sys.executable
            command = [python, __file__, name, engine, str(made)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                made.unlink(missing_ok=True)
                said = re.findall(r"^[\w.]+(?:Error|Failure|Exception)\b.*", done.stderr, re.MULTILINE)
                failures[engine] = (said or [f"exit status {done.returncode}"])[-1][:300]
                continue
            made.replace(path)
        files[engine] = path
    return files, failures


def _version() -> str:
    """Return a digest of what the models are written in."""
    folder = Path(__file__).parent
    sources = (folder / f"{name}.py" for name in ("peer_models", "latency_models", "lowering_models"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:8]


_SETS = {"transformers": TRANSFORMERS, "others": OTHERS, "all": MODELS}


def default_folder(name: str) -> Path:
    """Return where things are kept: what EXIR_PEERS says, or a folder of the user's cache."""
    return Path(os.environ.get(f"EXIR_{name.upper()}") or Path.home() / ".cache" / f"exir-lowering-{name}")


def add_arguments(parser: argparse.ArgumentParser, engines: Sequence[str]) -> None:
    """Add what all comparisons take."""
    parser.add_argument("--models", default="all", help=f"{', '.join(_SETS)}, or names: {', '.join(MODELS)}")
    parser.add_argument("--engines", default=",".join(engines), help=f"of {', '.join(engines)}")
    parser.add_argument("--files", type=Path, default=default_folder("peers"), help="where files of others are kept")
    parser.add_argument("--again", action="store_true", help="make the files of others again, too")
    parser.add_argument(
        "--converter",
        default=sys.executable,
        help="the Python that has litert-torch and onnxscript (default: this one)",
    )
    parser.add_argument("--by", choices=("kind", "operator"), help="print where it goes, in ExecuTorch's file and ours")
    parser.add_argument("--json", type=Path, help="write the figures here too")


def read_arguments(parser: argparse.ArgumentParser, engines: Sequence[str]) -> argparse.Namespace:
    """Return the arguments; those that `add_arguments` added are read and checked."""
    arguments = parser.parse_args()
    arguments.models = [*_SETS.get(arguments.models, ())] or arguments.models.split(",")
    arguments.engines = tuple(arguments.engines.split(","))
    for got, known in ((arguments.models, MODELS), (arguments.engines, engines)):
        if unknown := sorted(set(got) - set(known)):
            parser.error(f"{unknown} are not known; expected some of {sorted(known)}")
    return arguments


if __name__ == "__main__":
    make_file(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
