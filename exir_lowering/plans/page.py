"""A plan as an HTML page that needs no network."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from exir_lowering.plans import layout
from exir_lowering.plans.data import as_data
from exir_lowering.plans.picture import label, picture
from exir_lowering.plans.text import group_refused, group_rewritings, rewritten, to_text

if TYPE_CHECKING:
    from exir_lowering.plans.lowering_plan import LoweringPlan


def to_html(plan: LoweringPlan) -> str:
    """Return a plan as a page: the graph, the coverage, every host operator with its reasons.

    All names in the plan are shown as text: they reach the page as JSON, and a content security policy lets the browser
    run only the page's own script, and load nothing.

    Args:
        plan: The plan.
    """
    loader = PackageLoader("exir_lowering.plans", "assets")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style, script = (loader.get_source(environment, name)[0] for name in ("page.css", "page.js"))
    return environment.get_template("page.html.jinja").render(
        data=_data(plan),
        text=to_text(plan),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data(plan: LoweringPlan) -> dict[str, Any]:
    data = as_data(plan)
    data["box"] = {"width": layout.BOX_WIDTH, "height": layout.BOX_HEIGHT}
    data["backends"] = list(dict.fromkeys(p.backend_id for method in plan.methods for p in method.partitions))
    for method, shown in zip(plan.methods, data["methods"], strict=True):
        drawn = picture(method)
        shown["picture"] = asdict(drawn)
        shown["rewritten"] = {
            "saving": rewritten(method),
            "done": list(group_rewritings(method.rewritings)),
            "refused": list(group_refused(method.refused_rewrites)),
        }
        for vertex, values in zip(drawn.vertices, shown["picture"]["vertices"], strict=True):
            values["label"] = label(vertex)
    return data
