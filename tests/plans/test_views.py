"""The views of a plan: text, JSON, Graphviz and the page, which is tested in a browser."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import fake_plans
import networkx as nx
import pytest
import torch
from browser import browser, needs_browser
from fake_plans import HOSTILE, method, node
from hypothesis import given, settings, strategies as st
from rich.console import Console
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

import exir_lowering
from exir_lowering.plans import formatting, layout, table, to_dot, to_html, to_json, to_text
from exir_lowering.plans.lowering_plan import LoweringPlan
from exir_lowering.plans.picture import Picture, picture
from exir_lowering.plans.planned import MethodPlan

PLANS = {
    "small": fake_plans.small(),
    "nothing_delegated": fake_plans.nothing_delegated(),
    "empty": fake_plans.empty(),
    "hostile": fake_plans.hostile(),
    "large": fake_plans.large(),
}

# -- words -------------------------------------------------------------------------------------------------------------


def test_numbers_are_written_short() -> None:
    assert [formatting.size(n) for n in (0, 999, 1000, 4096, 999_949, 999_950, 2 * 10**15)] == [
        "0 B", "999 B", "1.0 kB", "4.1 kB", "999.9 kB", "1.0 MB", "2,000.0 TB",
    ]  # fmt: skip
    assert [formatting.operations(n) for n in (0, 12, 1500, 3_000_000)] == ["0", "12", "1.5 k", "3.0 M"]


def test_long_texts_lose_their_middle() -> None:
    assert formatting.middle("abcdefgh", 8) == "abcdefgh"
    assert formatting.middle("abcdefghi", 8) == "abcd…ghi"
    assert formatting.path(list("abcdef")) == "a -> b -> c -> d -> e -> f"
    assert formatting.path(list("abcdefghi")) == "a -> b -> c -> (3 more) -> g -> h -> i"
    assert formatting.format_count({"add": 1, "mul": 4, "sub": 1, "exp": 2}) == "4 x mul, 2 x exp, 2 more"
    assert formatting.format_count({}) == ""


# -- text --------------------------------------------------------------------------------------------------------------

SMALL_SUMMARY = """\
                       Lowering plan
                                  ops   ops
                                   in    on
method       partitions          them  host          share
───────────────────────────────────────────────────────────
forward      3 x XnnpackBackend     5     7      ops 41.7%
             1 x EchoBackend                   flops 89.1%
                                             weights 87.5%
decode_step  1 x XnnpackBackend     1     1      ops 50.0%
                                              flops 100.0%
                                             weights 50.0%
"""

SMALL_FORWARD = """  Predicted latency 12.0 us: host 7.0 us, delegates 5.0 us, data between them 0 s

  Largest costs on the host (3)
    2.0 us 2 x aten.add.Tensor: 2 operators, at least 3 wanted
    1.0 us 1 x aten.topk.default: no rule takes aten.topk.default; int64 <results> & more
    1.0 us 1 x aten.sort.default: no rule takes aten.sort.default; int64 <results> & more

  Partitions (4)
    id         backend         operators                           weights      in     out  flops
    ──────────────────────────────────────────────────────────────────────────────────────────────
    forward_0  XnnpackBackend  2: 1 x aten.linear, 1 x aten.relu  262.1 kB     0 B  4.1 kB  9.2 k
    forward_1  XnnpackBackend  1: 1 x aten.linear                 131.1 kB  4.6 kB  2.0 kB  4.1 k
    forward_2  EchoBackend     1: 1 x aten.mul.Tensor                  0 B  4.1 kB  4.1 kB  1.0 k
    forward_3  XnnpackBackend  1: 1 x aten.linear                  65.5 kB  2.0 kB  2.0 kB  4.1 k

  On the host (7)
    2 x aten.add.Tensor: 2 operators, at least 3 wanted [SupportPartitioner]
        add: File "/home/user/model & co.py", line 18, in forward: y = torch.where(x < 0, x > 1, "<b>")
    1 x aten.topk.default: no rule takes aten.topk.default; int64 <results> & more [XnnpackPartitioner, Echo]
        topk: File "/home/user/model & co.py", line 12, in forward: y = torch.where(x < 0, x > 1, "<b>")
    1 x aten.sort.default: no rule takes aten.sort.default; int64 <results> & more [XnnpackPartitioner, Echo]
        sort: File "/home/user/model & co.py", line 13, in forward: y = torch.where(x < 0, x > 1, "<b>")
    1 x cond: calls graphs [lower]
        cond: File "/home/user/model & co.py", line 16, in forward: y = torch.where(x < 0, x > 1, "<b>")
    1 x aten.sin.default: no rule takes it [SupportPartitioner]
        true_graph_0.sin
    1 x aten.cos.default: no rule takes it [SupportPartitioner]
        false_graph_0.cos

  Dropped or cut (2)
    dropped 2 nodes from add to add_1: 2 operators, at least 3 wanted [SupportPartitioner]
        cut mul: 8,192 bytes of weights, at most 4,096 allowed [SupportPartitioner]

  Cannot be one partition (1)
    - forward_0 and forward_1 (XnnpackBackend): relu -> topk -> sort -> linear_1

  Advice (1)
    - allowing aten.topk.default and aten.sort.default in XnnpackBackend would merge 3 partitions into 2
"""

SMALL_DECODE = """  Predicted latency 2.0 us: host 1.0 us, delegates 1.0 us, data between them 0 s

  Largest costs on the host (1)
    1.0 us 1 x aten.embedding.default: no rule takes it

  Partitions (1)
    id             backend         operators           weights     in     out  flops
    ─────────────────────────────────────────────────────────────────────────────────
    decode_step_0  XnnpackBackend  1: 1 x aten.linear   4.1 kB  256 B  1.0 kB  2.0 k

  On the host (1)
    1 x aten.embedding.default: no rule takes it [SupportPartitioner]
        embed
"""


def test_text_says_everything() -> None:
    text = to_text(PLANS["small"])
    forward, decode = text.split("\ndecode_step: 2 operators\n")
    assert forward.split("\nforward: 12 operators\n") == [SMALL_SUMMARY, SMALL_FORWARD]
    assert decode == SMALL_DECODE


@pytest.mark.parametrize("name", ["small", "nothing_delegated", "empty", "large"])
def test_summary_fits_a_narrow_terminal(name: str) -> None:
    console = Console(width=60, no_color=True)
    with console.capture() as capture:
        console.print(table(PLANS[name]))
    lines = capture.get().splitlines()
    assert all(len(line.rstrip()) <= 60 for line in lines)
    for plan in PLANS[name].methods:
        assert any(line.startswith(f"{plan.name} ") for line in lines)
        for backend in {partition.backend_id for partition in plan.partitions}:
            assert any(f" x {backend} " in line for line in lines), "a backend's name is in one piece"


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", PLANS)
def test_text_keeps_its_width(name: str, width: int) -> None:
    text = to_text(PLANS[name], width)
    assert max(map(len, text.splitlines())) <= width
    assert all(line == line.rstrip() for line in text.splitlines())


def test_long_lists_end_with_a_count() -> None:
    text = to_text(PLANS["large"])
    assert "... and 270 more" in text  # of 300 partitions
    assert "... and 149 more" in text  # of 179 refused merges
    assert "norm_0_0 -> norm_0_1 -> norm_0_2 -> (14 more) -> norm_0_2 -> norm_0_3 -> norm_0_4" in " ".join(text.split())
    assert len(text.splitlines()) < 250


def test_text_takes_no_name_for_markup_and_no_colour_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    name = "[bold red]x[/bold red] :smile:"
    plan = LoweringPlan((method(name, [node(name, name, partition=name)], {name: name}),))
    text = to_text(plan, width=200)
    assert "\x1b" not in text
    assert text.count(name) == 6


# -- JSON --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_json_has_everything(name: str) -> None:
    plan = PLANS[name]
    data = json.loads(to_json(plan))
    assert data["version"] == 1
    assert to_json(plan) == to_json(plan)
    for written, made in zip(data["methods"], plan.methods, strict=True):
        assert set(written) == {field.name for field in fields(MethodPlan)} | {"coverage"}
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
        assert [tuple(a["operators"]) for a in written["advice"]] == [a.operators for a in made.advice]


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
    names = [name for vertex in drawn.vertices for name in vertex.nodes]
    assert sorted(names) == sorted(n.name for n in made.nodes), "every node is in one vertex"
    assert len({vertex.id for vertex in drawn.vertices}) == len(drawn.vertices)
    partitions = {vertex.title: vertex.nodes for vertex in drawn.vertices if vertex.kind == "partition"}
    assert partitions == {partition.id: partition.nodes for partition in made.partitions}

    by_name = {n.name: n for n in made.nodes}
    owner = {name: vertex.id for vertex in drawn.vertices for name in vertex.nodes}
    crossing: dict[tuple[str, str], set[str]] = {}
    for n in made.nodes:
        for source in n.inputs:
            if owner[source] != owner[n.name]:
                crossing.setdefault((owner[source], owner[n.name]), set()).add(source)
    expected = {edge: sum(by_name[name].result_bytes for name in values) for edge, values in crossing.items()}
    assert {(edge.source, edge.target): edge.bytes for edge in drawn.edges} == expected
    assert nx.is_directed_acyclic_graph(nx.DiGraph(list(expected)))

    wired = nx.Graph([(source, n.name) for n in made.nodes for source in n.inputs])
    wired.add_nodes_from(by_name)
    for vertex in drawn.vertices:
        if vertex.kind == "host":
            assert nx.is_connected(wired.subgraph(vertex.nodes))
            assert len({name.rpartition(".")[0] for name in vertex.nodes}) == 1
            assert vertex.backend is None


def check_layout(drawn: Picture) -> None:
    at = {vertex.id: vertex for vertex in drawn.vertices}
    rows: dict[int, list[float]] = {}
    for vertex in drawn.vertices:
        rows.setdefault(vertex.rank, []).append(vertex.x)
        assert layout.BOX_WIDTH / 2 <= vertex.x <= drawn.width - layout.BOX_WIDTH / 2
        assert layout.BOX_HEIGHT / 2 <= vertex.y <= drawn.height - layout.BOX_HEIGHT / 2
    for row in rows.values():
        assert all(b - a >= layout.BOX_WIDTH for a, b in zip(sorted(row), sorted(row)[1:], strict=False)), "no overlap"
    for edge in drawn.edges:
        source, target = at[edge.source], at[edge.target]
        assert source.rank < target.rank
        (x, y), (to_x, to_y) = edge.points[0], edge.points[-1]
        assert abs(x - source.x) <= layout.BOX_WIDTH / 2 and y == source.y + layout.BOX_HEIGHT / 2
        assert abs(to_x - target.x) <= layout.BOX_WIDTH / 2 and to_y == target.y - layout.BOX_HEIGHT / 2
        assert [p[1] for p in edge.points] == sorted(p[1] for p in edge.points), "lines lead down"


@settings(max_examples=200, deadline=None)
@given(plans())
def test_picture_is_a_contraction_without_cycles(made: MethodPlan) -> None:
    drawn = picture(made)
    check(made, drawn)
    check_layout(drawn)
    assert picture(made) == drawn


@pytest.mark.parametrize("name", PLANS)
def test_picture_of_a_plan(name: str) -> None:
    for made in PLANS[name].methods:
        drawn = picture(made)
        check(made, drawn)
        check_layout(drawn)


def test_host_regions_are_as_few_as_the_partitions_between_them_allow() -> None:
    drawn = picture(PLANS["small"].methods[0])
    assert [vertex.nodes for vertex in drawn.vertices if vertex.kind == "host"] == [
        ("topk", "sort"),
        ("cond", "add", "add_1"),
        ("true_graph_0.sin",),
        ("false_graph_0.cos",),
    ]
    assert [vertex.title for vertex in drawn.vertices if vertex.kind == "host"][2:] == [
        "host 3, in true_graph_0",
        "host 4, in false_graph_0",
    ]


def test_lines_pass_between_the_boxes() -> None:
    """A line that skips rows has points beside the boxes of those rows."""
    drawn = picture(PLANS["large"].methods[0])
    at = {vertex.id: vertex for vertex in drawn.vertices}
    boxes = {(vertex.rank, vertex.x) for vertex in drawn.vertices}
    skipping = [e for e in drawn.edges if 1 < at[e.target].rank - at[e.source].rank <= 24]
    assert skipping
    for edge in skipping:
        ranks = range(at[edge.source].rank + 1, at[edge.target].rank)
        for rank, (x, _) in zip(ranks, edge.points[1:-1:2], strict=True):
            assert not any(r == rank and abs(x - bx) < layout.BOX_WIDTH / 2 for r, bx in boxes)


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
            assert words.startswith(f"{vertex.title}\n")
            assert formatting.many(len(vertex.nodes), "operator") in words
            assert vertex.backend is None or vertex.backend in words
        for edge in drawn.edges:
            assert next(labels) == formatting.size(edge.bytes)
    assert next(labels, None) is None


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1))
def test_dot_quotes_any_name(name: str) -> None:
    plan = LoweringPlan((method(name, [node("n", partition=name)], {name: name}),))
    text = to_dot(plan)
    shown = re.findall(rf"label={_LABEL}", text)
    read = [html.unescape(re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], label)) for label in shown]
    assert read == [name, f"{name}\n{name}, 1 operator"]


# -- the page, as text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_page_needs_nothing_else(name: str) -> None:
    page = to_html(PLANS[name])
    assert set(re.findall(r"(?:https?:)?//[a-z][\w.-]*\.[a-z]+[^\s\"']*", page)) == {"http://www.w3.org/2000/svg"}
    assert re.findall(r"<(?:link|img|iframe|script)[^>]*(?:src|href)=[^>]*>", page) == [
        '<link rel="icon" href="data:,">'
    ]
    assert page.count("</script") == 2
    assert "default-src 'none'" in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data
    read, written = json.loads(data[1]), json.loads(to_json(PLANS[name]))
    for made in read["methods"]:
        del made["picture"], made["rewritten"]
    assert read["methods"] == written["methods"]


# -- the page, in a browser --------------------------------------------------------------------------------------------


class Page:
    """A plan's page, open in the browser."""

    def __init__(self, driver: Chrome, folder: Path) -> None:
        self.driver = driver
        self.folder = folder

    def open(self, plan: LoweringPlan) -> Page:
        file = self.folder / "plan.html"
        file.write_text(to_html(plan), encoding="utf-8")
        for log in ("browser", "performance"):
            self.driver.get_log(log)
        self.driver.get(file.as_uri())
        return self

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return list(self.driver.execute_script(script, selector))

    def text(self, selector: str) -> str:
        (text,) = self.texts(selector)
        return text

    def box(self, title: str) -> WebElement:
        script = "return [...boxes.values()].find((box) => box.vertex.title === arguments[0])"
        return self.driver.execute_script(script, title)

    def view_box(self) -> tuple[float, ...]:
        return tuple(map(float, self.all("#graph")[0].get_dom_attribute("viewBox").split()))

    def filter(self, words: str) -> None:
        self.driver.execute_script("byId('host').tBodies[0].className = 'old'")
        field = self.all("#filter")[0]
        field.clear()
        field.send_keys(words)
        WebDriverWait(self.driver, 10).until(lambda _: not self.all("#host .old"))

    def requests(self) -> list[str]:
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent if each["documentURL"].startswith("file:")]


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    with browser() as started:
        yield started


@pytest.fixture
def page(driver: Chrome, tmp_path: Path) -> Iterator[Page]:
    opened = Page(driver, tmp_path)
    yield opened
    assert driver.get_log("browser") == [], "the console is quiet"
    loaded = driver.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [url for url in loaded if not url.startswith("data:")] == []
    assert {url.split(":")[0] for url in opened.requests()} <= {"file", "data"}


@needs_browser
@pytest.mark.parametrize("name", PLANS)
def test_browser_draws_every_vertex(page: Page, name: str) -> None:
    page.open(PLANS[name])
    drawn = picture(PLANS[name].methods[0])
    assert len(page.all("#graph .box")) == len(drawn.vertices)
    assert len(page.all("#graph .edge")) == len(drawn.edges)
    assert page.all("#no-graph")[0].is_displayed() is (name == "empty")
    assert len(page.all(".meter")) == 3
    assert page.all("#panel")[0].is_displayed() is page.all("#host-section")[0].is_displayed() is (name != "empty")
    assert page.text("#panel").strip()


@needs_browser
def test_browser_shows_the_nodes_of_what_is_clicked(page: Page) -> None:
    page.open(PLANS["small"])
    page.box("forward_0").click()
    assert page.texts("#panel .node") == ["linear", "relu"]
    assert page.text("#panel-title") == "forward_0"
    panel = page.text("#panel")
    for expected in ("XnnpackBackend", "262.1 kB", "9.2 k", "aten.linear.default", "encoder.0", "line 10"):
        assert expected in panel
    assert "because of relu → topk → sort → linear_1" in panel
    assert page.texts("#graph .box.selected .name") == ["forward_0"]
    assert len(page.all("#graph .edge.near")) == 4

    page.box("host 1").click()
    assert page.texts("#panel .node") == ["topk", "sort"]
    assert "int64 <results> & more [Echo]" in page.text("#panel")
    page.box("forward_2").click()
    assert "cut mul: 8,192 bytes of weights" in page.text("#panel")


@needs_browser
def test_browser_follows_links_between_vertices(page: Page) -> None:
    page.open(PLANS["small"])
    next(link for link in page.all("#lists .link") if link.text == "forward_1").click()
    assert page.text("#panel-title") == "forward_1"
    next(link for link in page.all("#host .link") if link.text == "add_1").click()
    assert page.texts("#panel .node") == ["cond", "add", "add_1"]


@needs_browser
def test_browser_is_usable_with_the_keyboard(page: Page) -> None:
    page.open(PLANS["small"])
    assert len(page.all("#graph [tabindex='0']")) == 1
    page.all("#zoom-fit")[0].click()
    keys = ActionChains(page.driver)
    keys.send_keys(Keys.TAB, Keys.ENTER).perform()
    assert page.text("#panel-title") == "forward_0"
    keys.send_keys(Keys.ARROW_DOWN, Keys.ENTER).perform()
    assert page.text("#panel-title") == "forward_2"
    keys.send_keys(Keys.ARROW_LEFT, Keys.SPACE).perform()
    assert page.texts("#panel .node") == ["topk", "sort"]
    assert page.driver.switch_to.active_element.get_attribute("aria-pressed") == "true"
    unnamed = "return [...document.querySelectorAll('button,input,select,[role]')].filter((e) => !(e.textContent.trim()"
    unnamed += " || e.labels?.length || e.ariaLabel || e.getAttribute('aria-labelledby')))"
    assert page.driver.execute_script(unnamed) == []


@needs_browser
def test_browser_zooms_and_pans(page: Page) -> None:
    page.open(PLANS["small"])
    start = page.view_box()
    page.all("#zoom-in")[0].click()
    assert page.view_box()[2] == pytest.approx(start[2] / 1.4)
    page.all("#zoom-out")[0].click()
    assert page.view_box() == pytest.approx(start)
    graph = page.all("#graph")[0]
    page.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", graph)
    origin = page.driver.execute_script("return window.scrollY")
    wheel = "const {left, top, width, height} = arguments[0].getBoundingClientRect(); arguments[0].dispatchEvent("
    wheel += "new WheelEvent('wheel', {deltaY: -200, clientX: left + width / 2, clientY: top + height / 2,"
    wheel += " cancelable: true, bubbles: true}))"
    page.driver.execute_script(wheel, graph)
    zoomed = page.view_box()
    assert zoomed[2] < start[2]
    assert page.driver.execute_script("return window.scrollY") == origin, "the page stays where it is"
    scale = graph.rect["width"] / zoomed[2]
    ActionChains(page.driver).move_to_element(page.box("forward_1")).click_and_hold().move_by_offset(
        60, 40
    ).release().perform()
    moved = page.view_box()
    assert moved[:2] == pytest.approx((zoomed[0] - 60 / scale, zoomed[1] - 40 / scale), abs=0.5)
    assert page.all("#panel-title") == [], "a drag selects nothing"
    page.all("#zoom-fit")[0].click()
    assert page.view_box() == pytest.approx(start)


@needs_browser
def test_browser_filters_and_sorts_the_host_operators(page: Page) -> None:
    page.open(PLANS["small"])
    names = "#host tbody td:nth-child(2)"
    assert page.text("#host-count") == "7 of 7 operators"
    assert page.texts(names) == [host.node for host in PLANS["small"].methods[0].host]
    for words, expected in {
        "aten.ADD": ["add", "add_1"],  # operator
        "results": ["topk", "sort"],  # reason
        "router sort": ["sort"],  # module, and a second word
        "line 16": ["cond"],  # source
        "nowhere": [],
    }.items():
        page.filter(words)
        assert page.texts(names) == expected
        assert page.text("#host-count") == f"{len(expected)} of 7 operators"
    page.filter("aten")
    heads = page.all("#host th button")
    heads[1].click()
    assert page.texts(names) == sorted(page.texts(names))
    page.all("#host th button")[1].click()
    assert page.texts(names) == sorted(page.texts(names), reverse=True)
    assert page.all("#host th")[1].get_attribute("aria-sort") == "descending"


@needs_browser
def test_browser_switches_methods(page: Page) -> None:
    page.open(PLANS["small"])
    page.box("forward_0").click()
    Select(page.all("#method")[0]).select_by_visible_text("decode_step")
    assert page.texts("#graph .box .name") == ["host 1", "decode_step_0"]
    assert page.text("#host-count") == "1 of 1 operator"
    assert page.all("#panel-title") == []
    assert page.texts("#lists h2") == ["Largest costs on the host (1)"]
    assert "1 of 2 in partitions" in page.text("#summary")


class Attends(torch.nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, mask).mean(-1)


@needs_browser
def test_browser_shows_what_was_rewritten_and_what_not(page: Page) -> None:
    inputs = (torch.ones(1, 2, 4, 8), torch.zeros(4, 4))
    plan = exir_lowering.plan(torch.export.export(Attends(), inputs), "xnnpack")
    (made,) = plan.methods
    assert made.rewritings and made.refused_rewrites
    page.open(plan)
    titles, shown = page.texts("#lists h2"), page.text("#lists")
    assert any(
        re.fullmatch(rf"Rewritten: .* operators fewer, .* \({len(made.rewritings)}\)", title) for title in titles
    )
    assert f"Not rewritten ({len(made.refused_rewrites)})" in titles
    assert all(f"{one.rewrite}: " in shown for one in made.rewritings)
    assert all(f"{one.rewrite}, {one.operator}: {one.reason}" in shown for one in made.refused_rewrites)


@needs_browser
def test_browser_shows_any_name_as_text(page: Page) -> None:
    page.open(PLANS["hostile"])
    for title in (HOSTILE, f"{HOSTILE}b"):
        page.box(title).click()
        assert page.text("#panel-title") == title
    assert page.texts("#panel .node") == [f"{HOSTILE}2"]
    assert page.texts("#method option") == [HOSTILE]
    assert page.texts("#host tbody td") == [HOSTILE, f"{HOSTILE}1", HOSTILE, HOSTILE, HOSTILE, HOSTILE]
    assert page.texts("#legend li") == [HOSTILE, "host"]
    assert f"allowing {HOSTILE} in {HOSTILE}" in page.text("#lists")
    assert page.all("img") == []
    assert page.driver.execute_script("return window.hacked") is None


@needs_browser
def test_browser_handles_a_large_plan(page: Page) -> None:
    page.open(PLANS["large"])
    made = PLANS["large"].methods[0]
    assert len(made.nodes) > 3000 and len(made.partitions) == 300
    assert len(page.all("#graph .box:not(.host)")) == 300
    next(link for link in page.all("#lists .link") if link.text == "forward_14").click()
    assert tuple(page.texts("#panel .node")) == made.partitions[14].nodes
    assert len(page.all("#host tbody tr")) == 200
    page.all("#host-more")[0].click()
    assert len(page.all("#host tbody tr")) == len(made.host)
    page.filter("layers.7. addmm")
    page.filter("layers.7.norm")
    assert page.text("#host-count") == f"5 of {len(made.host)} operators"


@needs_browser
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("name", ["small", "hostile", "large"])
def test_browser_needs_no_sideways_scrolling(page: Page, name: str, width: int) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.open(PLANS[name])
        page.driver.execute_script("select(method.picture.vertices[0].id)")
        assert page.driver.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        clipped = "return [...document.querySelectorAll('.box')].filter((box) => { const rect ="
        clipped += " box.querySelector('rect').getBBox(); return [...box.querySelectorAll('text')].some((text) =>"
        clipped += " text.getBBox().width > rect.width); }).map((box) => box.textContent)"
        assert page.driver.execute_script(clipped) == [], "titles stay in their boxes"
    finally:
        page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**size, "width": 1280, "height": 900})


_CONTRASTS = """
const channel = (value) => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
const light = (colour) => { const [r, g, b] = colour.match(/[\\d.]+/g).map(Number);
  return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b); };
const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
const style = (selector) => getComputedStyle(document.querySelector(selector));
const card = style("section").backgroundColor;
const boxes = [...document.querySelectorAll(".box")].map((box) =>
  ratio(getComputedStyle(box.querySelector("text")).fill, getComputedStyle(box.querySelector("rect")).fill));
const words = ["h1", ".soft", ".link"].map((selector) => ratio(style(selector).color, card));
return words.concat(boxes);
"""


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_shows_text_with_contrast(page: Page, scheme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    names = [f"p{i}" for i in range(8)]
    nodes = [node(f"n{name}", partition=name) for name in names]
    page.open(LoweringPlan((method("forward", [*nodes, node("host")], {name: f"backend {name}" for name in names}),)))
    ratios = page.driver.execute_script(_CONTRASTS)
    assert len(ratios) == 3 + 9
    assert min(ratios) >= 4.5
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
