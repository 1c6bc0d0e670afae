"""The views of a plan: text, JSON, Graphviz and the page."""

from __future__ import annotations

import html
import json
import os
import re
from dataclasses import fields, replace
from html.parser import HTMLParser
from importlib import metadata

import fake_plans
import networkx as nx
import pytest
import torch
from fake_plans import HOSTILE, method, node
from hypothesis import given, settings, strategies as st

import exir_lowering
from exir_lowering.plans import formatting, to_dot, to_html, to_json
from exir_lowering.plans.findings import find
from exir_lowering.plans.lowering_plan import LoweringPlan
from exir_lowering.plans.page import BOX_HEIGHT, BOX_WIDTH, draw
from exir_lowering.plans.picture import Picture, picture
from exir_lowering.plans.planned import MethodPlan
from exir_lowering.plans.views import to_text

PLANS = {
    "small": fake_plans.small(),
    "nothing_delegated": fake_plans.nothing_delegated(),
    "empty": fake_plans.empty(),
    "hostile": fake_plans.hostile(),
    "varied": fake_plans.varied(),
}

# -- words -------------------------------------------------------------------------------------------------------------


def test_numbers_are_written_short() -> None:
    assert [formatting.size(n) for n in (0, 999, 1000, 4096, 999_949, 999_950, 2 * 10**15)] == [
        "0 B", "999 B", "1.0 kB", "4.1 kB", "999.9 kB", "1.0 MB", "2,000.0 TB",
    ]  # fmt: skip
    assert [formatting.operations(n) for n in (0, 12, 1500, 3_000_000)] == ["0", "12", "1.5 k", "3.0 M"]


# -- text --------------------------------------------------------------------------------------------------------------

SMALL = """\
Lowering plan
forward: 12 operators, 5 in 3 x XnnpackBackend, 1 x EchoBackend, 7 on the host; delegated: operators 41.7%, flops 89.1%,
  weights 87.5%
"""


def test_text_says_what_matters_and_then_everything() -> None:
    plan = PLANS["small"]
    text, everything = to_text(plan), to_text(plan, 10_000, everything=True)
    assert text.startswith(SMALL) and text.endswith("All of it: to_text(everything=True), or --all.\n")
    assert "aten.topk.default (100 operations, 512 B written): no rule takes aten.topk.default; int64 <results>" in text
    assert "On the host, in each call: 7 operators, 10.9% of the operations, 11.3 kB written, " in text
    assert "For the author" not in text and "For the author" in everything
    lines = [line.strip() for line in everything.splitlines()]
    for expected in (
        "dropped 2 nodes from add to add_1: 2 operators, at least 3 wanted [SupportPartitioner]",
        "cut mul: 8,192 bytes of weights, at most 4,096 allowed [SupportPartitioner]",
        "two partitions of XnnpackBackend cannot be one: because of relu -> topk -> sort -> linear",
        "encoder.0-1 (forward_0) and linear (forward_1): relu -> topk -> sort -> linear_1",
        '/home/user/model & co.py:18, in forward: y = torch.where(x < 0, x > 1, "<b>"): add',
        "encoder.0-1 (forward_0): XnnpackBackend, linear, relu; 262.1 kB of weights, 0 B in, 4.1 kB out, 9.2 k flops",
    ):
        assert expected in lines


@pytest.mark.parametrize("width", [40, 60, 120])
@pytest.mark.parametrize("name", [*PLANS, "many"])
def test_a_summary_fits_a_screen(name: str, width: int) -> None:
    many = LoweringPlan(tuple(replace(PLANS["small"].methods[0], name=f"method_{i}") for i in range(40)))
    text = to_text(PLANS.get(name, many), width)
    assert len(text.splitlines()) <= 25
    assert all(line == line.rstrip() for line in text.splitlines())
    assert ("more methods" in text) is (name == "many")


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_no_word_is_broken(name: str, everything: bool) -> None:
    words = to_text(PLANS[name], 100_000, everything=everything).split()
    text = to_text(PLANS[name], 40, everything=everything)
    assert set(text.split()) <= set(words)
    assert all(len(line) <= 40 or len(line.split()) == 1 for line in text.splitlines())


@pytest.mark.parametrize("name", PLANS)
def test_nothing_is_lost(name: str) -> None:
    text = to_text(PLANS[name], 100_000, everything=True)
    for made in PLANS[name].methods:
        for host in made.host:
            assert host.node in text and host.reason in text and formatting.place(host.source).full in text
        for partition in made.partitions:
            assert f"({partition.id}): {partition.backend_id}, " in text
        for refused in made.refused_merges:
            assert f": {' -> '.join(refused.path)}" in text


def test_text_takes_no_name_for_markup() -> None:
    name, shown = "[bold red]x[/bold red] :smile: \x1b[2J", "[bold red]x[/bold red] :smile: \\x1b[2J"
    plan = LoweringPlan((method(name, [node(name, name, partition=name)], {name: name}),))
    text = to_text(plan, 200, everything=True)
    assert "\x1b" not in text and text.count(shown) == 6


def test_what_costs_most_on_the_host_is_first_and_equal_reasons_are_one() -> None:
    types = " (float32[s0, 8] -> float32[s0, 4])"
    nodes = [node("a", "aten.a.default", flops=1), node("b", "aten.b.default", flops=9**9), node("c", "aten.a.default")]
    made = method(
        "forward", nodes, {}, reasons={"a": [(f"a check failed{types}", "P")], "c": [("a check failed", "P")]}
    )
    first, second = next(find(made)).findings
    assert first.what.startswith("aten.b.default (387.4 M operations")
    assert (second.count, second.why) == (2, "a check failed [P]")
    assert [name for name, _ in second.where] == [f"a{types}", "c"]


def test_advice_for_authors_and_what_was_done_are_in_everything_only() -> None:
    plan = PLANS["small"]
    (forward, *_), parts = plan.methods, {"brief": 0, "more": 1, "author": 2}
    found = [parts[section.part] for section in find(forward)]
    assert found == sorted(found) and {0, 2} <= set(found)


# -- JSON --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_json_has_everything(name: str) -> None:
    plan = PLANS[name]
    data = json.loads(to_json(plan))
    assert data["version"] == 1
    assert to_json(plan) == to_json(plan)
    for written, made in zip(data["methods"], plan.methods, strict=True):
        names = {field.name.lstrip("_") for field in fields(MethodPlan)}
        assert set(written) == {*names, "coverage"}
        assert written["name"] == made.name
        for read, expected in zip(written["nodes"], made.nodes, strict=True):
            lists = {key: tuple(read[key]) for key in ("inputs", "calls")}
            assert type(expected)(**{**read, **lists}) == expected
        for read, expected in zip(written["partitions"], made.partitions, strict=True):
            assert type(expected)(**{**read, "nodes": tuple(read["nodes"])}) == expected
        for read, expected in zip(written["host"], made.host, strict=True):
            assert [reason["reason"] for reason in read["reasons"]] == [r.reason for r in expected.reasons]
        assert [a["kind"] for a in written["adjustments"]] == [a.kind for a in made.adjustments]
        assert [tuple(m["path"]) for m in written["refused_merges"]] == [m.path for m in made.refused_merges]


def test_json_coverage_is_null_for_a_share_of_nothing() -> None:
    small, empty = (json.loads(to_json(PLANS[name]))["methods"][0]["coverage"] for name in ("small", "empty"))
    forward = PLANS["small"].methods[0]
    expected = (forward.coverage, forward.flops_coverage, forward.weights_coverage)
    assert (small["operators"], small["flops"], small["weights"]) == expected
    assert empty == {"operators": None, "flops": None, "weights": None}


# -- the picture -------------------------------------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> MethodPlan:
    """Random graphs whose partitions are parts of a topological order, with and without nested graphs."""
    size = draw(st.integers(0, 30))
    nodes, backends, partition = [], {}, None
    for i in range(size):
        choice = draw(st.integers(0, 5))
        if choice == 0:
            partition = None
        elif choice == 1:
            partition = f"p{i}"
            backends[partition] = draw(st.sampled_from(["a", "b"]))
        inputs = draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else []
        path = draw(st.sampled_from(["", "", "", "true_graph_0.", "false_graph_0."]))
        names = [nodes[j].name for j in inputs]
        nodes.append(node(f"{path}n{i}", inputs=names, partition=partition, result_bytes=draw(st.integers(0, 9))))
    return method("forward", nodes, backends)


def check(made: MethodPlan, drawn: Picture) -> None:
    names = [n.name for vertex in drawn.vertices for n in vertex.nodes]
    assert sorted(names) == sorted(n.name for n in made.nodes), "every node is in one vertex"
    partitions = [(v.partition, tuple(n.name for n in v.nodes)) for v in drawn.vertices if v.partition]
    assert sorted(partitions) == sorted((partition.id, partition.nodes) for partition in made.partitions)

    by_name = {n.name: n for n in made.nodes}
    owner = {n.name: i for i, vertex in enumerate(drawn.vertices) for n in vertex.nodes}
    crossing: dict[tuple[int, int], set[str]] = {}
    for n in made.nodes:
        for source in n.inputs:
            if owner[source] != owner[n.name]:
                crossing.setdefault((owner[source], owner[n.name]), set()).add(source)
    expected = {edge: sum(by_name[name].result_bytes for name in values) for edge, values in crossing.items()}
    assert drawn.edges == expected and all(source < target for source, target in expected)
    assert nx.is_directed_acyclic_graph(nx.DiGraph(list(expected)))

    wired = nx.Graph([(source, n.name) for n in made.nodes for source in n.inputs])
    wired.add_nodes_from(by_name)
    for vertex in drawn.vertices:
        if not vertex.partition:
            assert nx.is_connected(wired.subgraph(n.name for n in vertex.nodes))
            assert len({n.name.rpartition(".")[0] for n in vertex.nodes}) == 1
            assert vertex.backend is None


def check_drawn(drawn: Picture) -> None:
    """What is drawn fits, without overlap, and each box is below those that it reads."""
    laid = draw(drawn)
    corners = laid["corners"]
    for i, (x, y) in enumerate(corners):
        assert 0 <= x - laid["left"] <= laid["width"] - BOX_WIDTH and 0 <= y <= laid["height"] - BOX_HEIGHT
        assert all(abs(x - other) >= BOX_WIDTH or abs(y - above) >= BOX_HEIGHT for other, above in corners[:i])
    assert len(laid["lines"]) == len(drawn.edges)
    for (source, target), line in zip(drawn.edges, laid["lines"], strict=True):
        assert corners[source][1] + BOX_HEIGHT < corners[target][1] == line["tip"][1]


@settings(max_examples=int(os.environ.get("EXIR_LOWERING_EXAMPLES", "80")), deadline=None)
@given(plans())
def test_picture_is_a_contraction_without_cycles(made: MethodPlan) -> None:
    drawn = picture(made)
    check(made, drawn)
    check_drawn(drawn)
    assert picture(made) == drawn


@pytest.mark.parametrize("name", PLANS)
def test_picture_of_a_plan(name: str) -> None:
    for made in PLANS[name].methods:
        drawn = picture(made)
        check(made, drawn)
        check_drawn(drawn)


def test_host_regions_are_as_few_as_the_partitions_between_them_allow() -> None:
    drawn = picture(PLANS["small"].methods[0])
    assert [tuple(n.name for n in vertex.nodes) for vertex in drawn.vertices if not vertex.partition] == [
        ("topk", "sort"),
        ("cond", "add", "add_1"),
        ("true_graph_0.sin",),
        ("false_graph_0.cos",),
    ]
    assert [vertex.title for vertex in drawn.vertices if not vertex.partition] == [
        "router",
        "add x2, cond",
        "sin, in true_graph_0",
        "cos, in false_graph_0",
    ]


def test_a_plan_that_cannot_run_is_not_drawn() -> None:
    nodes = [node("a", partition="p"), node("b", inputs=["a"], partition="q"), node("c", inputs=["b"], partition="p")]
    with pytest.raises(ValueError, match=r"method forward: .* form a cycle: partition:p -> partition:q"):
        picture(method("forward", nodes, {"p": "x", "q": "x"}))


# -- DOT ---------------------------------------------------------------------------------------------------------------

_LABEL = r'"((?:[^"\\]|\\.)*)"'
_LINES = [
    re.compile(pattern)
    for pattern in (
        r"digraph \{",
        r"  node \[.*\];",
        r"  edge \[.*\];",
        r"  subgraph cluster_\d+ \{",
        rf"    label={_LABEL};",
        rf'    m\d+_v\d+ \[label={_LABEL}, fillcolor="#[0-9a-f]{{6}}"\];',
        rf"    m\d+_v\d+ -> m\d+_v\d+ \[label={_LABEL}\];",
        r"  \}",
        r"\}",
    )
]


def dot_labels(text: str) -> list[str]:
    """Return the labels of a graph as Graphviz would show them."""
    labels = []
    for line in text.splitlines():
        found = next((match for pattern in _LINES if (match := pattern.fullmatch(line))), None)
        assert found, f"not DOT: {line}"
        if found.groups():
            labels.append(html.unescape(re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], found[1])))
    return labels


@pytest.mark.parametrize("name", PLANS)
def test_dot_has_every_vertex_and_edge(name: str) -> None:
    labels = iter(dot_labels(to_dot(PLANS[name])))
    for made in PLANS[name].methods:
        drawn = picture(made)
        assert next(labels) == made.name
        for vertex in drawn.vertices:
            words = next(labels)
            assert words == f"{vertex.title}\n{formatting.count_operators(vertex.nodes)}\n{vertex.where}"
        for size in drawn.edges.values():
            assert next(labels) == formatting.size(size)
    assert next(labels, None) is None


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1))
def test_dot_quotes_any_name(name: str) -> None:
    plan = LoweringPlan((method(name, [node("n", partition=name)], {name: name}),))
    text = to_dot(plan)
    shown = re.findall(rf"label={_LABEL}", text)
    read = [html.unescape(re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], label)) for label in shown]
    assert read == [name, f"add\nadd\n{name}"]


# -- the page ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_page_needs_nothing_else(name: str) -> None:
    page = to_html(PLANS[name])
    assert not re.findall(r"(?:https?:)?//[a-z][\w.-]*\.[a-z]+[^\s\"']*", page)
    assert re.findall(r"<(?:link|img|iframe|script)[^>]*>", page) == ['<link rel="icon" href="data:,">']
    assert "default-src 'none'" in page
    text = html.unescape(page.replace("<wbr>", ""))
    for made in PLANS[name].methods:
        assert all(n.name in text and n.module in text for n in made.nodes)
        assert all(formatting.place(n.source).full in text for n in made.nodes)
        assert all(partition.id in text for partition in made.partitions)
        assert all(reason.reason in text for host in made.host for reason in host.reasons)


class Attends(torch.nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, mask).mean(-1)


def test_views_of_a_model_say_what_it_is_what_was_rewritten_and_what_not() -> None:
    inputs = (torch.ones(1, 2, 4, 8), torch.zeros(4, 4))
    plan = exir_lowering.plan(torch.export.export(Attends(), inputs), "xnnpack")
    (made,) = plan.methods
    assert made.rewritings and made.refused_rewrites and made.model.endswith(".Attends")
    assert plan.to_text().startswith("Lowering plan of Attends with XnnpackPartitioner\n")
    page = html.unescape(plan.to_html().replace("<wbr>", ""))
    for text in (page, plan.to_text(width=100_000, everything=True)):
        for expected in (
            "Attends",
            "XnnpackPartitioner",
            f"torch {metadata.version('torch')}",
            "Rewritten: ",
            " fewer operators, ",
        ):
            assert expected in text
        assert all(f"{one.rewrite}" in text and one.kept in text for one in made.rewritings)
        for one in made.refused_rewrites:
            assert "Not rewritten" in text and f"{one.rewrite}, {one.operator}" in text and one.reason in text
    # What helps comes before what is for the backend's author.
    assert page.index("What you can do") < page.index("Rewritten: ") < page.index("For the author")
    assert "Rewritten" not in plan.to_text() and "What you can do" in plan.to_text()


class _Page(HTMLParser):
    """The tags of a page, what its links and its parts are called, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links, self.parts, self.text = list[str](), list[str](), ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name == "href"]
        self.parts += [str(value) for name, value in attrs if name == "id"]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", PLANS)
def test_each_box_leads_to_its_operators(name: str) -> None:
    page = _Page(to_html(PLANS[name]))
    drawn = [len(picture(made).vertices) for made in PLANS[name].methods]
    boxes = [f"m{i}b{j}" for i, count in enumerate(drawn) for j in range(count)]
    assert [link for link in page.links if "b" in link] == [f"#{box}" for box in boxes]
    assert [part for part in page.parts if "b" in part] == boxes
    assert {link[1:] for link in page.links if link.startswith("#")} <= {*page.parts}
    assert page.tags.count("svg") > sum(map(bool, drawn))


def test_any_name_is_text() -> None:
    page = _Page(to_html(PLANS["hostile"]))
    assert {"img", "script"}.isdisjoint(page.tags) and HOSTILE in page.text
