"""A delegate around a delegate, which checks whether it keeps its contract."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from executorch.exir.backend.compile_spec_schema import CompileSpec

from exir_lowering.errors.interrupts import let_through
from exir_lowering.plugins.delegate import Delegate, DelegateContext

Change = Callable[[bytes], bytes]


@dataclass(slots=True, eq=False)
class _WatchedHandle:
    content: Any
    executed: int = 0
    destroyed: int = 0


class WatchedDelegate(Delegate):
    """Hands everything on to another delegate, with payloads changed by `change` before they are compiled."""

    def __init__(self, inner: Delegate, change: Change | None = None, *, probe: bool = False) -> None:
        """With `probe`, the second execution of each payload is first tried with a wrong number of inputs."""
        self.inner, self.change, self.probe = inner, change, probe
        self.written: list[str] = []  # inputs that `execute` wrote to, in words
        self.accepted: list[str] = []  # wrong numbers of inputs that `execute` took without raising
        self.raised: list[str] = []  # what `destroy` raised
        self.compiled = 0  # payloads
        self.destroyed = 0  # handles
        self.again = 0  # handles that were destroyed more than once
        self.kept: list[weakref.ref[Any]] = []  # handles that can be looked at without keeping them
        self.held: list[Any] = []  # handles that cannot and that hold others, such as tuples and lists, after `destroy`

    def is_available(self) -> bool:
        """Ask the delegate."""
        return self.inner.is_available()

    def compile(self, processed: bytes, compile_specs: list[CompileSpec], context: DelegateContext) -> Any:
        """Let the delegate compile a payload, changed or not; no handle is none here too."""
        payload = processed if self.change is None else self.change(processed)
        content = self.inner.compile(payload, compile_specs, context)
        self.compiled += 1
        if type(content).__weakrefoffset__ and not isinstance(content, type):
            self.kept.append(weakref.ref(content))
        return _WatchedHandle(content) if content is not None else None

    def execute(self, handle: _WatchedHandle, inputs: list[Any]) -> Sequence[Any]:
        """Let the delegate execute a payload, and compare its inputs before and after."""
        if self.probe and handle.executed == 1:
            self._probe(handle, inputs)
        before = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
        # The same memory, without torch's count of writes: they are found here, and by what is in the memory.
        outputs = self.inner.execute(handle.content, [v.data if isinstance(v, torch.Tensor) else v for v in inputs])
        handle.executed += 1
        self.written += [
            f"input {number} of {len(inputs)}"
            for number, (old, new) in enumerate(zip(before, inputs, strict=True))
            if isinstance(new, torch.Tensor) and not _equal(old, new)
        ]
        return outputs

    def _probe(self, handle: _WatchedHandle, inputs: list[Any]) -> None:
        for wrong in (inputs[:-1], [*inputs, *inputs[-1:]]):
            if len(wrong) == len(inputs):
                continue
            try:
                self.inner.execute(handle.content, [value.clone() for value in wrong])
            except Exception as error:  # whatever it is, nothing was computed
                let_through(error)
                continue
            self.accepted.append(f"{len(wrong)} inputs instead of {len(inputs)}")

    def destroy(self, handle: _WatchedHandle) -> None:
        """Let the delegate destroy a handle."""
        handle.destroyed += 1
        self.destroyed += handle.destroyed == 1
        self.again += handle.destroyed == 2
        if handle.destroyed == 1 and isinstance(handle.content, (tuple, list, dict, set)) and handle.content:
            self.held.append(handle.content)
        try:
            self.inner.destroy(handle.content)
        except Exception as error:
            let_through(error)
            self.raised.append(f"{type(error).__name__}: {error}")

    def count_alive(self) -> int:
        """Return how many different handles are still alive; of `held`, those with more references than a new list."""
        kept = {id(content) for reference in self.kept if (content := reference()) is not None}
        different = list({id(content): content for content in self.held}.values())
        self.held.clear()
        different.append([])
        references = [sys.getrefcount(content) for content in different]
        return len(kept) + sum(count > references[-1] for count in references[:-1])


def _equal(old: torch.Tensor, new: torch.Tensor) -> bool:
    return bool(((old == new) | ((old != old) & (new != new))).all())
