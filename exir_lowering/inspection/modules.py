"""The modules of the model that a file's instructions are from, as far as it or its debug information says."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exir_lowering.errors.interrupts import let_through
from exir_lowering.pte import digests
from exir_lowering.pte.dataflow import DELEGATE, KERNEL, PlanInstruction
from exir_lowering.pte.debug_info import SUFFIX, DebugInfo, MethodDebug
from exir_lowering.pte.mapping import MappedFile


@dataclass(frozen=True, slots=True)
class Modules:
    """Finds the modules of a method's instructions."""

    debug: MethodDebug
    names: Mapping[int, str]  # of values
    weights: Sequence[Sequence[str]]  # the names of those that each delegate reads
    found: set[int] = field(default_factory=set)  # the delegates whose modules were found

    def find(self, number: int, instruction: PlanInstruction) -> tuple[str, ...]:
        """Return the paths of the modules that an instruction is from: of each delegate once, as it may have many."""
        kind, target, values = instruction
        if kind == DELEGATE:
            if target in self.found:
                return ()
            self.found.add(target)
        handles = self.debug.kernels.get(number, ()) if kind == KERNEL else ()
        if kind == DELEGATE and target < len(self.debug.delegates):
            handles = self.debug.delegates[target].handles
        nodes = (node for handle in handles for node in self.debug.nodes.get(handle, ()))
        paths = [node.modules[-1].partition(": ")[0] for node in nodes if node.modules]
        named = self.weights[target] if kind == DELEGATE else (self.names.get(value, "") for value in values)
        return tuple(dict.fromkeys(filter(None, paths or (name.rpartition(".")[0] for name in named))))


def find_debug(file: MappedFile) -> Mapping[str, MethodDebug]:
    """Return what the debug information beside a file says of its methods, by name, if it is about this file."""
    path = Path(file.source).with_suffix(SUFFIX) if isinstance(file.source, str) and Path(file.source).name else None
    if path is None or not path.is_file() or not digests.is_sealed(file.content):
        return {}
    try:
        info = DebugInfo.from_json(path.read_bytes())
    except (OSError, ValueError) as error:
        let_through(error)
        warnings.warn(f"The debug information {str(path)!r} is not used: {error}.", stacklevel=3)
        return {}
    return info.methods if info.digest == digests.identity(file.content) else {}
