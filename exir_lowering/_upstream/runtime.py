"""ExecuTorch's runtime from the wheel; nothing here needs a compiler, neither ExecuTorch's nor this package's."""

from __future__ import annotations

import logging
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

from exir_lowering._upstream import executorch_operators, locks

_LOG = logging.getLogger(__name__)


def open_program(source: str | bytes, data: str | None, *, profiled: bool = False) -> Any:
    """Open a `.pte` file in ExecuTorch's runtime; RuntimeError if that refuses the file.

    executorch.runtime.Program hides what it opens: one program per file, whose methods share their planned memory, so
    running one method overwrites the state of another. Content that is given instead of a path must outlive the
    program. If `profiled`, `write_etdump_result_to_file` can record what was run, and for how long.
    """
    runtime = executorch_runtime()
    load = runtime._load_program if isinstance(source, str) else runtime._load_program_from_buffer
    return load(
        source,
        enable_etdump=profiled,
        program_verification=runtime.Verification.InternalConsistency,
        data_path=data,
    )


@cache
def executorch_runtime() -> Any:
    """Return the wheel's extension module; if it cannot be imported here, whatever its libraries raise."""
    return _extension() or _wrapper()


_EXTENSION = "executorch.extension.pybindings._C"
_USED = frozenset(
    {
        *("Verification", "_get_operator_names", "_get_registered_backend_names", "_is_available"),
        *("_load_program", "_load_program_from_buffer"),
    }
)


def _extension() -> Any:
    """Return the extension module alone: its wrapper imports ExecuTorch's compiler just to issue a warning.

    The rest of what the wrapper, `portable_lib.py`, does is done here. None if this wheel has no such module, or one
    that lacks something: then the wrapper is needed.
    """
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
    with locks.engine(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from executorch.runtime import Runtime as Wrapped

        return Wrapped.get()._legacy_module


def _find_openvino() -> None:
    """Tell the runtime's OpenVINO backend where the library of an installed `openvino` package is."""
    if os.environ.get("OPENVINO_LIB_PATH"):
        return
    try:
        spec = find_spec("openvino")
    except (ImportError, ValueError):
        return
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        libraries = sorted(Path(folder, "libs").glob("libopenvino_c.so*"))
        if libraries:
            os.environ["OPENVINO_LIB_PATH"] = str(libraries[0])
        else:
            _LOG.warning(
                "The package openvino has no libopenvino_c.so in %s; set OPENVINO_LIB_PATH if its backend is needed.",
                Path(folder, "libs"),
            )
        return


@dataclass(eq=False, repr=False)
class _CompileSpec:
    """A compile spec of a file: equal to one of ExecuTorch's, and an instance of that class once it is imported.

    ExecuTorch's class is in its compiler, which is not needed to run a file.
    """

    key: str
    value: bytes

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return _compile_spec_class() or _CompileSpec

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, self.__class__):
            return NotImplemented
        return bool((self.key, self.value) == (other.key, other.value))

    __hash__ = None  # type: ignore[assignment]  # as ExecuTorch's

    def __reduce__(self) -> Any:  # as what it is in the process that reads it
        return compile_spec, (self.key, self.value)

    def __repr__(self) -> str:
        return f"CompileSpec(key={self.key!r}, value={self.value!r})"


def _compile_spec_class() -> Any:
    return getattr(sys.modules.get("executorch.exir.backend.compile_spec_schema"), "CompileSpec", None)


def compile_spec(key: str, value: bytes) -> Any:
    """Return a compile spec for delegates: of ExecuTorch's class, or of its substitute until that is imported."""
    return (_compile_spec_class() or _CompileSpec)(key, value)


def import_quantized_kernels() -> None:
    """Import the kernels of `quantized_decomposed`, which emitting and the runtime need, with their schemas.

    ImportError: They are not there; ExecuTorch's package hides the reason.
    """
    import executorch.kernels.quantized  # noqa: F401

    try:
        torch._C._get_schema("quantized_decomposed::quantize_per_tensor", "out")
    except RuntimeError:
        raise ImportError("executorch.kernels.quantized has no library of kernels that loads here") from None


def operator_schema(name: str, overload: str) -> tuple[tuple[str, ...], frozenset[int], int] | None:
    """Return what an operator of a file takes; None if that is unknown.

    torch has no public way to get a schema by name. Those of `quantized_decomposed` come with their kernels. Only
    operators whose kernels are generated from the schema count: others may take their arguments in any way. The types
    are in TorchScript's notation; then come which arguments it writes to, and how many results it has.
    """
    namespace = name.partition("::")[0]
    if namespace not in ("aten", "dim_order_ops", "quantized_decomposed"):
        return None
    if namespace == "quantized_decomposed":
        with suppress(ImportError):  # then the engine says which kernel is missing
            import_quantized_kernels()
    schema: Any = executorch_operators.schema(name, overload)
    if schema is None:
        try:
            schema = torch._C._get_schema(name, overload)
        except RuntimeError:
            return None
    arguments = schema.arguments
    written = {n for n, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write}
    return tuple(str(argument.type) for argument in arguments), frozenset(written), len(schema.returns)
