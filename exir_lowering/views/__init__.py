"""A plan as text, as JSON, as a Graphviz graph and as a page for the browser."""

from __future__ import annotations

from exir_lowering.views.data import to_json
from exir_lowering.views.dot import to_dot
from exir_lowering.views.page import to_html
from exir_lowering.views.text import table, to_text

__all__ = ["table", "to_dot", "to_html", "to_json", "to_text"]
