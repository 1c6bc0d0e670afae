"""A plan as an HTML page that needs neither a network nor scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from exir_lowering.plans import drawing, folding, formatting as shown, naming, text
from exir_lowering.plans.data import coverages
from exir_lowering.plans.findings import find
from exir_lowering.plans.picture import picture
from exir_lowering.plans.planned import MethodPlan, PlannedNode

if TYPE_CHECKING:
    from exir_lowering.plans.lowering_plan import LoweringPlan


def to_html(plan: LoweringPlan) -> str:
    """Return a plan as a page: what helps, the partitions as a picture, every operator with its reasons.

    All names in the plan are shown as text: they are escaped, and a content security policy lets the browser run and
    load nothing.

    Args:
        plan: The plan.
    """
    return drawing.render(
        "exir_lowering.plans",
        {"operations": shown.operations},
        plan=plan,
        facts=text.facts(plan),
        methods=[_show(method, len(plan.methods) > 1) for method in plan.methods],
        colours=drawing.colours(plan.backend_ids),
    )


def _show(method: MethodPlan, named: bool) -> dict[str, Any]:
    drawn = picture(method)
    boxes = folding.fold(drawn)
    handed = folding.edges(drawn, boxes)
    return {
        "plan": method,
        "shares": coverages(method),
        "destinations": text.destinations(method),
        "predicted": text.predicted(method),
        "sections": list(find(method, named=named)),
        "boxes": boxes,
        "drawings": drawing.draw(boxes, handed),
        "partitions": {f"partition:{partition.id}": partition for partition in method.partitions},
        "rows": _rows,
    }


def _rows(nodes: Sequence[PlannedNode]) -> list[tuple[str, str, naming.Place, list[str]]]:
    """Return equal operators of a module and a source line together, with the names of all."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for node in nodes:
        rows.setdefault((node.operator, node.module, node.source), []).append(node.name)
    return [(operator, module, naming.place(source), names) for (operator, module, source), names in rows.items()]
