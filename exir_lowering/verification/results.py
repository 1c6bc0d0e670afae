"""What `verify` found: for each method and output the errors, and the case in which the worst one is."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from exir_lowering.pte.printing import in_notebook
from exir_lowering.verification import text

VERSION = 1
"""Incremented when a field of the JSON changes its meaning or is removed."""


@dataclass(frozen=True, slots=True)
class OutputResult:
    """How far an output is from that of eager PyTorch, over all calls.

    Attributes:
        index: Which output of the file it is, from 0.
        name: What the program calls it.
        dtype: Its element type, such as "float32", or the type of a plain value.
        ok: Whether each call was within the tolerance.
        tolerance: The tolerance in words.
        largest_error: The largest absolute error of the worst call, which is the one furthest beyond its tolerance.
        allowed_error: The absolute error that was allowed in it.
        mean_error: The mean absolute error in it.
        relative_error: The largest relative error in it, of elements that are not small.
        sqnr: The signal to error ratio in it, in dB; inf for equal outputs.
        cosine: The cosine of the angle between the outputs in it.
        case: The name of its case, such as "constant 0.5".
        call: Which call of the method in the case it is, from 1.
        problem: What is wrong where it is not the size of an error, such as NaN in other places; "" for nothing.
        off: The names of the cases in which it is off, in their order.
    """

    index: int
    name: str
    dtype: str
    ok: bool
    tolerance: str
    largest_error: float
    allowed_error: float
    mean_error: float
    relative_error: float
    sqnr: float
    cosine: float
    case: str
    call: int
    problem: str
    off: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LocalError:
    """How far a delegate or kernel is from the same operators in eager PyTorch.

    Attributes:
        what: The delegate or kernel, such as "delegate 0 (XnnpackBackend)" or "aten.add.out".
        instruction: The number of its instruction in the file.
        local: The largest error divided by the allowed one, on eager PyTorch's inputs; above 1 it is off.
        chained: The same in the chain, where inputs have the errors of earlier instructions.
        largest_error: The largest absolute error on eager PyTorch's inputs.
        nodes: The nodes of the program whose values it was compared in.
        source: The model's line, "" where it is not known.
    """

    what: str
    instruction: int
    local: float
    chained: float
    largest_error: float
    nodes: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class MethodResult:
    """What was found about a method.

    Attributes:
        name: The method.
        outputs: Its outputs, in the order of the file.
        cases: The names of the cases that were compared.
        calls: How many calls were compared.
        skipped: How many calls were left out, as eager PyTorch refused their inputs.
        skipped_reason: What PyTorch said to the first of them.
        quantized: Whether the program is quantised.
        stateful: Whether the method has state.
        problem: Why the file failed in a call in which PyTorch did not, with the case; "" if it never did.
        notes: Differences only for inputs with NaN or infinity, which backends need not keep: not counted as off.
        errors: Of the call that is the furthest off, the error of each kernel and delegate that could be compared, in
            the file's order; () where nothing is off, or without debug information.
    """

    name: str
    outputs: tuple[OutputResult, ...]
    cases: tuple[str, ...]
    calls: int
    skipped: int
    skipped_reason: str
    quantized: bool
    stateful: bool
    problem: str
    notes: tuple[str, ...]
    errors: tuple[LocalError, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the file gave what eager PyTorch did in each call that was compared."""
        return not self.problem and all(output.ok for output in self.outputs)


@dataclass(frozen=True, slots=True, repr=False)
class Verification:
    """Whether a file computes what its programs do; `print` shows it.

    Attributes:
        file: What was verified.
        engine: What ran it: "runtime" or "interpreter".
        seed: The seed of the inputs that were generated, None where all were given.
        methods: What was found, by method, in the order of the programs.
        unverified: Methods of the file for which no program was given.
    """

    file: str
    engine: str
    seed: int | None
    methods: Mapping[str, MethodResult]
    unverified: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every method matches eager PyTorch."""
        return all(method.ok for method in self.methods.values())

    def to_text(self, *, width: int = 120) -> str:
        """Return what was found, what is off first, in words and as a table.

        Args:
            width: How many characters a line may have.
        """
        return text.to_text(self, width)

    def to_json(self) -> str:
        """Return it as JSON: `{"version": 1, "ok", "file", "engine", "seed", "methods": [...], "unverified": [...]}`.

        A method has the attributes of `MethodResult` and "ok", outputs those of `OutputResult`. What is infinite, such
        as the SQNR of equal outputs, is null.
        """
        methods = [{**asdict(method), "ok": method.ok} for method in self.methods.values()]
        fields = {
            "version": VERSION,
            "ok": self.ok,
            "file": self.file,
            "engine": self.engine,
            "seed": self.seed,
            "methods": methods,
            "unverified": self.unverified,
        }
        return json.dumps(finite(fields), indent=2, allow_nan=False)

    def _repr_html_(self) -> str:
        return in_notebook(self.to_text)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        off = [name for name, method in self.methods.items() if not method.ok]
        return f"Verification({self.file}: {'off in ' + ', '.join(off) if off else 'ok'})"


def finite(value: Any) -> Any:
    """Return a value with null for numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, (list, tuple)) else value
