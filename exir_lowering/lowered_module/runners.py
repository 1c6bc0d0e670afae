"""What executes the methods of a lowered module: the delegates of its file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

import torch

from exir_lowering._upstream import installed
from exir_lowering.errors import BackendContractError, BackendUnavailableError, InvariantError
from exir_lowering.lowered_module.convention import Convention
from exir_lowering.lowered_module.source import Source
from exir_lowering.plugins import availability, registry
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.value_kinds import NULL, Tensor
from exir_lowering.runtime import LoadedProgram
from exir_lowering.runtime.inputs import describe, prepare, show

Engine: TypeAlias = Literal["runtime", "interpreter"]


class Runner(Protocol):
    """Executes methods; what a method writes into its buffers is kept for its next run."""

    def run(self, convention: Convention, leaves: Sequence[Any]) -> list[Any]:
        """Execute a method with the values in its arguments; return its outputs, flat."""
        ...

    def fresh(self) -> Runner:
        """Return another runner, whose methods are in their initial state."""
        ...

    def describe(self, name: str) -> str:
        """Describe what executes a method."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DelegateRunner:
    """Executes each delegate of a file through its `Delegate`, or the runtime's own backend."""

    _source: Source
    _loaded: LoadedProgram | None  # the file without the methods that are missing; None when it has no others
    missing: Mapping[str, str]  # the methods that cannot be executed here, and why
    _again: Callable[[], LoadedProgram | None]  # loads it again

    def run(self, convention: Convention, leaves: Sequence[Any]) -> list[Any]:
        """Execute a method; it raises what `LoweredMethod.__call__` does."""
        name = convention.method
        if name in self.missing or self._loaded is None:
            raise BackendUnavailableError(self.missing[name])
        method = self._source.methods[name]
        outputs = self._loaded.run(name, *file_inputs(convention, method, leaves))
        check_outputs(convention, method, outputs)
        return outputs

    def fresh(self) -> DelegateRunner:
        """Return another runner, with methods in their initial state; InputError if the file is not the one loaded."""
        self._source.check()
        return DelegateRunner(self._source, self._again(), self.missing, self._again)

    def describe(self, name: str) -> str:
        """Describe what executes a method."""
        by = ", ".join(self._source.methods[name].backends) or "ExecuTorch's kernels"
        return f"{by}, which cannot be executed here" if name in self.missing else by


def file_inputs(convention: Convention, method: MethodSpec, leaves: Sequence[Any]) -> list[Any]:
    """Return the values in a method's arguments as its file takes them (None for a str); InputError if it does not."""
    given = [
        None if fixed is not None and value.kind == NULL else leaf
        for leaf, fixed, value in zip(leaves, convention.inputs, method.inputs, strict=True)
    ]
    return prepare(f"{convention.method}()", method, given, convention.labels)


def check_outputs(convention: Convention, method: MethodSpec, outputs: Sequence[Any]) -> None:
    """Check the declared types of outputs: BackendContractError if the method has delegates, else InvariantError."""
    kind = BackendContractError if method.backends else InvariantError
    by = f"of {', '.join(method.backends)}" if method.backends else "of ExecuTorch's kernels"
    if len(outputs) != len(method.outputs):
        raise kind(f"{convention.method}() returned {len(outputs)} outputs {by}, expected {len(method.outputs)}.")
    for index, (value, output) in enumerate(zip(method.outputs, outputs, strict=True)):
        expected, is_tensor = value.content, isinstance(output, torch.Tensor)
        right = is_tensor == isinstance(expected, Tensor)
        if isinstance(expected, Tensor) and right:
            right = output.dtype == expected.dtype and expected.misfit(output.shape) is None
        if not right:
            raise kind(
                f"{convention.method}(): {convention.output_label(index)} is {show(output)} {by}, expected "
                f"{describe(value)}."
            )


def open_available(source: Source, delegates: Any, engine: Engine) -> DelegateRunner:
    """Load the methods that can be executed here; what is returned says why the others cannot."""
    given = registry.check_delegates(delegates)
    reasons: dict[str, str] = {}
    for name, method in source.methods.items():
        for backend in method.backends:
            found = availability.executor(backend, given)
            if isinstance(found, availability.Missing):
                reasons[name] = f"Method {name!r} needs the backend {backend!r}, and {found.reason}. {found.advice}"

    load_others = partial(source.open, delegates, engine, without=reasons)
    try:
        loaded = load_others()
    except BackendUnavailableError as error:
        # Python delegates cannot be used at all, or not so many of them.
        own = installed.own_backends()
        reasons.update({name: str(error) for name, m in source.methods.items() if not own.issuperset(m.backends)})
        loaded = load_others()
    return DelegateRunner(source, loaded, reasons, load_others)
