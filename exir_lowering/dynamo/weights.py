"""Weights that a graph is lowered with as constants: lent by reference, and watched, so that no copy is ever stale.

AOTAutograd passes parameters and buffers as inputs. Some backends take an operator only if its weights are constants,
since they pack them into the payload. Such a payload is valid as long as nobody writes a weight, by whatever way:
before each call, the weights that the call is given are compared with those that were packed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exir_lowering._upstream.tensors import version
from exir_lowering.dynamo.execution import Boxed
from exir_lowering.graphs.checksums import checksum

_SMALL = 1 << 16
"""Bytes up to which a weight is compared with a copy, which is faster than a checksum."""


_WORTH = 100
"""Calls between two changes of weights for which it is worth to compile again, but for the first change."""


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """What a weight was when it was packed."""

    position: int  # which input of the graph it is
    weight: torch.Tensor  # keeps the memory in place
    address: int
    version: int  # how often torch had written to it
    content: torch.Tensor | int | None  # a copy as integers, or a checksum of its memory; None if not compared
    memory: torch.Tensor | None  # its memory as integers, for a copy

    def holds(self, args: Sequence[Any]) -> bool:
        """Return whether the inputs of a call have the weight as it was."""
        given = args[self.position]
        if given.data_ptr() != self.address or version(given) != self.version or given.shape != self.weight.shape:
            return False
        if isinstance(self.content, torch.Tensor):
            return self.memory is not None and torch.equal(self.memory, self.content)
        return self.content is None or self.content == checksum(self.weight.untyped_storage())


def mark(position: int, weight: torch.Tensor, *, contents: bool) -> Mark:
    """Note what a weight, an input of the graph, is now.

    Its content is compared too if asked for: writes through `.data`, or by other libraries, are not counted.
    """
    own = weight.detach()
    content: torch.Tensor | int | None = None
    memory = None
    if contents and own.nbytes <= _SMALL and own.is_contiguous():
        memory = own.reshape(-1).view(torch.uint8)
        content = memory.clone()
    elif contents:
        content = checksum(own.untyped_storage())
    return Mark(position, own, own.data_ptr(), version(own), content, memory)


class Watched:
    """A function that was compiled with weights as constants; it is compiled again when one has changed.

    Weights that change with every call, as in training, or a second time after few calls, become inputs: then nothing
    is compiled again. `again` compiles with the weights among a call's inputs, or for None with weights as inputs.
    """

    def __init__(
        self,
        marks: Sequence[Mark],
        function: Boxed,
        again: Callable[[Sequence[Any] | None], tuple[Sequence[Mark], Boxed]],
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
