"""Every default of the compiler, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from executorch.exir import EdgeCompileConfig

from exir_lowering.errors import InputError


@dataclass(frozen=True, slots=True)
class LoweringOptions:
    """How to lower.

    Attributes:
        non_convex: What to do with a tag whose nodes cannot be one partition because a path leaves the tag and comes
            back: "split" it into convex pieces, or "raise" with the path.
        check_weights: Compare a checksum of every weight that a backend was lent before and after it ran, so that a
            backend that writes into one is caught. One read of the weights before and one after.
        edge_compile_config: How `torch.export` output becomes Edge dialect; None is ExecuTorch's default. Not used for
            programs that are in Edge dialect already.
        progress: Show the steps of long work on standard error when that is a terminal.
    """

    non_convex: Literal["split", "raise"] = "split"
    check_weights: bool = True
    edge_compile_config: EdgeCompileConfig | None = field(default=None)
    progress: bool = False

    def __post_init__(self) -> None:
        if self.non_convex not in ("split", "raise"):
            raise InputError(f'LoweringOptions(non_convex={self.non_convex!r}): expected "split" or "raise".')
        for name in ("check_weights", "progress"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"LoweringOptions({name}={getattr(self, name)!r}): expected True or False.")
        if not isinstance(self.edge_compile_config, (EdgeCompileConfig, type(None))):
            raise InputError(
                f"LoweringOptions(edge_compile_config={self.edge_compile_config!r}): expected ExecuTorch's "
                "EdgeCompileConfig or None."
            )
