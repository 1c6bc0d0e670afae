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
        require_coverage: The least share of each method's operators that has to be delegated, 0 to 1. Below it `lower`
            and `plan` raise a CoverageError that lists what is missing, before any backend is called.
        require_full: Whether every operator of each method has to be delegated; as `require_coverage=1.0`.
        progress: Show the steps of long work on standard error when that is a terminal.
    """

    non_convex: Literal["split", "raise"] = "split"
    check_weights: bool = True
    edge_compile_config: EdgeCompileConfig | None = field(default=None)
    require_coverage: float = 0.0
    require_full: bool = False
    progress: bool = False

    def __post_init__(self) -> None:
        if self.non_convex not in ("split", "raise"):
            raise InputError(f'LoweringOptions(non_convex={self.non_convex!r}): expected "split" or "raise".')
        for name in ("check_weights", "require_full", "progress"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"LoweringOptions({name}={getattr(self, name)!r}): expected True or False.")
        share = self.require_coverage
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise InputError(f"LoweringOptions(require_coverage={share!r}): expected a share between 0 and 1.")
        if not isinstance(self.edge_compile_config, (EdgeCompileConfig, type(None))):
            raise InputError(
                f"LoweringOptions(edge_compile_config={self.edge_compile_config!r}): expected ExecuTorch's "
                "EdgeCompileConfig or None."
            )
