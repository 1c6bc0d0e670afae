"""torch's minifier: what it is asked for, and scripts that call a torch.compile backend with a graph of AOTAutograd's.

What torch itself writes for such a graph calls inductor, whatever the backend. These scripts have its graph and its
inputs, and the main part of those that torch writes for graphs of Dynamo's, which call a backend by its name.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import config as config  # `repro_after` is "aot", "dynamo" or None, as the environment says
from torch._dynamo.debug_utils import (
    AccuracyError as AccuracyError,
    helper_for_dump_minify,
    minifier_dir,
    same_two_models,
)
from torch._dynamo.repro.after_aot import generate_compiler_repro_string
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.fx import GraphModule

_MAIN = """
if __name__ == '__main__':
    from torch._dynamo.repro.after_dynamo import run_repro
    with torch.no_grad():
        run_repro(mod, load_args, accuracy={accuracy!r}, command={command!r}, save_dir={folder!r}, backend={backend!r})
"""


def backend_name() -> str | None:
    """Return the name by which the caller of torch.compile chose the backend that is being called; None without one."""
    try:
        compiler = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:
        return None
    return getattr(compiler, "_compiler_name", None)


def same_results(module: GraphModule, compiled: Callable[..., Any], inputs: Sequence[Any]) -> bool:
    """Return whether a compiled graph computes what the graph does, by the minifier's tolerances."""
    same: bool = same_two_models(module, compiled, inputs, only_fwd=True, ignore_non_fp=config.repro_ignore_non_fp)  # type: ignore[arg-type]
    return same


def write_repro(module: GraphModule, inputs: Sequence[Any], backend: str | None) -> None:
    """Write a script that calls a backend with a graph and (real or fake) inputs, `repro.py` in the current folder."""
    folder = _folder()
    path = folder / f"{len(module.graph.nodes)}.py"
    path.write_text(_script(module, inputs, backend, folder, command="run"))
    shutil.copyfile(path, Path.cwd() / "repro.py")


def write_launcher(module: GraphModule, inputs: Sequence[Any], backend: str | None, *, accuracy: bool = False) -> None:
    """Write the script that makes the graph smaller while a backend fails (or errs), to `minifier_launcher.py`."""
    script = _script(module, inputs, backend, _folder(), command="minify", accuracy=accuracy)
    helper_for_dump_minify(script)


def _folder() -> Path:
    folder = Path(minifier_dir()) / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _script(
    module: GraphModule,
    inputs: Sequence[Any],
    backend: str | None,
    folder: Path,
    *,
    command: str,
    accuracy: bool = False,
) -> str:
    plain = [value.detach() if isinstance(value, torch.Tensor) else value for value in inputs]
    written = generate_compiler_repro_string(module, plain, save_dir=str(folder), stable_hash=True)
    return written + _MAIN.format(accuracy=accuracy, command=command, folder=str(folder), backend=backend)
