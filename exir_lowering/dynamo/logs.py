"""What was done for each graph that torch.compile passed on: values, without tensors."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from typing import Literal

from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.errors import exception_text
from exir_lowering.plans.report import Report


class NotLowered(Exception):
    """A graph, or a part of it, is left to PyTorch: `reason` says why, in a clause. No `node`: the whole graph."""

    def __init__(self, reason: str, node: Node | None = None) -> None:
        where = graphs.source_code(node).rstrip(".") if node is not None else ""
        super().__init__(f"{reason}. {where}" if where else reason)
        self.reason, self.node = reason, node


class UnboundedSizes(NotLowered):
    """A partition has symbolic sizes, and what executes it has to know them."""


class FallbackWarning(UserWarning):
    """A graph from torch.compile is not run as requested."""


MOST = 32  # how many lowerings of one graph of Dynamo's, and how many fallbacks, are reported

Kind = Literal["inference", "forward", "backward"]


@dataclass(frozen=True, slots=True)
class Fallback:
    """Why a graph was not compiled as asked, and what runs it instead.

    Attributes:
        attempt: What was tried: partitioners, or a backend of the option `backends`.
        graph: The graph of AOTAutograd: "inference", "forward", "backward"; "function" before there was one.
        reason: Why, in words.
        source: The model's source line, "" if not known.
        instead: What was taken next: another attempt, or a torch.compile backend.
    """

    attempt: str
    graph: str
    reason: str
    source: str
    instead: str

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.attempt} did not compile the {self.graph} graph; {self.instead} runs it: {self.reason}{where}"


@dataclass(frozen=True, slots=True)
class GraphReport:
    """What was done with one Dynamo graph.

    Attributes:
        number: Which graph it is, from 0, since the last torch._dynamo.reset().
        backend: What runs it: "exir_lowering", or the torch.compile backend that it fell back to.
        reports: By kind of AOTAutograd's graphs, what was delegated in them, what was not, and why. A backward graph
            that was lowered with its forward graph is in that report. A graph that is lowered again, for other sizes or
            weights, has a report each time; if there are many, only the first and the last ones are kept.
        fallbacks: What did not work; if there are many, only the last ones.
    """

    number: int
    backend: str
    reports: tuple[tuple[Kind, Report], ...]
    fallbacks: tuple[Fallback, ...]

    def __str__(self) -> str:
        lines = [f"graph {self.number}: {self.backend}", *(f"  {fallback}" for fallback in self.fallbacks)]
        return "\n".join([*lines, *(report.to_text() for _, report in self.reports)])


class Log:
    """What happens to one graph of Dynamo's; `reports` has it."""

    def __init__(self) -> None:
        self.backend = ""
        self.reports: list[tuple[Kind, Report]] = []
        self.fallbacks: list[Fallback] = []
        with _lock:
            _logs.append(self)

    def add(self, kind: Kind, report: Report) -> None:
        """Add the report of a lowering; of those that repeat the first, for other weights or sizes, the last stay."""
        with _lock:
            self.reports.append((kind, report))
            if len(self.reports) > MOST:
                del self.reports[MOST // 2]

    def note(self, attempt: str, graph: str, error: Exception, instead: str, *, warn: bool = True) -> None:
        """Note that something could not be compiled, and what is taken instead; warn unless that is usual."""
        node = getattr(error, "node", None)
        source = graphs.source_line(node) if isinstance(node, Node) else ""
        reason = error.reason if isinstance(error, NotLowered) else exception_text(error)
        fallback = Fallback(attempt, graph, reason, source, instead)
        with _lock:
            self.fallbacks = [*self.fallbacks, fallback][-MOST:]
        if warn:
            warnings.warn(str(fallback), FallbackWarning, stacklevel=2)

    def close(self) -> None:
        """Note that the compilation has ended; nothing is listed if Dynamo starts it again and nothing was done."""
        if not (self.backend or self.reports or self.fallbacks):
            with _lock:
                if self in _logs:
                    _logs.remove(self)


_logs: list[Log] = []
_lock = threading.Lock()


def reports() -> tuple[GraphReport, ...]:
    """Return what was done for each graph since the last torch._dynamo.reset(), in the order of compilation."""
    with _lock:
        return tuple(
            GraphReport(number, log.backend, tuple(log.reports), tuple(log.fallbacks))
            for number, log in enumerate(_logs)
        )


def forget() -> None:
    """Forget the reports."""
    with _lock:
        _logs.clear()
