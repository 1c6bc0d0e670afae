"""ExecuTorch's runtime, as the wheel brings it; nothing here needs a compiler, neither ExecuTorch's nor this one's."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from exir_lowering._upstream.locks import conversion

__all__ = [
    "executorch_runtime",
    "import_quantized_kernels",
    "open_program",
    "operator_schema",
]


def open_program(source: str | bytes, data: str | None, *, profiled: bool = False) -> Any:
    """Open a `.pte` file in ExecuTorch's runtime.

    executorch.runtime.Program keeps what it opens to itself: it is one program per file, whose methods share their
    planned memory, so that running one method overwrites the state of another.

    Args:
        source: Its path, or its content; the content has to outlive the program.
        data: The path of its data file.
        profiled: Whether its `write_etdump_result_to_file` can tell what was run, and for how long.

    Returns:
        The runtime's program, whose `load_method` gives methods that share one planned memory.

    Raises:
        RuntimeError: The runtime refuses the file.
    """
    # Not at the top: compiling needs no runtime, whose libraries set themselves up when they are imported.
    runtime = executorch_runtime()._legacy_module
    load = runtime._load_program if isinstance(source, str) else runtime._load_program_from_buffer
    return load(
        source,
        enable_etdump=profiled,
        program_verification=runtime.Verification.InternalConsistency,
        data_path=data,
    )


@cache  # once: the filters of warnings are those of all threads
def executorch_runtime() -> Any:
    """Return the runtime of the wheel, `executorch.runtime.Runtime`, without its note that it is experimental."""
    with conversion(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from executorch.runtime import Runtime

        return Runtime.get()


def import_quantized_kernels() -> None:
    """Import the kernels of `quantized_decomposed`, which emitting and the runtime need, with their schemas.

    Raises:
        ImportError: They are not there; ExecuTorch's package swallows why.
    """
    import executorch.kernels.quantized  # noqa: F401

    try:
        torch._C._get_schema("quantized_decomposed::quantize_per_tensor", "out")
    except RuntimeError:
        raise ImportError("executorch.kernels.quantized has no library of kernels that loads here") from None


def operator_schema(name: str, overload: str) -> tuple[tuple[str, ...], frozenset[int], int] | None:
    """Return what an operator of a file takes; None when that is not known.

    torch has no public way to a schema by name. Those of `quantized_decomposed` come with their kernels. Only
    operators whose kernels are generated from the schema count: others take their arguments as they like.

    Returns:
        The types of its arguments, in TorchScript's words, which of them it writes to, and how many it returns.
    """
    namespace = name.partition("::")[0]
    if namespace not in ("aten", "dim_order_ops", "quantized_decomposed"):
        return None
    if namespace == "quantized_decomposed":
        with suppress(ImportError):  # then the engine says which kernel is missing
            import_quantized_kernels()
    try:
        schema = torch._C._get_schema(name, overload)
    except RuntimeError:
        return None
    arguments = schema.arguments
    written = {n for n, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write}
    return tuple(str(argument.type) for argument in arguments), frozenset(written), len(schema.returns)
