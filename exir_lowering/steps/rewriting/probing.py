"""Ask a method's partitioners which of two forms of some operators they take, with a small program that has both."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from executorch.exir.backend.partitioner import Partitioner
from torch.export import ExportedProgram, ExportGraphSignature
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from exir_lowering import graphs
from exir_lowering._upstream.programs import assemble_program, guards_code_of, lazy_graph_module
from exir_lowering._upstream.value_keys import KeyMaker
from exir_lowering.errors import LoweringError
from exir_lowering.graphs import DELEGATION_TAG, LIFTED_ORDER
from exir_lowering.plugins.asking import asked_of_forms, make_fake_state
from exir_lowering.plugins.rewrite import Rewrite
from exir_lowering.steps.rewriting import gains
from exir_lowering.steps.rewriting.targets import unwanted
from exir_lowering.steps.tag import tag


@dataclass(frozen=True, slots=True)
class Candidate:
    """One form of some operators that could replace another one."""

    rewrite: Rewrite  # the one that proposes it
    node: Node  # the node whose value it computes
    new: Node  # the node that would have the value
    made: tuple[Node, ...]  # what was added for it, in the graph's order
    old: tuple[Node, ...]  # what nothing would need any more, in the graph's order; of a result, also its operator


_Copies = dict[tuple[Candidate, Node], Node]  # the nodes of a probe, by candidate and the node that each is a copy of
_Place = tuple[str, frozenset[str]]  # a backend, and the rewrites from which its partitioner does not gain


def choose(
    method: str,
    program: ExportedProgram,
    lifted: Mapping[Node, InputSpec],
    candidates: Sequence[Candidate],
    partitioners: Sequence[Partitioner],
    asked: Collection[str],
) -> set[Candidate]:
    """Return the candidates whose new form goes to one backend as a whole, and costs less there than the old one.

    It has to gain from the rewrite, if that is one of those `asked` about.

    Those with operands that are not tensors, such as symbolic sizes, are not chosen.
    """
    equal: dict[Hashable, list[Candidate]] = {}  # which partitioners answer in the same way
    for one in candidates:
        if all(isinstance(node.meta.get("val"), torch.Tensor) for node in _operands(one)):
            equal.setdefault(_key(one, lifted), []).append(one)
    if not equal:
        return set()
    places: dict[str, _Place] = {}  # of each node that a partitioner takes
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a program that is not the user's; the method is asked about anyway
            probe, copies = _make_probe(program, lifted, [group[0] for group in equal.values()])
            state = make_fake_state(probe)
            for partitioner in partitioners:
                tagged = tag(method, probe, asked_of_forms(partitioner), state)
                refused = unwanted(partitioner, asked)
                for node in tagged.program.graph.nodes:
                    if (name := node.meta.get(DELEGATION_TAG)) is not None:
                        places.setdefault(node.name, (tagged.destinations[name].backend_id, refused))
    except LoweringError:  # the partitioner only takes programs that are whole: it says so of the method, if at all
        return set()
    return {one for group in equal.values() if _is_better(copies, places, group[0]) for one in group}


def _is_better(copies: _Copies, places: Mapping[str, _Place], candidate: Candidate) -> bool:
    new = [copies[candidate, node] for node in filter(graphs.is_operator, candidate.made)]
    taken = [places.get(node.name) for node in new]
    known = {backend for backend, refused in filter(None, taken) if candidate.rewrite.name not in refused}
    if len(known) != 1 or not all(one is not None and one[0] in known for one in taken):
        return False
    before = 0.0
    for node in filter(graphs.is_operator, candidate.old):
        copied, results = copies[candidate, node], sum(map(graphs.is_getitem, node.users))
        cost = gains.in_delegate(copied) if places.get(copied.name) else gains.on_host(copied)
        before += cost / max(1, results)  # each result bears its part
    return sum(map(gains.in_delegate, new)) < before


def _make_probe(
    program: ExportedProgram, lifted: Mapping[Node, InputSpec], candidates: Sequence[Candidate]
) -> tuple[ExportedProgram, _Copies]:
    """Return a program that has both forms of each candidate."""
    graph, specs, copies, inputs = Graph(), list[InputSpec](), _Copies(), dict[Node, Node]()
    outside = dict.fromkeys(node for candidate in candidates for node in _operands(candidate))
    # Weights come first, as in every program.
    ranked = sorted(outside, key=lambda n: LIFTED_ORDER.index(lifted[n].kind) if n in lifted else len(LIFTED_ORDER))
    for number, node in enumerate(ranked):
        inputs[node] = placeholder = graph.placeholder(f"operand{number}")
        placeholder.meta = {"val": node.meta.get("val")}
        spec = lifted.get(node)
        kind, target = (InputKind.USER_INPUT, None) if spec is None else (spec.kind, spec.target)
        persistent = True if kind is InputKind.BUFFER else None
        specs.append(InputSpec(kind, TensorArgument(placeholder.name), target, persistent))
    outputs: dict[Node, None] = {}
    for candidate in candidates:
        env = dict(inputs)
        for node in (*candidate.old, *candidate.made):
            env[node] = copies[candidate, node] = graph.node_copy(node, env.__getitem__)
        outputs |= dict.fromkeys((env[candidate.node], env[candidate.new]))
    graph.output(tuple(outputs))
    returned = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in outputs]
    targets = {str(spec.target) for spec in specs}
    probe = assemble_program(
        graph_module=lazy_graph_module({}, graph),
        signature=ExportGraphSignature(specs, returned),
        state_dict={name: value for name, value in program.state_dict.items() if name in targets},
        constants={name: value for name, value in program.constants.items() if name in targets},
        range_constraints=dict(program.range_constraints),
        verifiers=program.verifiers,
        guards_code=guards_code_of(program),
    )
    return probe, copies


def _operands(candidate: Candidate) -> dict[Node, None]:
    """Return the nodes that a candidate's operators read from outside."""
    inside = (*candidate.old, *candidate.made)
    read = dict.fromkeys(node for one in inside for node in one.all_input_nodes)
    return {node: None for node in read if node not in inside}


def _key(candidate: Candidate, lifted: Mapping[Node, InputSpec]) -> Hashable:
    """Return what candidates have in common for which partitioners give the same answer."""
    described: list[Hashable] = [candidate.rewrite.name, len(candidate.old)]
    names: dict[Node, str] = {}
    for node in _operands(candidate):
        names[node] = f"%{len(names)}"
        try:
            value = KeyMaker(ValueError, constants=True).key(node.meta["val"])
        except ValueError:  # if there is more to it, it is like no other one
            value = node
        described.append((str(lifted[node].kind) if node in lifted else "", value))
    for node in (*candidate.old, *candidate.made):
        described.append((node.target, repr(map_arg((node.args, dict(node.kwargs)), names.__getitem__))))
        names[node] = f"%{len(names)}"
    return tuple(described)
