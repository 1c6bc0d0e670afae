"""What `quantize` returns: the program, and how far it is from float, as values, text and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rich.console import RenderableType
from rich.text import Text
from torch.export import ExportedProgram

from exir_lowering.plans.formatting import many, size
from exir_lowering.pte.printing import Shown, make_table, render
from exir_lowering.verification.results import as_json

VERSION = 2  # incremented when a field of the JSON changes its meaning or is removed


@dataclass(frozen=True, slots=True)
class OutputError:
    """How far an output is from float, over all calls.

    Attributes:
        name: Where it is in what the program returns, such as "['logits']".
        largest: The largest absolute error.
        sqnr: The signal to error ratio in dB; inf for equal outputs, -inf where there is a problem.
        cosine: The cosine of the angle between the two; NaN where there is a problem.
        problem: What is wrong where it is not the size of an error, such as NaN; "" for nothing.
    """

    name: str
    largest: float
    sqnr: float
    cosine: float
    problem: str


@dataclass(frozen=True, slots=True)
class LayerError:
    """What a quantised layer loses alone: of inputs in float.

    Attributes:
        path: Its module, "" for the model itself.
        operator: The operator, such as "aten.linear.default".
        sqnr: The signal to error ratio of its result in dB, the lowest of all calls; NaN where no calls were given.
        extra_bytes: How many more bytes its weights take in float.
    """

    path: str
    operator: str
    sqnr: float
    extra_bytes: int


@dataclass(frozen=True, slots=True)
class Errors:
    """How far a quantised program is from float."""

    calls: int  # how many it was measured in
    on_calibration: bool  # whether these are the calls that ranges were taken from
    outputs: tuple[OutputError, ...]  # in their order; () without calls
    layers: tuple[LayerError, ...]  # the one that loses most first


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Quantized(Shown):
    """A quantised program; `print` shows how far it is from float.

    Attributes:
        program: The program, for `lower` and `torch.export.save`.
        recipe: How it was quantised, in words.
        errors: How far it is from float.
        kept: The modules with operators in float: those of `keep`, and in 8da4w those with the weight of an embedding.
    """

    program: ExportedProgram
    recipe: str
    errors: Errors
    kept: tuple[str, ...]

    def to_text(self, *, top: int = 10, width: int = 120) -> str:
        """Return the errors of the outputs, and of the `top` layers that cost most, in lines of `width` characters."""
        return render(self._parts(top), width)

    def to_json(self) -> str:
        """Return the errors as JSON.

        It is `{"version": 2, "recipe", "kept", "calls", "on_calibration", "outputs", "layers"}`. Outputs have the
        attributes of `OutputError`, layers those of `LayerError`. Infinite and NaN values are null: the SQNR of equal
        outputs (`problem` is empty) or of unusable ones, and of layers that were not measured.
        """
        return as_json({"version": VERSION, "recipe": self.recipe, "kept": self.kept, **asdict(self.errors)})

    def __repr__(self) -> str:
        return f"Quantized({self.recipe}: {many(len(self.errors.layers), 'layer')})"

    def _parts(self, top: int) -> Iterator[RenderableType]:
        errors = self.errors
        saved = size(sum(layer.extra_bytes for layer in errors.layers))
        kept = f" {many(len(self.kept), 'module')} kept in float." if self.kept else ""
        yield Text(f"{self.recipe}: {many(len(errors.layers), 'layer')} quantised, {saved} less than in float.{kept}")
        if not errors.calls:
            yield Text("No errors were measured, since no calls were given.")
            return
        source = ", which are also the calibration calls: other inputs may be worse" if errors.on_calibration else ""
        yield Text(f"Against float, in {many(errors.calls, 'call')}{source}:\n")
        rows = [[o.name, _ratio(o.sqnr), f"{o.cosine:.6f}", f"{o.largest:.3g}", o.problem] for o in errors.outputs]
        yield make_table(("output", "SQNR", "cosine", "largest error", ""), rows, ("SQNR", "cosine", "largest error"))
        yield Text("")
        shown = errors.layers[:top]
        rows = [[_ratio(one.sqnr), size(one.extra_bytes), one.operator, one.path or "(the model)"] for one in shown]
        columns = ("SQNR", "saves", "operator", "layer")
        yield make_table(columns, rows, columns[:2], whole=True)
        if len(errors.layers) > top:
            yield Text(f"and {len(errors.layers) - top:,} more layers")
        yield Text("A layer's SQNR is that of its result alone, of inputs in float.")


def _ratio(sqnr: float) -> str:
    return {math.inf: "equal", -math.inf: "none"}.get(sqnr, f"{sqnr:.1f} dB")
