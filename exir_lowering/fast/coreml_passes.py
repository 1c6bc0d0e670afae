"""Core ML's passes without what they do again about a hundred times, and what only its log would show.

* A program is checked before and after a pipeline, not after each pass, and is not made a text for a log that is off.
  A check changes nothing; it raises where a pass has left a program that is not one.
* After each change of a block, Core ML derives for all values which compressed constants they come from: nothing, if
  there are none. It asks thousands of times whether a type is a tensor.
"""

from __future__ import annotations

import logging
import sys
from functools import lru_cache
from typing import Any

from exir_lowering.fast import current

_MIL = "coremltools.converters.mil.mil"
_COMPRESSED = "constexpr_"
_CLEANED = "common::dead_code_elimination"  # after which operators have to say where they are from


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what takes the place of Core ML's functions; nothing where its converter is not in use."""
    pipelines, blocks = sys.modules.get(f"{_MIL}.passes.pass_pipeline"), sys.modules.get(f"{_MIL}.block")
    if pipelines is None or blocks is None:
        return []
    types, mapping = sys.modules[f"{_MIL}.types"], sys.modules[f"{_MIL}.types.type_mapping"]
    manager, block, is_tensor = pipelines.PassPipelineManager, blocks.Block, mapping.is_tensor
    apply, derive, remembered = manager.apply_pipeline, block._propagate_nonreplaceable_vars, lru_cache(4096)(is_tensor)

    def apply_pipeline(prog: Any, pass_pipeline: Any) -> Any:
        if current() is None or pass_pipeline is None or pipelines.logger.isEnabledFor(logging.INFO):
            return apply(prog, pass_pipeline)
        return _apply(prog, pass_pipeline, pipelines)

    def propagate(self: Any) -> None:
        if current() is None or self.outer_op is not None or _has_compressed(self):
            derive(self)

    def asked(tensor_type: Any) -> bool:
        return bool((remembered if current() is not None and isinstance(tensor_type, type) else is_tensor)(tensor_type))

    return [
        (manager, "apply_pipeline", staticmethod(apply_pipeline)),
        (block, "_propagate_nonreplaceable_vars", propagate),
        *((module, "is_tensor", asked) for module in (types, mapping)),
    ]


def _apply(program: Any, pipeline: Any, pipelines: Any) -> None:
    """Apply the passes of a pipeline to a program."""
    pipeline.validate()
    program.validate()
    passes = list(pipeline.passes)
    cleaned = len(passes) - 1 - passes[::-1].index(_CLEANED) if _CLEANED in passes else -1
    description = f"Running MIL {pipeline} pipeline"
    for number, name in enumerate(pipelines.tqdm(passes, desc=description, unit=" passes")):
        graph_pass = pipelines.PASS_REGISTRY[name]
        graph_pass.set_options(pipeline.get_options(name))
        try:
            graph_pass(program)
        except MemoryError:
            raise
        except Exception:
            pipelines.logger.error("Core ML's graph pass %r failed.", name)
            raise
        if number == cleaned:
            program.validate(check_essential_scope=True)
    program.validate()


def _has_compressed(block: Any) -> bool:
    """Return whether values of a block may come from compressed constants, or did before it was changed."""
    return any(
        operator.op_type.startswith(_COMPRESSED)
        or any(value.nonreplaceable_vars_upstream for value in operator.outputs or ())
        or any(map(_has_compressed, operator.blocks))
        for operator in block.operations
    )
