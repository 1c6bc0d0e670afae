"""The quotient graph: tags contracted, ordered, and split where they would close a cycle."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from torch.fx import Graph, Node

from exir_lowering.graphs import quotient
from exir_lowering.graphs.quotient import Unit


def chain(*tags: str | None) -> tuple[list[Node], dict[Node, str]]:
    """Make a chain of nodes a, b, c, ..., each with its tag."""
    return graph(
        {"abcdefghijklmnopqrstuvwxyz"[i]: "abcdefghijklmnopqrstuvwxyz"[i - 1 : i] for i in range(len(tags))}, tags
    )


def graph(inputs: Mapping[str, str], tags: Sequence[str | None]) -> tuple[list[Node], dict[Node, str]]:
    """Make one node for each name, which reads the named ones; the tags are in the same order."""
    made = Graph()
    nodes: dict[str, Node] = {}
    for name, read in inputs.items():
        nodes[name] = made.create_node("call_function", max, tuple(nodes[other] for other in read), name=name)
    tag_of = {node: tag for node, tag in zip(nodes.values(), tags, strict=True) if tag is not None}
    return list(nodes.values()), tag_of


def ordered(nodes: Sequence[Node], tag_of: Mapping[Node, str]) -> list[str]:
    """Order, check what must always hold, and describe the units: host nodes by name, pieces as tag.number:nodes."""
    units, _ = quotient.order(nodes, tag_of)
    require_valid(nodes, tag_of, units)
    return [describe(unit) for unit in units]


def describe(unit: Unit) -> str:
    names = "".join(node.name for node in unit.nodes)
    return names if unit.piece is None else f"{unit.piece[0]}.{unit.piece[1]}:{names}"


def require_valid(nodes: Sequence[Node], tag_of: Mapping[Node, str], units: Sequence[Unit]) -> None:
    assert [n for unit in units for n in sorted(unit.nodes, key=nodes.index)] == [n for u in units for n in u.nodes]
    assert sorted(n.name for unit in units for n in unit.nodes) == sorted(n.name for n in nodes)
    place = {node: i for i, unit in enumerate(units) for node in unit.nodes}
    for node in nodes:
        assert all(place[source] <= place[node] for source in node.all_input_nodes), "a unit comes before its input"
    for unit in units:
        assert {tag_of.get(node) for node in unit.nodes} == {unit.piece[0] if unit.piece else None}
        assert unit.piece is not None or len(unit.nodes) == 1
    numbers: dict[str, list[int]] = {}
    for unit in units:
        if unit.piece is not None:
            numbers.setdefault(unit.piece[0], []).append(unit.piece[1])
    for found in numbers.values():
        assert sorted(found) == list(range(len(found))), "pieces are numbered from 0"


def test_a_convex_tag_is_one_unit() -> None:
    assert ordered(*chain(None, "t", "t", None)) == ["a", "t.0:bc", "d"]


def test_without_tags_the_order_of_the_graph_stays() -> None:
    nodes, tag_of = graph({"a": "", "b": "", "c": "b", "d": "a", "e": "cd"}, [None] * 5)
    assert ordered(nodes, tag_of) == ["a", "b", "c", "d", "e"]
    assert quotient.order(nodes, tag_of)[1] is None


def test_no_nodes_give_no_units() -> None:
    assert quotient.order([], {}) == ([], None)


def test_a_diamond_with_both_sides_tagged_stays_whole() -> None:
    assert ordered(*graph({"a": "", "b": "a", "c": "a", "d": "bc"}, ["t", "t", "t", "t"])) == ["t.0:abcd"]


def test_a_diamond_with_one_side_on_the_host_is_split() -> None:
    nodes, tag_of = graph({"a": "", "b": "a", "c": "a", "d": "bc"}, ["t", "t", None, "t"])
    assert ordered(nodes, tag_of) == ["t.0:ab", "c", "t.1:d"]
    _, cycle = quotient.order(nodes, tag_of)
    assert cycle is not None and (cycle.tag, cycle.path) == ("t", ("a", "c", "d"))
    assert str(cycle) == "a -> c -> d"


def test_unconnected_nodes_of_one_tag_are_one_unit() -> None:
    assert ordered(*graph({"a": "", "b": "", "c": "a", "d": "b"}, ["t", "t", None, None])) == ["t.0:ab", "c", "d"]


def test_a_unit_waits_for_its_last_input_and_others_overtake_it() -> None:
    assert ordered(*graph({"a": "", "b": "", "c": "b", "d": "c"}, ["t", None, None, "t"])) == ["b", "c", "t.0:ad"]


def test_two_tags_that_feed_each_other_are_split() -> None:
    nodes, tag_of = graph({"a": "", "b": "", "c": "b", "d": "a"}, ["t", "u", "t", "u"])
    found = ordered(nodes, tag_of)
    assert len(found) == 3, "one of the two is split, not both"
    _, cycle = quotient.order(nodes, tag_of)
    assert cycle is not None and cycle.path == ("a", "d", "b", "c")


def test_only_the_tags_on_a_cycle_are_split() -> None:
    inputs = {"a": "", "b": "a", "c": "b", "d": "c", "e": "d", "f": "e"}
    assert ordered(*graph(inputs, ["s", "s", "t", None, "t", "v"])) == ["s.0:ab", "t.0:c", "d", "t.1:e", "v.0:f"]


@pytest.mark.parametrize("length", [2, 3, 4, 9, 26])
def test_a_chain_that_alternates_between_two_tags_has_one_piece_for_each_node(length: int) -> None:
    nodes, tag_of = chain(*("tu"[i % 2] for i in range(length)))
    assert len(ordered(nodes, tag_of)) == length


def test_a_tag_that_the_host_interrupts_twice_is_split_in_three() -> None:
    assert ordered(*chain("t", None, "t", None, "t")) == ["t.0:a", "b", "t.1:c", "d", "t.2:e"]


def test_a_cycle_of_three_tags_is_broken_once() -> None:
    inputs = {"a": "", "b": "", "c": "", "x": "a", "y": "b", "z": "c"}
    nodes, tag_of = graph(inputs, ["t", "u", "v", "u", "v", "t"])
    assert len(ordered(nodes, tag_of)) == 4


def test_the_pieces_of_a_tag_are_numbered_in_the_order_of_the_graph() -> None:
    units, _ = quotient.order(*chain("t", "u", "t", "u", "t"))
    pieces = [unit.piece for unit in units]
    assert [piece for piece in pieces if piece and piece[0] == "t"] == [("t", 0), ("t", 1), ("t", 2)]


def test_the_names_of_tags_do_not_decide_how_they_are_split() -> None:
    for first, second in (("t", "u"), ("u", "t")):
        nodes, tag_of = graph({"a": "", "b": "", "c": "b", "d": "a"}, [first, second, first, second])
        shapes = [describe(unit).split(":")[-1] for unit in quotient.order(nodes, tag_of)[0]]
        assert shapes == [
            describe(u).split(":")[-1]
            for u in quotient.order(*graph({"a": "", "b": "", "c": "b", "d": "a"}, ["x", "y", "x", "y"]))[0]
        ]


def test_a_long_alternation_is_split_in_the_time_of_a_few_sweeps() -> None:
    """Thousands of pieces in one component: linear, or this test would take minutes."""
    made = Graph()
    nodes = [made.create_node("call_function", max, ())]
    for _ in range(20_000):
        nodes.append(made.create_node("call_function", max, (nodes[-1],)))
    tag_of = {node: "tu"[i % 2] for i, node in enumerate(nodes)}
    units, cycle = quotient.order(nodes, tag_of)
    assert len(units) == len(nodes) and cycle is not None


def test_what_has_one_key_is_contracted_and_what_it_encloses_is_found() -> None:
    nodes, keys = graph({"a": "", "b": "a", "c": "a", "d": "bc", "e": "d"}, ["t", "t", "u", "t", "v"])
    units, successors = quotient.contract(nodes, keys.__getitem__)
    assert ["".join(node.name for node in unit) for unit in units] == ["abd", "c", "e"]
    assert successors == [[1, 2], [0], []] and quotient.find_knots(successors) == [[0, 1]]


# -- random graphs ----------------------------------------------------------------------------------------------------


def random_graph(rng: random.Random, size: int, tags: int, density: float) -> tuple[list[Node], dict[Node, str]]:
    made = Graph()
    nodes: list[Node] = []
    for i in range(size):
        read = tuple(node for node in nodes[-6:] if rng.random() < density)
        nodes.append(made.create_node("call_function", max, read, name=f"n{i}"))
    numbers = [rng.randrange(tags + 1) for _ in nodes]
    return nodes, {node: f"t{number}" for node, number in zip(nodes, numbers, strict=True) if number}


def test_random_graphs_are_always_ordered() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        nodes, tag_of = random_graph(rng, rng.randint(1, 60), rng.randint(1, 6), rng.choice([0.1, 0.3, 0.6]))
        units, cycle = quotient.order(nodes, tag_of)
        require_valid(nodes, tag_of, units)
        split = {unit.piece[0] for unit in units if unit.piece is not None and unit.piece[1]}
        assert cycle is not None or not split, seed
        if cycle is not None:
            names = {node.name: node for node in nodes}
            assert tag_of[names[cycle.path[0]]] == tag_of[names[cycle.path[-1]]] == cycle.tag, seed
            assert all(tag_of.get(names[name]) != cycle.tag for name in cycle.path[1:-1]), seed
        again, _ = quotient.order(nodes, tag_of)
        assert again == units, seed
