"""Step rewrite: change programs in Edge dialect into equal ones that backends take better and that run faster."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from exir_lowering import graphs
from exir_lowering._upstream.programs import fake_mode_of
from exir_lowering.errors import InputError
from exir_lowering.graphs import collector
from exir_lowering.graphs.copies import private_copy
from exir_lowering.graphs.ranges import bound_together
from exir_lowering.model import EdgeMethod, State
from exir_lowering.plugins.costs import CostModel
from exir_lowering.plugins.rewrite import Rewrite
from exir_lowering.steps import invariants
from exir_lowering.steps.recipes import replaceable
from exir_lowering.steps.rewriting.editor import Editor
from exir_lowering.steps.rewriting.probing import choose
from exir_lowering.steps.rewriting.walk import Walk
from exir_lowering.steps.session import Session
from exir_lowering.steps.shared_state import shareable


def rewrite(
    methods: Sequence[EdgeMethod], rewrites: Sequence[Rewrite], session: Session, states: Sequence[State] = ()
) -> tuple[EdgeMethod, ...]:
    """Rewrite private copies of methods; the rewrites are tried in order at a node, with what the session assumes.

    The caller holds the lock of conversions. What can be one memory in a file is what every method leaves there.
    """
    assumed = _assumptions(methods, session.options.assume)
    if not rewrites:
        return tuple(methods)
    settings = _Settings(rewrites, session.options.costs)
    with session.timed("rewrite"), collector.paused():
        editors = _open(methods, assumed, shareable(states), session.options.refit)
        each = session.progress.each("rewrite", methods)
        return tuple(_rewrite(method, editors.get(method.name), settings) for method in each)


def _assumptions(methods: Sequence[EdgeMethod], assume: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return what is assumed of each method's inputs."""
    inputs = {method.name: _input_names(method.program) for method in methods}
    unknown = sorted(set(assume).difference(*inputs.values()))
    if unknown:
        known = "; ".join(f"{name}: {', '.join(found) or 'no inputs'}" for name, found in inputs.items())
        raise InputError(f"LoweringOptions(assume=...): no method has an input {unknown[0]!r}; they have {known}.")
    return {name: {key: assume[key] for key in found if key in assume} for name, found in inputs.items()}


def _input_names(program: ExportedProgram) -> list[str]:
    specs = program.graph_signature.input_specs
    return [spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT]


@dataclass(frozen=True, slots=True)
class _Settings:
    """What is the same for all methods."""

    rewrites: Sequence[Rewrite]  # in their order
    costs: CostModel | None  # of operators; None for the default model

    def only(self, when: str) -> list[Rewrite]:
        """Return the rewrites that are applied under a condition."""
        return [rewrite for rewrite in self.rewrites if rewrite.when == when]


def _open(
    methods: Sequence[EdgeMethod],
    assumed: Mapping[str, Mapping[str, str]],
    shared: Sequence[Collection[tuple[str, str]]],
    refit: bool,
) -> dict[str, Editor]:
    """Make an editor for each method, except where values are not known, or depend on the order of writes."""
    editors = {}
    for method in methods:
        mode = fake_mode_of(method.program.graph_module)
        if mode is not None and not any(map(graphs.is_mutating, method.program.graph.nodes)):
            program = private_copy(method.program, handles=True)
            volatile = {name for each in shared for user, name in each if user == method.name}
            mode = fake_mode_of(program.graph_module) or mode
            weights = replaceable(program) if refit else ()
            editors[method.name] = Editor(program, mode, assumed[method.name], volatile, weights)
    known = [each for each in shared if all(user in editors for user, _ in each)]
    bound_together([[(editors[user].ranges, name) for user, name in each] for each in known])
    return editors


def _rewrite(method: EdgeMethod, editor: Editor | None, settings: _Settings) -> EdgeMethod:
    if editor is None:
        return method
    program = editor.program
    walk = Walk(method.name, editor, settings.only("always"))
    walk.run(list(editor.graph.nodes))
    _take_better_forms(method, walk, editor, settings)
    refused = tuple(walk.refused.values())
    tried = replace(method, rewrites=tuple(one.name for one in settings.rewrites), refused_rewrites=refused)
    if not walk.done:
        return tried
    editor.finish()
    invariants.check_program(f"method {method.name}, rewritten", program)
    return replace(tried, program=program, unchanged=method.program, rewritings=tuple(walk.done))


def _take_better_forms(method: EdgeMethod, walk: Walk, editor: Editor, settings: _Settings) -> None:
    """Replace operators by forms that the method's partitioners take and that cost less."""
    if not settings.only("taken") or not method.partitioners:
        return
    forms = Walk(method.name, editor, settings.only("taken"))
    candidates = forms.propose_forms()
    if candidates:
        chosen = choose(method.name, editor.program, editor.lifted, candidates, method.partitioners, settings.costs)
        walk.run(forms.accept(candidates, chosen))
    walk.done += forms.done
    walk.refused |= forms.refused
