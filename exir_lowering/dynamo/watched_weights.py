"""Weights that a graph is lowered with as constants: shared, not copied, and watched for changes.

AOTAutograd passes parameters and buffers as inputs. Some backends take an operator only if its weights are constants,
since they pack them into the payload. Such a payload is valid as long as nobody writes a weight, by whatever way:
before each call, the weights that the call is given are compared with those that were packed, as far as was asked for.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch

from exir_lowering._upstream.tensors import version
from exir_lowering.dynamo.compiled import Boxed
from exir_lowering.graphs.checksums import checksum

Check = Literal["sample", "content", "frozen"]
"""What is compared before each call, besides where a weight lies: the number of torch's writes into it and a sample of
its content, or all of its content, or nothing."""

_SMALL = 1 << 16
"""Bytes up to which the whole content is compared with a copy, which is faster than a checksum."""

_WHOLE, _SAMPLED = 4096, 16
"""Bytes up to which a sample is the whole content, and how many words of 8 bytes it has beyond, over the weight."""

_WORTH = 100
"""Calls between two changes of weights for which it is worth to compile again, but for the first change."""


class Mark:
    """What a weight, an input of a graph, was when it was packed; its memory is kept as long as the weight is."""

    def __init__(self, position: int, weight: torch.Tensor, how: Check) -> None:
        own = weight.detach()
        self.position, self._address, self._version = position, own.data_ptr(), version(own)
        held: list[Any] = [own, None if how == "frozen" else _comparison(own, whole=how == "content")]
        self._held = held  # the memory, and what compares its content; None if it may be written
        self._lives = weakref.ref(weight, lambda _: held.clear())

    def holds(self, args: Sequence[Any]) -> bool:
        """Return whether the inputs of a call have the weight as it was."""
        given, held = args[self.position], tuple(self._held)
        if not held or given.data_ptr() != self._address:
            return False
        if given.shape != held[0].shape or given.stride() != held[0].stride():
            return False
        unchanged = held[1]
        return unchanged is None or (version(given) == self._version and unchanged())


def _comparison(weight: torch.Tensor, *, whole: bool) -> Callable[[], bool]:
    """Return what compares a weight's content with what it is now; writes by other libraries are not counted."""
    storage = weight.untyped_storage()
    if whole and weight.nbytes <= _SMALL and weight.is_contiguous():
        memory = weight.reshape(-1).view(torch.uint8)
        copy = memory.clone()
        return lambda: torch.equal(memory, copy)
    if whole:
        known = checksum(storage)
        return lambda: checksum(storage) == known
    sample = _sample(weight)
    content = sample.tobytes()
    return lambda: sample.tobytes() == content


def _sample(weight: torch.Tensor) -> np.ndarray:
    """Return a view of some of a weight's memory, in steps that no row of a matrix is likely to have."""
    memory = torch.empty(0, dtype=torch.uint8).set_(weight.untyped_storage()).numpy()
    if weight.is_contiguous():
        start = weight.storage_offset() * weight.element_size()
        memory = memory[start : start + weight.nbytes]
    if len(memory) <= _WHOLE:
        return memory
    count = len(memory) // 8
    return memory[: 8 * count].view(np.int64)[:: (count // _SAMPLED) | 1]


class Watched:
    """A function with weights as constants, compiled again when one has changed; if that is often, with inputs."""

    def __init__(
        self,
        marks: Sequence[Mark],
        function: Boxed,
        again: Callable[[Sequence[Any] | None], tuple[Sequence[Mark], Boxed]],  # None: weights as inputs
    ) -> None:
        self._current: tuple[Sequence[Mark], Boxed] = (tuple(marks), function)
        self._again = again
        self._served = 0
        self._changed = False
        self._lock = threading.RLock()

    def __call__(self, args: list[Any]) -> Any:
        """Execute the function, with the weights as they are now."""
        marks, function = self._current
        for each in marks:
            if not each.holds(args):
                function = self._renew(args)
                break
        self._served += 1
        return function(args)

    def _renew(self, args: Sequence[Any]) -> Boxed:
        with self._lock:
            if not all(each.holds(args) for each in self._current[0]):  # unless another thread has done it
                worth = _WORTH if self._changed else 2
                self._current = self._again(args if self._served >= worth else None)
                self._served, self._changed = 0, True
            return self._current[1]
