"""What the suite found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from exir_lowering.errors import LoweringError

_STATUSES = ("passed", "failed", "lowered", "skipped")


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The outcome of one case.

    Attributes:
        name: The case.
        status: "passed", "failed", "lowered": nothing here executes the payloads, so no numbers were compared, or
            "skipped": the backend does not support it.
        check: What failed: "numbers", "determinism", "purity", ...; "unwatched" if it was skipped because the runtime's
            own code executes the payloads; otherwise "".
        text: For a failure: who, what was got, what was expected and what to do; otherwise, why it did not pass.
        delegated: How many of the case's operators the backend got.
        operators: How many operators the case has.
        made_of: The operators that the suite made the case of, as the backend takes them; "" if it has its own ones.
    """

    name: str
    status: Literal["passed", "failed", "lowered", "skipped"]
    check: str = ""
    text: str = ""
    delegated: int = 0
    operators: int = 0
    made_of: str = ""

    @property
    def feature(self) -> str:
        """The first part of the case's name."""
        return self.name.partition("/")[0]

    def __str__(self) -> str:
        check = f" [{self.check}]" if self.check else ""
        share = f" ({self.delegated} of {self.operators} operators delegated)" if self.operators else ""
        return f"{self.status} {self.name}{check}{share}" + (f": {self.text}" if self.text else "")


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """The outcome of every case.

    Attributes:
        backend_id: The backend.
        results: The results, in the order of the cases.
        note: Why nothing was executed, "" when it was.
        uncovered: The features, such as "weights", that backends have, and of which no case could be tried.
    """

    backend_id: str
    results: tuple[CaseResult, ...]
    note: str = ""
    uncovered: tuple[str, ...] = ()

    @property
    def passed(self) -> tuple[str, ...]:
        """The names of the cases that passed."""
        return tuple(result.name for result in self.results if result.status == "passed")

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the cases that failed."""
        return tuple(result.name for result in self.results if result.status == "failed")

    @property
    def lowered(self) -> tuple[str, ...]:
        """The names of the cases that were lowered, but not executed."""
        return tuple(result.name for result in self.results if result.status == "lowered")

    @property
    def skipped(self) -> tuple[str, ...]:
        """The names of the cases that the backend does not support."""
        return tuple(result.name for result in self.results if result.status == "skipped")

    @property
    def conforms(self) -> bool:
        """Whether no case failed, at least one passed, or was lowered if nothing executes it, and all is covered."""
        return bool(self.passed or self.lowered) and not self.failed and not self.uncovered

    def to_text(self) -> str:
        """Return the counts by feature, then the failures, then the reasons of the skipped cases."""
        how = f"lowered only: {self.note}" if self.note else "executed by ExecuTorch's runtime"
        lines = [
            f"Backend {self.backend_id!r}: {len(self.passed)} passed, {len(self.failed)} failed, "
            + (f"{len(self.lowered)} lowered, " if self.lowered else "")
            + f"{len(self.skipped)} skipped ({how})"
        ]
        counts: dict[str, dict[str, int]] = {}
        for result in self.results:
            counts.setdefault(result.feature, dict.fromkeys(_STATUSES, 0))[result.status] += 1
        for feature, count in counts.items():
            shown = [f"{number:>3} {status}" for status, number in count.items() if number or status != "lowered"]
            lines.append(f"  {feature:<12}" + "  ".join(shown))
        made_of = dict.fromkeys(result.made_of for result in self.results if result.made_of)
        lines += [f"  programs are made of {'; '.join(made_of)}"] if made_of else []
        for status, title in (("failed", "Failed"), ("skipped", "Skipped")):
            found = [result for result in self.results if result.status == status]
            lines += ["", f"{title}:"] if found else []
            for result in found:
                check = f" [{result.check}]" if result.check else ""
                text = result.text if status == "failed" else result.text.partition("\n")[0]
                lines.append(f"  {result.name}{check}: " + text.replace("\n", "\n    "))
        if self.uncovered and (self.passed or self.lowered):
            text = "no case could be tried; above is why. Give cases= for a backend without them"
            lines += ["", f"Not covered: of {', '.join(self.uncovered)}, {text}."]
        if not self.passed and not self.lowered:
            why = f"No case passed: backend {self.backend_id!r} was not tried"
            advice = (
                "Give a partitioner= or supports= that takes what the backend supports, or look above why it refuses"
            )
            lines += ["", f"{why}. {advice}."]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.to_text()


class ConformanceError(LoweringError, AssertionError):
    """A backend or its delegate does not conform; the message names every case that failed.

    Attributes:
        report: The `ConformanceReport`.
    """

    _page = "ConformanceError"

    def __init__(self, report: ConformanceReport) -> None:
        super().__init__(report.to_text())
        self.report = report
