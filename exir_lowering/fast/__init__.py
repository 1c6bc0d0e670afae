"""Speed: what torch and ExecuTorch compute again for each call, node and pass of a lowering is computed once.

Only speed lives here. With `LoweringOptions(fast=False)`, or where upstream's code is not known (`_upstream.pins`),
torch and ExecuTorch do all of it, slower, and the bytes are the same. There are three doors: `convert`, `accelerated`
and `state`. The modules have names of upstream that may be gone; they are imported by what is on.

* `conversion` by `decompose` and `edge_operators`: each distinct call (`calls`) is converted once, with others, and
  what it becomes (`templates`) takes the place of all calls like it (`rewriter`); `inplace` makes writes functional;
* `fake_results`, `xnnpack_passes`: passes compute the value of equal nodes once; those with nothing to do are skipped;
* `vulkan_patterns`: graphs of patterns that cannot match are not built;
* `coreml_passes`: programs of Core ML are checked and described after all of its passes, not after each;
* `contents`: emitted contents are compared instead of hashed;
* `lazy_code`, `lookups`: generated code, tables and kernels are made when they are needed, and once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal

from torch.export import ExportedProgram

from exir_lowering._upstream import pins
from exir_lowering._upstream.locks import during, replacing
from exir_lowering._upstream.pins import state as state
from exir_lowering._upstream.tracing import kernel_cache
from exir_lowering._upstream.value_keys import NotCoveredError
from exir_lowering.errors import exception_text


def convert(
    name: str, program: ExportedProgram, partitioners: Sequence[Any], config: Any, *, decomposed: bool = False
) -> tuple[ExportedProgram | None, tuple[str, ...]]:
    """Convert a method's program, a private copy, to Edge dialect, as ExecuTorch's `to_edge_transform_and_lower` does.

    Args:
        name: The method.
        program: The program, which may be changed.
        partitioners: What says which operators stay whole.
        config: ExecuTorch's configuration, whose lists may be changed.
        decomposed: Whether the program is functional and decomposed already.

    Returns:
        The program, None if upstream has to convert another copy; and what was left to ExecuTorch, with reasons.
    """
    if not pins.is_on("fast Edge conversion"):
        return None, ()
    try:
        conversion = import_module("exir_lowering.fast.conversion").Conversion(name, config)
        return conversion.convert(program, partitioners, decomposed), conversion.left
    except MemoryError:
        raise
    except Exception as error:  # ExecuTorch converts what is valid, and says what is wrong with what is not
        reason = str(error) if isinstance(error, NotCoveredError) else exception_text(error)
        return None, (f"the whole conversion: {reason}",)


@dataclass(slots=True, eq=False)
class Work:
    """What one thread remembers from its outermost `accelerated()` on; forgotten with it."""

    forms: dict[Any, Any] = field(default_factory=dict)  # of results, by operator and the forms of its inputs
    symbols: dict[Any, Any] = field(default_factory=dict)  # the symbolic sizes in forms, by what these have for them
    searched: Any = None  # the graph in which Vulkan looks for patterns
    traced: Any = None  # XNNPACK's partition whose nodes have the values that tracing would give them
    hints: dict[type, Any] = field(default_factory=dict)  # the annotations of classes that are written as JSON
    running: Any = None  # the class of XNNPACK's pass that runs, if its condition was written for it
    tables: dict[Any, Any] = field(default_factory=dict)  # of signatures, by identity
    preprocessed: dict[Any, Any] | None = None  # named data of this step's delegates, to be kept once
    emitted: dict[Any, Any] | None = None  # what this step emits


working: ContextVar[Work | None] = ContextVar("exir_lowering_accelerated", default=None)


def current() -> Work | None:
    """Return what the calling thread remembers, None if it does not accelerate."""
    return working.get()


@contextmanager
def accelerated(
    fast: bool = True, step: Literal["look up", "convert", "preprocess", "emit"] = "convert"
) -> Iterator[None]:
    """Reuse, in this thread, what upstream would compute again while a step runs.

    Args:
        fast: With False nothing is reused, even inside another such context.
        step: The step. No store of named data may outlive an emission. To look up torch's operators takes less time
            to set up.
    """
    if not fast:
        with during(working, None, nullcontext()), during(kernel_cache, None, nullcontext()):
            yield
    elif step == "look up":
        with _OPERATORS:
            yield
    else:
        work = current() or Work()
        if step == "preprocess":
            work = replace(work, preprocessed={})
        elif step == "emit":
            work = replace(work, emitted={})
        kernels = import_module("exir_lowering.fast.lookups") if pins.is_on("reused kernels") else None
        with _OPERATORS, during(kernel_cache, kernels, nullcontext()), during(working, work, _ACCELERATED):
            yield


_PARTS = {
    "lookups.histories": "node histories",
    "lazy_code.replacements": "lazy graph code",
    "lookups.signature_tables": "signature tables",
    "fake_results.replacements": "reused pass results",
    "fake_results.nodes": "nodes of passes",
    "fake_results.tracing": "passes of XNNPACK",
    "lookups.dim_orders": "dim orders and annotations",
    "xnnpack_passes.replacements": "passes of XNNPACK",
    "vulkan_patterns.replacements": "patterns of Vulkan",
    "coreml_passes.replacements": "passes of Core ML",
    "contents.replacements": "content comparison",
    "contents.xnnpack_hashes": "reused XNNPACK hashes",
}
"""The functions that return what replaces something, in order, each with its feature; see `pins`."""


def _replace_in(part: str, feature: str) -> list[tuple[Any, str, Any]]:
    """Return what a function replaces; nothing, and its module is not imported, if its feature is off."""
    if not pins.is_on(feature):
        return []
    module, _, function = part.partition(".")
    replacements: list[tuple[Any, str, Any]] = getattr(import_module(f"{__name__}.{module}"), function)()
    return replacements


_ACCELERATED = replacing(lambda: [new for part, feature in _PARTS.items() for new in _replace_in(part, feature)])
_OPERATORS = replacing(lambda: _replace_in("lookups.composites", "composite operators"))
