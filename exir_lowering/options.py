"""The options of the compiler: every default, in one place."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from exir_lowering.errors import InputError

if TYPE_CHECKING:
    from executorch.exir import EdgeCompileConfig


FINITE_BOUND = 1e6  # the magnitude up to which the elements of an input that is "finite" are

ASSUMPTIONS: Mapping[str, str] = {
    "finite": f"no element is NaN, and each is at most {FINITE_BOUND:g} in magnitude",
    "finite_rows": "no row along the last dimension is entirely -inf, entirely False or, of integers, entirely 0",
}
"""What can be assumed of an input of the model, and what exactly that promises."""

MemoryPlanner: TypeAlias = Literal["greedy", "naive"]
"""Which of ExecuTorch's algorithms plans the memory of methods."""

_FLAGS = ("check_weights", "progress", "fast")
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True, slots=True)
class LoweringOptions:
    """How to lower.

    Attributes:
        non_convex: What to do with a tag whose nodes cannot be a single partition because a path leaves the tag and
            comes back: "split" it into convex pieces, or "raise" an error with the path.
        check_weights: Whether to compare a checksum of every weight before and after a backend ran, to catch a backend
            that writes into one. This reads the weights twice.
        edge_compile_config: How to convert `torch.export` output to Edge dialect; None is ExecuTorch's default. Not
            used for programs that are already in Edge dialect.
        require_coverage: The minimum share of each method's operators that must be delegated, 0 to 1 (all). Below it,
            `lower` and `plan` raise a CoverageError that lists what is missing, before any backend is called.
        on_backend_error: What to do when a backend fails on a partition: None or "raise" its error; "fallback", which
            gives the operators to the next partitioner, or leaves them on the host; or "split", which first cuts the
            partition until what fails is isolated. The report says what failed. A backend that breaks its contract is
            an error. A partitioner's check of an operator that raises is the reason why the operator stays on the host,
            but with "raise" an error.
        progress: Whether to show the progress of long work on standard error if that is a terminal.
        fast: Whether this package's own code converts to Edge dialect what it covers, and torch and ExecuTorch reuse
            results, instead of computing them again, in their passes, in backends and in the emitter. Without it
            ExecuTorch does all of that; the bytes of the files are the same.
        rewrites: The rewrites that turn the Edge programs into equivalent, faster ones before a partitioner sees them:
            "safe", "none", or a sequence of names and `Rewrite` objects, in their order; None is "safe" for `lower`,
            `plan` and torch.compile's graphs without gradients, "none" for `to_backend` and other graphs.
        assume: What holds for every tensor that the model will be given, by input name, where rewrites cannot prove it:
            "finite" (no element is NaN or infinite, or larger than 1e6) or "finite_rows" (in a mask, no row along the
            last dimension is entirely -inf, or entirely False). Results are undefined for inputs that break it.
        cache: Where results are kept for later lowerings: a folder, True for the user's cache folder, False for none.
        executor: What runs the work of backends that declare `parallel`; None for this package's processes or threads.
        jobs: How many partitions are lowered at once, at least 1. Bytes and order do not depend on it.
        memory_planner: Which of ExecuTorch's algorithms plans the memory of methods: "greedy", or "naive", which never
            uses memory twice. For another one, give `emit` a configuration with a memory planning pass.
        require_memory: The most memory that ExecuTorch's runtime may allocate for the tensors of a method, in bytes or
            as text such as "8 MB" or "512 KiB". Above it, `lower` and `plan` raise a MemoryRequirementError that lists
            the tensors at the peak, before any backend is called; and `emit`, if it plans otherwise. What backends
            allocate themselves is not counted. None for no limit.
        bounds: How large dynamic dimensions get, also together: `{"height*width": 1_000_000, "seq": 512}`, by the names
            of the `torch.export.Dim`s, or by an input and its dimension, as "tokens.1". Memory is planned for the
            largest inputs within them, and larger ones are refused. By method, where methods differ:
            `{"prefill": {"seq": 512}}`.
        unsupported: What to do with an operator that stays on the host, for which the runtime has no kernel that runs,
            and for which no others are known that compute the same: "raise" an InputError with its line, in `lower` and
            `plan`; or "allow", for runtimes with more kernels.
        target: The runtime that the file is for: a release of ExecuTorch such as "1.4.1", or the path of a JSON file
            with one target, as `exir-lower check --target` takes it. None is the release that is installed.
    """

    non_convex: Literal["split", "raise"] = "split"
    check_weights: bool = True
    edge_compile_config: EdgeCompileConfig | None = field(default=None)
    require_coverage: float = 0.0
    on_backend_error: Literal["raise", "fallback", "split"] | None = None
    progress: bool = False
    fast: bool = True
    rewrites: Literal["safe", "none"] | Sequence[Any] | None = field(default=None, hash=False)
    assume: Mapping[str, str] = field(default_factory=dict, hash=False)
    cache: str | os.PathLike[str] | bool = False
    executor: Executor | None = None
    jobs: int = 1
    memory_planner: MemoryPlanner = "greedy"
    require_memory: int | str | None = None
    bounds: Mapping[str, int | Mapping[str, int]] = field(default_factory=dict, hash=False)
    unsupported: Literal["raise", "allow"] = "raise"
    target: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        read_size(self.require_memory)
        chosen, share, planners = self.rewrites, self.require_coverage, get_args(MemoryPlanner)
        kinds = [kind.__name__ for kind in type(self.edge_compile_config).__mro__]  # without an import of ExecuTorch's
        converts = "NoneType" in kinds or "EdgeCompileConfig" in kinds
        named = chosen in ("safe", "none") if isinstance(chosen, str) else isinstance(chosen, (Sequence, type(None)))
        sets = '"safe", "none", or a sequence of names and Rewrite objects such as ["safe", "mine"]'
        counts = isinstance(self.jobs, int) and not isinstance(self.jobs, bool) and self.jobs >= 1
        shares = isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share <= 1
        modes = ("raise", "fallback", "split", None)
        for name, fits, expected in (
            ("non_convex", self.non_convex in ("split", "raise"), '"split" or "raise"'),
            ("on_backend_error", self.on_backend_error in modes, '"raise", "fallback", "split" or None'),
            ("unsupported", self.unsupported in ("raise", "allow"), '"raise" or "allow"'),
            ("target", isinstance(self.target, (str, os.PathLike, type(None))), "a release, a path or None"),
            ("memory_planner", self.memory_planner in planners, f"one of {planners}"),
            ("rewrites", named, sets),
            ("assume", isinstance(self.assume, Mapping), "a mapping from input names"),
            ("bounds", isinstance(self.bounds, Mapping), "a mapping from dimensions, or products of them, to numbers"),
            ("cache", isinstance(self.cache, (str, os.PathLike, bool)), "a folder, True or False"),
            ("executor", isinstance(self.executor, (Executor, type(None))), "a concurrent.futures.Executor or None"),
            ("jobs", counts, "a number of jobs, at least 1"),
            *((flag, isinstance(getattr(self, flag), bool), "True or False") for flag in _FLAGS),
            ("require_coverage", shares, "a share between 0 and 1"),
            ("edge_compile_config", converts, "ExecuTorch's EdgeCompileConfig or None"),
        ):
            if not fits:
                raise InputError(f"LoweringOptions({name}={getattr(self, name)!r}): expected {expected}.")
        for name, assumption in self.assume.items():
            if not isinstance(name, str) or assumption not in ASSUMPTIONS:
                raise InputError(
                    f"LoweringOptions(assume={{{name!r}: {assumption!r}}}): expected the name of an input and one of "
                    f"{'; '.join(f'{key!r} ({text})' for key, text in ASSUMPTIONS.items())}."
                )


def read_size(given: int | str | None) -> int | None:
    """Return the bytes that the option `require_memory` stands for."""
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given >= 0):
        return given
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([a-zA-Z]*)\s*", given) if isinstance(given, str) else None
    if found is None or found[2].lower() not in _UNITS:
        raise InputError(
            f"LoweringOptions(require_memory={given!r}): expected a number of bytes, or text such as '8 MB' or "
            "'512 KiB', with the unit B, KB, MB, GB (powers of 1000), KiB, MiB or GiB (powers of 1024)."
        )
    return int(float(found[1]) * _UNITS[found[2].lower()])
