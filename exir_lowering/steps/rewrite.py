"""Step rewrite: change programs in Edge dialect into equal ones that backends take better and that run faster."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.programs import fake_mode_of
from exir_lowering.errors import InputError, RewriteContractError, exception_text, explained
from exir_lowering.graphs import collector, measures
from exir_lowering.graphs.copies import private_copy
from exir_lowering.graphs.ranges import bound_together
from exir_lowering.graphs.sources import is_part_of_linear
from exir_lowering.model import EdgeMethod, RefusedRewrite, Rewriting, State
from exir_lowering.plugins.rewrite import Doubt, Rewrite
from exir_lowering.steps import invariants
from exir_lowering.steps.rewriting.editor import Editor, would_remove
from exir_lowering.steps.rewriting.probing import Candidate, choose
from exir_lowering.steps.rewriting.targets import Targets
from exir_lowering.steps.session import Session
from exir_lowering.steps.shared_state import shareable

_log = logging.getLogger(__name__)

_OURS = "exir_lowering.rewrites."  # the modules of rewrites that users did not write, and cannot mend
_DEPTH = 16  # how often what a rewrite made may be rewritten again before that is an error


def rewrite(
    methods: Sequence[EdgeMethod], rewrites: Sequence[Rewrite], session: Session, states: Sequence[State] = ()
) -> tuple[EdgeMethod, ...]:
    """Rewrite private copies of methods, under the caller's lock; the rewrites are tried in order at a node."""
    assumed = _assumptions(methods, session.options.assume)
    if not rewrites:
        return tuple(methods)
    with session.timed("rewrite"), collector.paused():
        shared, editors = shareable(states), dict[str, Editor]()
        for method in methods:  # except where values are not known, or depend on the order of writes
            mode = fake_mode_of(method.program.graph_module)
            if mode is not None and not any(map(graphs.is_mutating, method.program.graph.nodes)):
                program = private_copy(method.program, handles=True, unbacked=True)
                volatile = {name for each in shared for user, name in each if user == method.name}
                mode = fake_mode_of(program.graph_module) or mode
                editors[method.name] = Editor(program, mode, assumed[method.name], volatile)
        known = [each for each in shared if all(user in editors for user, _ in each)]
        bound_together([[(editors[user].ranges, name) for user, name in each] for each in known])
        each_method = session.progress.each("rewrite", methods)
        chosen = session.options.rewrites
        singly = () if chosen is None or isinstance(chosen, str) else chosen
        # Partitioners are asked about all rewrites but those that the user chose singly.
        asked = frozenset(one.name for one in rewrites) - {getattr(one, "name", one) for one in singly}
        return tuple(_rewrite(method, editors.get(method.name), rewrites, asked) for method in each_method)


def _assumptions(methods: Sequence[EdgeMethod], assume: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return what is assumed of each method's inputs."""
    inputs = {method.name: [node.name for node in graphs.user_inputs(method.program)] for method in methods}
    unknown = sorted(set(assume).difference(*inputs.values()))
    if unknown:
        known = "; ".join(f"{name}: {', '.join(found) or 'no inputs'}" for name, found in inputs.items())
        raise InputError(f"LoweringOptions(assume=...): no method has an input {unknown[0]!r}; they have {known}.")
    return {name: {key: assume[key] for key in found if key in assume} for name, found in inputs.items()}


def _rewrite(
    method: EdgeMethod, editor: Editor | None, rewrites: Sequence[Rewrite], asked: frozenset[str]
) -> EdgeMethod:
    """Rewrite a method, then replace operators by forms that its partitioners take and that cost less."""
    if editor is None:
        return method
    program = editor.program
    targets = Targets(method.name, method.program, method.partitioners, asked)
    walk, forms = (_Walk(method.name, editor, rewrites, when, targets) for when in ("always", "taken"))
    walk.run(list(editor.graph.nodes))
    candidates = forms.propose_forms() if forms.rewrites and method.partitioners else []
    if candidates:
        chosen = choose(method.name, program, editor.lifted, candidates, method.partitioners, asked)
        walk.run(forms.accept(candidates, chosen))
    done, refused = (*walk.done, *forms.done), {**walk.refused, **forms.refused}
    names = tuple(one.name for one in rewrites)
    tried = replace(method, rewrites=names, refused_rewrites=tuple(refused.values()))
    if not done:
        return tried
    editor.finish()
    invariants.check_program(f"method {method.name}, rewritten", program)
    return replace(tried, program=program, unchanged=method.program, rewritings=done)


class _Walk:
    """The rewriting of one method: what was changed, and what was left alone, and why."""

    def __init__(self, method: str, editor: Editor, rewrites: Sequence[Rewrite], when: str, targets: Targets) -> None:
        self.method, self.editor, self.when, self.targets = method, editor, when, targets
        self.rewrites = [one for one in rewrites if one.when == when]
        self.done: list[Rewriting] = []
        self.refused: dict[tuple[str, Node], RefusedRewrite] = {}
        self._by_operator: dict[str, list[Rewrite]] = {}
        self._depth: dict[Node, int] = {}

    def run(self, nodes: Iterable[Node]) -> None:
        """Rewrite nodes, in the graph's order, and what is made of them; RewriteContractError for a wrong rewrite."""
        for node in nodes:
            pending = deque([node])
            while pending:
                current = pending.popleft()
                if current not in self.editor.gone:
                    pending.extendleft(reversed(self._visit(current)))

    def _visit(self, node: Node) -> list[Node]:
        """Rewrite one node; return the nodes that were made."""
        depth = self._depth.get(node, 0)
        for rewrite in self._interested(node):
            new = self._propose(rewrite, node)
            if new is None:
                continue
            if depth == _DEPTH:
                raise RewriteContractError(
                    f"{self._who(rewrite, node)}, changes what rewrites made of a node {_DEPTH} times in a row: they "
                    "undo each other, or one never ends. Return None for nodes that are right already."
                )
            made = self._commit(rewrite, node, new, self.editor.made)
            self._depth.update(dict.fromkeys(made, depth + 1))
            return made
        return []

    def propose_forms(self) -> list[Candidate]:
        """Return what the rewrites would make of the graph's nodes, as nodes beside those that would be replaced."""
        candidates = []
        for node in list(self.editor.graph.nodes):
            for rewrite in self._interested(node):
                new, made = self._propose(rewrite, node), tuple(self.editor.made)
                if new in made:
                    old = {*would_remove(node, made), *(node.all_input_nodes if graphs.is_getitem(node) else ())}
                    candidates.append(Candidate(rewrite, node, new, made, tuple(sorted(old))))
                    break
                self.editor.discard()
        return candidates

    def accept(self, candidates: Sequence[Candidate], chosen: Collection[Candidate]) -> list[Node]:
        """Replace nodes by the chosen candidates and remove the others; return the nodes that were added."""
        added: list[Node] = []
        for candidate in candidates:
            if candidate in chosen and self.editor.exists(candidate.node) and self.editor.exists(candidate.new):
                added += self._commit(candidate.rewrite, candidate.node, candidate.new, candidate.made)
            else:
                self.editor.discard(candidate.made)
        return added

    def _interested(self, node: Node) -> Sequence[Rewrite]:
        """Return the rewrites that look at a node.

        None that changes always looks at parts of a linear layer, by which backends find it.
        """
        if node.op != "call_function" or (self.when == "always" and is_part_of_linear(node)):
            return ()
        name = graphs.operator_name(node)
        if name not in self._by_operator:
            self._by_operator[name] = [one for one in self.rewrites if not {name, "*"}.isdisjoint(one.operators)]
        return self._by_operator[name]

    def _propose(self, rewrite: Rewrite, node: Node) -> Node | None:
        """Return the node by which a rewrite would replace a node, or None; RewriteContractError if that is invalid."""
        try:
            new = self._ask(rewrite, node)
        except RewriteContractError as error:
            if not type(rewrite).__module__.startswith(_OURS):
                raise
            _log.warning("%s It is left out there: a defect of exir-lowering, please report it.", error)
            advice = "This is a defect of exir-lowering: please report it."
            new = Doubt(node, str(error).removesuffix("."), advice)
        if isinstance(new, Node) and new is not node and not self.targets.want(rewrite.name):
            by = self.targets.refusing(rewrite.name, would_remove(node, (*self.editor.made, new)))
            if by is not None:
                advice = f"rewrites=[..., {rewrite.name!r}] applies it anyway."
                new = Doubt(node, f"{by} takes this, and does not say that its backend gains from the rewrite", advice)
        if isinstance(new, Doubt):
            about = (self.method, rewrite.name, node.name, graphs.operator_name(node), new.reason, new.advice)
            self.refused[rewrite.name, node] = RefusedRewrite(*about, graphs.source_line(node))
        elif new is not None and new is not node and self.editor.may_replace(node, new):
            return new
        self.editor.discard()
        return None

    def _ask(self, rewrite: Rewrite, node: Node) -> Node | Doubt | None:
        """Return what a rewrite says; RewriteContractError if it raised, or named what cannot be an equal value."""
        who = self._who(rewrite, node)
        with explained(lambda error: RewriteContractError(f"{who} raised {exception_text(error)}")):
            new: object = rewrite.rewrite(node, self.editor.at(node, rewrite.name))
        if new is None or isinstance(new, Doubt):
            return new
        if not isinstance(new, Node) or new.graph is not node.graph or new in self.editor.gone:
            raise RewriteContractError(f"{who} returned {new!r}, expected a node of the graph, a Doubt or None.")
        if new is not node and not new < node:
            raise RewriteContractError(f"{who} returned {new.name}, which is computed after it. Use scope.call.")
        if any(node in one.all_input_nodes for one in self.editor.made):
            what = f"replaced it by {new.name}, which depends on it"
            raise RewriteContractError(f"{who} {what}. Use its operands instead.")
        old, got = (_describe(one.meta.get("val")) for one in (node, new))
        if old != got:
            raise RewriteContractError(f"{who} replaced a {old} by {new.name}, a {got}.")
        return new

    def _who(self, rewrite: Rewrite, node: Node) -> str:
        return f"Rewrite {rewrite.name!r} ({type(rewrite).__qualname__}) on method {self.method!r}, node {node.name}"

    def _commit(self, rewrite: Rewrite, node: Node, new: Node, made: Sequence[Node]) -> list[Node]:
        """Let a node replace another one; return what was made for it and is needed."""
        source = graphs.source_line(node)
        self.editor.made = list(made)
        removed = self.editor.replace(node, new)
        self.editor.discard(made)
        needed = [one for one in made if self.editor.exists(one)]
        saved, written = (sum(map(_written, nodes)) for nodes in (removed, needed))
        names, operators = tuple(one.name for one in removed), tuple(map(graphs.operator_name, removed))
        new_names = tuple(one.name for one in needed)
        about = (self.method, rewrite.name, names, operators, new_names, new.name, saved - written, source)
        self.done.append(Rewriting(*about))
        return needed


def _describe(value: object) -> str:
    return f"tensor {value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else str(type(value))


def _written(node: Node) -> int:
    return 0 if graphs.is_getitem(node) else measures.value_bytes(node)
