"""Step rewrite: change programs in Edge dialect into equal ones that backends take better and that run faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from exir_lowering import graphs
from exir_lowering._upstream.programs import fake_mode_of
from exir_lowering.errors import InputError
from exir_lowering.graphs import debug_handles
from exir_lowering.graphs.isolation import isolate
from exir_lowering.model import EdgeMethod
from exir_lowering.options import LoweringOptions
from exir_lowering.plugins.costs import CostModel
from exir_lowering.plugins.rewrite import Rewrite
from exir_lowering.plugins.rewrites import find_rewrites
from exir_lowering.steps.rewriting.editor import Editor
from exir_lowering.steps.rewriting.probing import choose
from exir_lowering.steps.rewriting.walk import Walk
from exir_lowering.steps.session import Session


def rewrite(methods: Sequence[EdgeMethod], session: Session, default: str) -> tuple[EdgeMethod, ...]:
    """Rewrite each method.

    Args:
        methods: The methods. Their programs are not changed.
        session: Its options `rewrites` and `assume` are used.
        default: The rewrites if the options name none.

    Returns:
        The methods with what was rewritten; the programs in which nothing was are the same objects.

    Raises:
        InputError: An option names something that does not exist.
        UnknownPluginError, PluginLoadError: A rewrite cannot be found or loaded.
        RewriteContractError: A rewrite is broken.
    """
    options = session.options
    with session.timed("rewrite"):
        rewrites = find_rewrites(options.rewrites if options.rewrites is not None else default)
        assumed = _assumptions(methods, options.assume)
        if not rewrites:
            return tuple(methods)
        each = session.progress.each("rewrite", methods)
        return tuple(_rewrite(method, rewrites, assumed[method.name], options) for method in each)


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


def _rewrite(
    method: EdgeMethod, rewrites: Sequence[Rewrite], assume: Mapping[str, str], options: LoweringOptions
) -> EdgeMethod:
    mode = fake_mode_of(method.program.graph_module)
    if mode is None or any(map(graphs.is_mutating, method.program.graph.nodes)):
        return method  # values are not known, or depend on the order of writes
    program = isolate(debug_handles.copy_with_handles(method.program))
    mode = fake_mode_of(program.graph_module) or mode
    editor = Editor(program, mode, assume)
    walk = Walk(method.name, editor, [one for one in rewrites if one.when == "always"])
    walk.run(list(editor.graph.nodes))
    _take_better_forms(method, walk, editor, [one for one in rewrites if one.when == "taken"], options.costs)
    refused = tuple(walk.refused.values())
    tried = replace(method, rewrites=tuple(one.name for one in rewrites), refused_rewrites=refused)
    if not walk.done:
        return tried
    editor.finish()
    return replace(tried, program=program, rewritings=tuple(walk.done))


def _take_better_forms(
    method: EdgeMethod, walk: Walk, editor: Editor, rewrites: Sequence[Rewrite], costs: CostModel | None
) -> None:
    """Replace operators by forms that the method's partitioners take and that cost less."""
    if not rewrites or not method.partitioners:
        return
    forms = Walk(method.name, editor, rewrites)
    candidates = forms.propose_forms()
    if candidates:
        chosen = choose(method.name, editor.program, editor.lifted, candidates, method.partitioners, costs)
        walk.run(forms.accept(candidates, chosen))
    walk.done += forms.done
    walk.refused |= forms.refused
