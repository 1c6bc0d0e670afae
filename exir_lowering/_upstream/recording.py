"""What operators a backend's ahead-of-time code applies to weights, recorded while it runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # sees each operator with its operands; no public alias

from exir_lowering._upstream.programs import pytree
from exir_lowering._upstream.tensors import is_plain


class View(NamedTuple):
    """A tensor as a view of memory, whose number it has."""

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Pieces of memory by number, and for each the call that made it; while the mode is active, calls are added."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memories: list[torch.Tensor] = []  # a tensor on each
        self.made_by: list[tuple[str, Any, Any, int] | None] = []  # operator, arguments with views, which result
        self.written: set[int] = set()  # what an operator wrote to
        self._numbers: dict[int, int] = {}

    def number(self, tensor: torch.Tensor, made_by: tuple[str, Any, Any, int] | None = None) -> int:
        """Return the number of a tensor's memory."""
        place = tensor.untyped_storage().data_ptr()
        if place not in self._numbers:
            self._numbers[place] = len(self.memories)
            self.memories.append(tensor)  # so that the address is not used again
            self.made_by.append(made_by)
        return self._numbers[place]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute a call; note it if all of its tensors have content."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if types:  # of tensors without content
            return made
        results = pytree.tree_leaves(made)
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if given and all(is_plain(each) for each in (*given, *results) if isinstance(each, torch.Tensor)):
            if func._schema.is_mutable:
                self.written.update(map(self.number, given))
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._view, (args, kwargs))
            for place, result in enumerate(results):
                if isinstance(result, torch.Tensor):
                    self.number(result, (str(func), args, kwargs, place))
        return made

    def _view(self, tensor: torch.Tensor) -> View:
        place = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        return View(self.number(tensor), tensor.dtype, *place)
