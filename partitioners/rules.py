"""Rules on top of any partitioner: allow, deny and pin operators by name, node, module path or module class."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any, Literal

from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import CompileSpec, DelegationSpec, ExplainedResult, InputError, Partitioner, Rejection, graphs
from exir_lowering.partitioners.algorithms import nested_run
from exir_lowering.partitioners.algorithms.convex import contract, list_computing
from exir_lowering.partitioners.supports.predicates import check_operator
from exir_lowering.partitioners.supports.support import suggest

HOST = "host"
"""Where operators go that no backend takes."""

Facts = Mapping[str, Collection[str]]
"""What rules match on: for each criterion, the names that apply to an operator."""

_Names = str | Sequence[str] | None


@dataclass(frozen=True, slots=True)
class Rule:
    """Says what to do with the operators that it matches; made by `allow`, `deny` and `pin`.

    Attributes:
        kind: What to do.
        op: Operator names, such as "aten.add.Tensor" or "aten.add"; also of the operator that one was decomposed from.
        name: Node names, as a plan shows them.
        module: Module paths, such as "model.layers.0"; what is inside a module matches too.
        module_class: Names of module classes, such as "LayerNorm" or "torch.nn.modules.normalization.LayerNorm".
        to: The backend id that the operators go to; "host" for no backend, None for the partitioner's own.
        compile_specs: The compile specs for that backend.
        required: Whether it is an error if a name, path or class does not occur.
    """

    kind: Literal["allow", "deny", "pin"]
    op: tuple[str, ...] = ()
    name: tuple[str, ...] = ()
    module: tuple[str, ...] = ()
    module_class: tuple[str, ...] = ()
    to: str | None = None
    compile_specs: tuple[CompileSpec, ...] = ()
    required: bool = True

    def matches(self, facts: Facts) -> bool:
        """Return whether an operator meets all criteria of the rule; `*` stands for anything."""
        return all(_any(wanted, facts[key]) for key in _CRITERIA if (wanted := getattr(self, key)))

    def __str__(self) -> str:
        given = [f"{key}={getattr(self, key)[0]!r}" for key in _CRITERIA if len(getattr(self, key)) == 1]
        given += [f"{key}={list(getattr(self, key))!r}" for key in _CRITERIA if len(getattr(self, key)) > 1]
        given += [f"to={self.to!r}"] if self.to is not None else []
        return f"{self.kind}({', '.join(given)})"


_CRITERIA = ("op", "name", "module", "module_class")


def allow(
    *,
    op: _Names = None,
    name: _Names = None,
    module: _Names = None,
    module_class: Any = None,
    to: str | None = None,
    required: bool = True,
) -> Rule:
    """Return a rule that gives operators to the backend even if the partitioner leaves them.

    They are exempt from the rules that follow.

    Args:
        op: Operator names; if there are several criteria, all of them must be met.
        name: Node names.
        module: Module paths.
        module_class: Module classes, or their names.
        to: The backend, if the partitioner has several.
        required: Whether it is an error if a name, path or class does not occur in a program.

    Raises:
        InputError: No criterion is given, or an operator does not exist.
    """
    return _rule("allow", op, name, module, module_class, to, (), required)


def deny(
    *, op: _Names = None, name: _Names = None, module: _Names = None, module_class: Any = None, required: bool = True
) -> Rule:
    """Return a rule that keeps operators on the host.

    Args:
        op: As for `allow`.
        name: As for `allow`.
        module: As for `allow`.
        module_class: As for `allow`.
        required: As for `allow`.

    Raises:
        InputError: As for `allow`.
    """
    return _rule("deny", op, name, module, module_class, HOST, (), required)


def pin(
    to: str,
    *,
    op: _Names = None,
    name: _Names = None,
    module: _Names = None,
    module_class: Any = None,
    compile_specs: Sequence[CompileSpec] = (),
    required: bool = True,
) -> Rule:
    """Return a rule that fixes where operators go.

    Args:
        to: The backend, by id, or "host".
        op: As for `allow`.
        name: As for `allow`.
        module: As for `allow`.
        module_class: As for `allow`.
        compile_specs: Their compile specs for the backend.
        required: As for `allow`.

    Raises:
        InputError: As for `allow`.
    """
    return _rule("pin", op, name, module, module_class, to, tuple(compile_specs), required)


def _rule(kind: Any, op: Any, name: Any, module: Any, module_class: Any, to: Any, specs: Any, required: bool) -> Rule:
    classes = [module_class] if isinstance(module_class, type) else module_class
    if classes is not None and not isinstance(classes, str):
        classes = [f"{c.__module__}.{c.__qualname__}" if isinstance(c, type) else c for c in classes]
    found = {}
    for key, value in zip(_CRITERIA, (op, name, module, classes), strict=True):
        names = tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else (value,) if value else ()
        if not all(isinstance(item, str) and item for item in names) or (value is not None and not names):
            raise InputError(f"{kind}({key}={value!r}): expected a name, or several.")
        found[key] = names
    if not any(found.values()):
        raise InputError(f"{kind}() matches nothing: give op=, name=, module= or module_class=.")
    for operator in found["op"]:
        if "*" not in operator:
            check_operator(operator)
    if to is not None and (not isinstance(to, str) or not to):
        raise InputError(f"{kind}(to={to!r}): expected a backend id" + (' or "host".' if kind == "pin" else "."))
    return Rule(kind, **found, to=to, compile_specs=specs, required=required)


class RuledPartitioner(Partitioner):  # type: ignore[misc]
    """A partitioner with rules on top; the first rule that matches an operator decides.

    What is denied or pinned is hidden from the partitioner: it sees an unknown operator instead, and chooses its
    patterns and groups accordingly.
    What is allowed or pinned to a backend joins the neighbouring partitions of that backend where they stay convex.

    Args:
        partitioner: The partitioner, which may be one of ExecuTorch's.
        rules: The rules.
    """

    def __init__(self, partitioner: Partitioner, *rules: Rule) -> None:
        super().__init__()
        if not isinstance(partitioner, Partitioner):
            raise InputError(f"RuledPartitioner: got {partitioner!r}, expected an ExecuTorch Partitioner.")
        for rule in rules:
            if not isinstance(rule, Rule):
                raise InputError(f"RuledPartitioner: got {rule!r}, expected a rule made by allow, deny or pin.")
        self.partitioner = partitioner
        self.rules = rules

    def partition(self, exported_program: ExportedProgram) -> ExplainedResult:
        """Run the partitioner under the rules; InputError if one names what the program does not have."""
        operators = [each for each in graphs.every_node(exported_program.graph_module) if graphs.is_operator(each[1])]
        facts = {node: _facts(path, node) for path, node in operators}
        self._check(facts)
        matched = ((node, next((r for r in self.rules if r.matches(facts[node])), None)) for _, node in operators)
        ruled = {node: rule for node, rule in matched if rule is not None}
        unseen = [node for node, rule in ruled.items() if rule.kind != "allow"]
        run = nested_run.run(self.partitioner, exported_program, unseen)
        rejections = {rejection.node: rejection for rejection in run.rejections}
        for path, node in operators:
            rule = ruled.get(node)
            if rule is not None and rule.to == HOST:
                key, operator = graphs.qualified_name(path, node), graphs.operator_name(node)
                reason = f"denied by the rule {rule}"
                rejections[key] = Rejection("", key, operator, reason, "RuledPartitioner", "denied")
        added = {node: rule for node, rule in ruled.items() if rule.to != HOST and node not in run.tags}
        tags, destinations = _with(exported_program, run, added)
        return nested_run.tagged(exported_program, tags, destinations, rejections.values(), run.adjustments)

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], Callable[[Node], bool] | None]:
        """Ask the partitioner, except about what is hidden from it: that is decomposed."""

        def visible(number: int, node: Node) -> bool:
            # The names of nodes change on the way to Edge dialect, so rules by name do not apply yet.
            facts = _facts((), node)
            rule = next((r for r in self.rules if not r.name and r.matches(facts)), None)
            return rule is None or rule.kind == "allow"

        return nested_run.ask_preserved([self.partitioner], ep, visible)

    def _check(self, facts: Mapping[Node, Facts]) -> None:
        """Check that the program has what the rules name."""
        present: dict[str, dict[str, None]] = {key: {} for key in _CRITERIA}
        for known in facts.values():
            for key in _CRITERIA:
                present[key].update(dict.fromkeys(known[key]))
        for rule in self.rules if facts else ():
            for key in _CRITERIA:
                for wanted in getattr(rule, key):
                    if _any((wanted,), present[key]):
                        continue
                    hint = suggest(wanted, present[key], f" It has: {', '.join(list(present[key])[:8]) or 'none'}.")
                    what = key.replace("op", "operator").replace("name", "node").replace("_", " ")
                    text = f"The rule {rule} names the {what} {wanted!r}, which the program does not have.{hint}"
                    if key != "op" and rule.required:
                        raise InputError(
                            f"{text} Give rules for some methods only to those methods' partitioners, or use "
                            "required=False."
                        )
                    warnings.warn(text, UserWarning, stacklevel=2)


def _facts(path: tuple[str, ...], node: Node) -> Facts:
    operators = [graphs.operator_name(node), *graphs.origins(node)]
    stack = graphs.modules(node)
    return {
        "op": dict.fromkeys(name for operator in operators for name in (operator, operator.rpartition(".")[0])),
        "name": dict.fromkeys((graphs.qualified_name(path, node), node.name)),
        "module": dict.fromkeys(outer for where, _ in stack for outer in accumulate(where.split("."), "{}.{}".format)),
        "module_class": dict.fromkeys(name for _, kind in stack for name in (kind, kind.rpartition(".")[2])),
    }


def _with(
    program: ExportedProgram, run: nested_run.Run, added: dict[Node, Rule]
) -> tuple[dict[Node, str], dict[str, DelegationSpec]]:
    """Add operators to the partitions of a run; a partition of the run is never split."""
    tags, destinations = dict(run.tags), dict(run.destinations)
    if not added:
        return tags, destinations
    specs: dict[str, DelegationSpec] = {_key(spec): spec for spec in destinations.values()}
    chosen = list(specs.values())  # chosen by the partitioner, before the rules add theirs
    label_of_added = {}
    for node, rule in added.items():
        spec = _destination(rule, chosen)
        specs.setdefault(_key(spec), spec)
        label_of_added[node] = _key(spec)
    renamed: dict[str, str] = {}
    for _, module in graphs.walk(program.graph_module):
        nodes = list_computing(module)
        if any(node in added for node in nodes):
            own = {node: _key(destinations[tags[node]]) for node in nodes if node in tags}
            groups: dict[str, list[Node]] = {}
            for node in own:
                groups.setdefault(tags[node], []).append(node)
            extra = {node: label_of_added[node] for node in nodes if node in added}
            try:
                proposals = contract(nodes, {**own, **extra}, groups=groups.values())
            except InputError:  # a tag is not convex: extraction handles that, so leave the tags as they are
                proposals = contract(nodes, extra)
            for proposal in proposals:
                names = list(dict.fromkeys(tags[node] for node in proposal.nodes if node in tags))
                # Rules inside these rules may have used some numbers.
                free = (f"rule_{i}" for i in count(len(destinations)) if f"rule_{i}" not in destinations)
                tag = names[0] if names else next(free)
                destinations.setdefault(tag, specs[proposal.backend])
                renamed.update(dict.fromkeys(names, tag))
                tags.update(dict.fromkeys(proposal.nodes, tag))
    tags = {node: renamed.get(tag, tag) for node, tag in tags.items()}  # constants follow the merged partitions
    written = graphs.written_state(program)
    for constant, spec in graphs.lifted_inputs(program).items():
        reader = next((user for user in constant.users if user in added), None)
        if reader is not None and constant not in tags and spec.target not in written:
            tags[constant] = tags[reader]
    return tags, destinations


def _destination(rule: Rule, known: Sequence[DelegationSpec]) -> DelegationSpec:
    if rule.to is None:
        if len(known) == 1:
            return known[0]
        names = ", ".join(dict.fromkeys(spec.backend_id for spec in known)) or "none"
        raise InputError(
            f"The rule {rule} does not say which backend it means; the partitioner chose {names}. Write to='...'."
        )
    if rule.kind == "pin":
        return DelegationSpec(rule.to, list(rule.compile_specs))
    same = [spec for spec in known if spec.backend_id == rule.to]
    return same[0] if same else DelegationSpec(rule.to, [])


def _key(spec: DelegationSpec) -> str:
    specs = "".join(f" {item.key}={item.value!r}" for item in spec.compile_specs)
    return f"{spec.backend_id}{specs}"


def _any(patterns: Iterable[str], values: Collection[str]) -> bool:
    return any(
        pattern in values or ("*" in pattern and any(fnmatch.fnmatchcase(value, pattern) for value in values))
        for pattern in patterns
    )
