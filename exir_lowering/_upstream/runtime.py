"""ExecuTorch's runtime from the wheel; nothing here needs a compiler, neither ExecuTorch's nor this package's."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from exir_lowering._upstream import locks, operators


def open_program(source: str | bytes, data: str | None, *, profiled: bool = False) -> Any:
    """Open a `.pte` file, or content that outlives the program, in ExecuTorch's runtime; RuntimeError if refused."""
    runtime = executorch_runtime()
    load = runtime._load_program if isinstance(source, str) else runtime._load_program_from_buffer
    return load(
        source, enable_etdump=profiled, program_verification=runtime.Verification.InternalConsistency, data_path=data
    )


@cache
def executorch_runtime() -> Any:
    """Return the wheel's extension module; if it cannot be imported here, whatever its libraries raise."""
    return _extension() or _wrapper()


_EXTENSION = "executorch.extension.pybindings._C"
_USED = {"Verification", "_get_operator_names", "_get_registered_backend_names", "_is_available",
         "_load_program", "_load_program_from_buffer"}  # fmt: skip


def _extension() -> Any:
    """Return the extension module without its wrapper, which imports the compiler to warn; None if it lacks a name."""
    try:
        found = find_spec(_EXTENSION)
        if found is None or found.origin is None:
            return None
        _find_openvino()
        if sys.platform == "win32":
            os.add_dll_directory(os.path.dirname(found.origin))
        module = import_module(_EXTENSION)
    except (ImportError, OSError):
        return None
    return module if _USED.issubset(dir(module)) else None


def _wrapper() -> Any:
    """Return ExecuTorch's own wrapper of the extension module, without its warning that it is experimental."""
    # All threads share the warning filters.
    with locks.engine(), warnings.catch_warnings(action="ignore"):
        from executorch.runtime import Runtime as Wrapped

        return Wrapped.get()._legacy_module


def _find_openvino() -> None:
    """Tell the runtime's OpenVINO backend where the library of an installed `openvino` package is."""
    with suppress(ImportError, ValueError):
        for folder in getattr(find_spec("openvino"), "submodule_search_locations", None) or ():
            for library in sorted(Path(folder, "libs").glob("libopenvino_c.so*"))[:1]:
                os.environ["OPENVINO_LIB_PATH"] = os.environ.get("OPENVINO_LIB_PATH") or str(library)


@dataclass
class _CompileSpec:
    """A compile spec as ExecuTorch's, without its compiler."""

    key: str
    value: bytes


def compile_spec(key: str, value: bytes) -> Any:
    """Return a compile spec for delegates: of ExecuTorch's class, or of its substitute until that is imported."""
    compiler = sys.modules.get("executorch.exir.backend.compile_spec_schema")
    return getattr(compiler, "CompileSpec", _CompileSpec)(key, value)


def import_quantized_kernels() -> None:
    """Import the kernels and schemas of `quantized_decomposed`; ImportError if they are not there."""
    import executorch.kernels.quantized  # noqa: F401

    try:
        torch._C._get_schema("quantized_decomposed::quantize_per_tensor", "out")
    except RuntimeError:
        raise ImportError("executorch.kernels.quantized has no library of kernels that loads here") from None


@cache
def load_language_model_kernels() -> None:
    """Load the kernels of operators of `llama`, for which the wheel has a library of its own, if it loads here."""
    executorch_runtime()  # in which they are registered
    package = find_spec("executorch.extension.llm.custom_ops")  # itself, it imports torch's compiler
    for folder in getattr(package, "submodule_search_locations", None) or ():
        for library in Path(folder).glob("*custom_ops_aot_lib.*"):
            with suppress(OSError):  # then the engine says which kernel is missing
                torch.ops.load_library(library)  # type: ignore[no-untyped-call]


def operator_schema(name: str, overload: str) -> tuple[tuple[str, ...], frozenset[int], int] | None:
    """Return an operator's argument types, which ones it writes, and how many results it has; None if unknown."""
    # Types are in TorchScript's notation. The kernels of other operators may take their arguments in any way.
    namespace = name.partition("::")[0]
    if namespace not in ("aten", "dim_order_ops", "quantized_decomposed"):
        return None
    if namespace == "quantized_decomposed":
        with suppress(ImportError):  # then the engine says which kernel is missing
            import_quantized_kernels()
    schema: Any = operators.executorch_schema(name, overload)
    if schema is None:
        try:
            schema = torch._C._get_schema(name, overload)
        except RuntimeError:
            return None
    arguments = schema.arguments
    written = {n for n, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write}
    return tuple(str(argument.type) for argument in arguments), frozenset(written), len(schema.returns)
