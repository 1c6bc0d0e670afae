"""Convert a graph by distinct calls: what is plain is copied, what is not is replaced by the template of its call."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from executorch.exir.program._program import edge_no_decomp_namespace
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.proxy import _COPY_META_FIELDS  # the metadata that a retraced node takes over from the one it is made of

from exir_lowering._upstream.operators import is_built_in, is_composite, is_overload, packet_name
from exir_lowering._upstream.programs import fake_mode_of, lazy_graph_module
from exir_lowering._upstream.value_keys import MEMORY, Memory, NotCoveredError, evaluate, renew, without_program
from exir_lowering.errors import ignoring_errors
from exir_lowering.fast.calls import CallKeys, DistinctCall, place_side_by_side
from exir_lowering.fast.lookups import source_of
from exir_lowering.fast.templates import FROM_TRACING, Template, take_templates
from exir_lowering.graphs.measures import tensors

COPIED_META = ("stack_trace", *_COPY_META_FIELDS)

_BY_DATA = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})  # tracing adds asserts
_ASSERT = torch.ops.aten._assert_scalar.default
_ROUNDS = 12  # how often values may change what later calls look like, before a graph counts as not covered


class Plain(NamedTuple):
    """What becomes of a call of which only the operator changes."""

    target: Any  # the operator that it gets
    same: bool  # whether it returns the same kind of value as before


class Stage(ABC):
    """One step of the conversion, which changes each call by itself."""

    name: ClassVar[str]  # in the history of the nodes that it makes
    gradients: ClassVar[bool]  # whether it runs with gradients, so that results of parameters require one
    decomposes: ClassVar[bool]  # whether it drops unused random operators, and traces elements with their call
    key: Hashable  # what else its results depend on

    @abstractmethod
    def plain(self, node: Node, values: Sequence[Any]) -> Plain | None:
        """Return the operator that a call gets if that is all that changes, None if it has to be converted."""

    @abstractmethod
    def apply(self, graph: Graph) -> GraphModule:
        """Convert a graph of calls side by side, by the code of torch and ExecuTorch that converts whole programs."""

    def continues_history(self, node: Node) -> bool:
        """Return whether what a call becomes has the call's history, rather than the call as its last origin."""
        return True

    def overwrites(self, node: Node) -> bool:
        """Return whether a call overwrites its first operand, unread later; NotCoveredError if it writes another."""
        return False

    def check(self, target: Any) -> None:
        """Raise NotCoveredError for an operator whose calls cannot be converted so."""
        if not is_overload(target):
            raise NotCoveredError(f"{target}")

    def convert(self, calls: Sequence[DistinctCall], *, alone: bool = False) -> list[Template]:
        """Return the templates of calls, that of one `alone` with the sizes it needs."""
        for call in calls:
            self.check(call.node.target)
        return take_templates(calls, self.apply(place_side_by_side(calls)), alone=alone)


def rewrite(graph_module: GraphModule, stage: Stage) -> GraphModule:
    """Return a new graph in which a stage has changed every call; or NotCoveredError."""
    mode = fake_mode_of(graph_module)
    if mode is None:
        raise NotCoveredError("a program without tensors as inputs")
    builder = _Builder(_Planner(graph_module, stage, mode).plan(), stage, mode)
    for node in graph_module.graph.nodes:
        builder.add(node)
    builder.graph.set_codegen(graph_module.graph._codegen)  # it takes its arguments, and returns results, as before
    # Decomposing drops random operators whose results are not used, ExecuTorch's passes keep them.
    builder.graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=not stage.decomposes))
    return lazy_graph_module(builder.root, builder.graph)


@dataclass
class _Plan:
    """What becomes of each call."""

    values: dict[Node, Any] = field(default_factory=dict)  # what each node returns afterwards
    plain: dict[Node, Any] = field(default_factory=dict)  # the operators of calls that are copied
    templates: dict[Node, Template] = field(default_factory=dict)  # those of the other calls
    missing: dict[Hashable, DistinctCall] = field(default_factory=dict)  # those without a template
    alone: dict[Hashable, DistinctCall] = field(default_factory=dict)  # without one that computes the sizes it needs
    sizes: set[Any] = field(default_factory=set)  # those that nodes so far compute
    written: set[Node] = field(default_factory=set)  # those whose values tracing writes in place


class _Planner:
    """Decides what becomes of each call of a graph."""

    def __init__(self, graph_module: GraphModule, stage: Stage, mode: Any) -> None:
        self._graph, self._stage, self._mode = graph_module.graph, stage, mode
        self._keys, self._own = CallKeys(), Memory()
        self._trials: dict[Any, Node] = {}
        self._verdicts: dict[Any, tuple[bool]] = {}
        self._evaluated: dict[Node, tuple[Any, Any]] = {}  # in rounds before: what was found, and its copy

    def plan(self) -> _Plan:
        """Return a plan without missing templates; raise NotCoveredError if there is none."""
        for _ in range(_ROUNDS):
            plan = self._try()
            if not plan.missing and not plan.alone:
                return plan
            self._learn(list(plan.missing.values()))
            for call in plan.alone.values():
                self._own.put(("alone", call.key), *self._stage.convert([call], alone=True))
        raise NotCoveredError("the values of its operators do not settle")

    def _learn(self, calls: Sequence[DistinctCall]) -> None:
        """Convert calls and remember their templates; raise what went wrong if none of them can be converted."""
        try:
            templates = self._stage.convert(calls) if calls else []
        except MemoryError:
            raise
        except Exception:
            # One that fails may rest on guessed values, and not occur.
            if len(calls) == 1 or not sum(self._can_learn(call) for call in calls):
                raise
            return
        for call, template in zip(calls, templates, strict=True):
            self._memory(call).put((self._stage.key, call.key), template if call.local else template.without_program())

    def _can_learn(self, call: DistinctCall) -> bool:
        with ignoring_errors():
            self._learn([call])
            return True
        return False

    def _memory(self, call: DistinctCall) -> Memory:
        return self._own if call.local else MEMORY

    def _try(self) -> _Plan:
        plan, same = _Plan(), set[Node]()
        for node in self._graph.nodes:
            if node.op == "placeholder":
                plan.values[node] = node.meta.get("val")
                same.add(node)
                _check_value(None, plan.values[node])
                if isinstance(plan.values[node], torch.SymInt):
                    plan.sizes.add(plan.values[node].node.expr)
            elif node.op == "call_function":
                self._plan_call(node, plan, same)
            elif node.op == "get_attr":
                raise NotCoveredError("nested graphs")
            elif node.op != "output":
                raise NotCoveredError(f"a node of kind {node.op}")
        return plan

    def _plan_call(self, node: Node, plan: _Plan, same: set[Node]) -> None:
        operands = node.all_input_nodes
        values = [plan.values[operand] for operand in operands]
        if node.target is operator.getitem and operands[0] not in plan.plain:
            plan.values[node] = values[0][node.args[1]]
        else:
            plain = self._stage.plain(node, values)
            if plain is not None and self._holds(node, plain, values):
                plan.plain[node] = plain.target
                plan.values[node] = self._returned(node, plain, values, same.issuperset(operands), plan)
            else:
                plan.values[node] = self._from_template(node, values, plan, plain)
        # torch makes a view of what was written in place anew where it is first read.
        template = plan.templates.get(node)
        for index, operand in enumerate(operands):
            if operand in plan.written and (
                template.views(index) if template else getattr(node.target, "is_view", False)
            ):
                raise NotCoveredError(f"a view of {operand}, which is written where it is computed")
        taken = node.target is operator.getitem
        maker, element = (plan.templates.get(operands[0]), node.args[1]) if taken else (template, 0)
        plan.written.update([node] if maker is not None and element in maker.written else ())
        before, now = node.meta.get("val"), plan.values[node]
        _check_value(node.target, now)
        if isinstance(now, torch.SymInt):
            plan.sizes.add(now.node.expr)
        if now is before or self._keys.value(now)[0] == self._keys.value(before)[0]:
            same.add(node)

    def _holds(self, node: Node, plain: Plain, values: Sequence[Any]) -> bool:
        """Return whether an operator's calls are as plain as the stage says; its first one is converted to find out.

        Not for torch's own operators, whose code is pinned: but composite ones may depend on the stage.
        NotCoveredError for an operand of known content, with which tracing may compute.
        """
        target: Any = node.target
        if isinstance(node.meta.get("val"), torch.SymInt) or not is_overload(target) or target is _ASSERT:
            return True
        if not self._stage.decomposes and any(map(known, tensors(values))):  # decomposing forgets it first
            raise NotCoveredError("a constant whose content is known")
        by_data = _BY_DATA.intersection(target.tags)
        if is_built_in(target) and not is_composite(target) and target._schema.returns and not by_data:
            return True
        # Of what a stage depends on, only composite operators see what is to be decomposed.
        key = ("plain", self._stage.key if is_composite(target) else self._stage.name, target)
        verdict = self._verdicts.get(target, MEMORY.find(key))
        if verdict is None and self._trials.get(target, node) is node:
            call = self._keys.call(node, target, values, node.meta.get("val"))
            if call.local and is_built_in(target):
                return True  # sizes with symbols are common to all calls: one without them can tell
            self._trials[target] = node
            template = self._memory(call).find((self._stage.key, call.key))
            if template is None:
                return False
            verdict = self._verdicts[target] = (template.only_replaces(call, plain.target),)
            if not call.local:
                MEMORY.put(key, verdict)
        return verdict is None or verdict[0]

    def _returned(self, node: Node, plain: Plain, values: Sequence[Any], same: bool, plan: _Plan) -> Any:
        """Return what a plain call returns: what it did before, if nothing has changed that its result depends on."""
        before = node.meta.get("val")
        if before is None or isinstance(before, (torch.SymInt, torch.SymBool)):
            return before
        # Export evaluates composite operators with gradients, which take other ways then.
        reusable = self._stage.gradients or not is_composite(node.target)
        # The stand-ins that keep operators whole may have no rule for fake tensors, which ExecuTorch reports.
        whole = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == edge_no_decomp_namespace
        if same and plain.same and reusable and not whole:
            if not self._stage.gradients:
                return renew(before, self._mode, gradients=False) if _require_gradients(before) else before
            if not any(map(_require_gradients, values)):
                return before
        return self._evaluate(node, plain.target, values, plan)

    def _from_template(self, node: Node, values: Sequence[Any], plan: _Plan, plain: Plain | None) -> Any:
        """Return what the template of a call returns; if there is none yet, a guess."""
        overwrites = self._stage.overwrites(node)
        call = self._keys.call(node, node.target, values, node.meta.get("val"), overwrites=overwrites)
        template: Template | None = self._memory(call).find((self._stage.key, call.key))
        if template is None:
            plan.missing[call.key] = call
            if overwrites:
                return renew(node.meta.get("val"), self._mode, gradients=False)
            return self._evaluate(node, plain.target if plain is not None else node.target, values, plan)
        plan.templates[node] = self._with_sizes(call, template, plan)
        if not template.results:
            return None
        # A result that is an operand has that operand's value.
        renewed = renew(template.values, self._mode)
        several = isinstance(template.results, tuple)
        places, made = (template.results, renewed) if several else ((template.results,), (renewed,))
        given = dict(zip(template.operands, values, strict=True))
        listed = [given.get(place, value) for place, value in zip(places, made, strict=True)]  # type: ignore[arg-type]
        return type(template.values)(listed) if several else listed[0]

    def _with_sizes(self, call: DistinctCall, template: Template, plan: _Plan) -> Template:
        """Return a template that finds the sizes it needs: the first call that needs a size computes it."""
        unknown = template.sizes.keys() - plan.sizes
        if not unknown:
            return template
        found: Template | None = self._own.find(("alone", call.key))
        if found is None:
            plan.alone[call.key] = call
            plan.sizes |= unknown
            return template
        unknown = found.sizes.keys() - plan.sizes
        if unknown:
            raise NotCoveredError(
                f"{call.node.target} needs the size {min(map(str, unknown))}, which nothing computes yet"
            )
        plan.sizes |= found.computed
        return found

    def _evaluate(self, node: Node, target: Any, values: Sequence[Any], plan: _Plan) -> Any:
        """Return what an operator returns for operands, by its own rule for fake tensors."""
        call = self._keys.call(node, target, values, None)
        key = ("value", self._stage.gradients, call.key)
        found = self._memory(call).find(key)
        if found is None:
            found = evaluate(node, target, plan.values.__getitem__, self._mode, gradients=self._stage.gradients)
            found = renew((found,), self._mode) if call.local else (without_program(found),)
            self._memory(call).put(key, found)
        if self._evaluated.get(node, (None,))[0] is not found:
            self._evaluated[node] = found, renew(found, self._mode)[0]
        return self._evaluated[node][1]


def _check_value(target: Any, value: Any) -> None:
    """Raise NotCoveredError for a value that torch may conjugate or negate later, when an operator reads it."""
    if any(tensor.dtype.is_complex for tensor in tensors(value)):
        raise NotCoveredError("complex numbers")
    if target is torch.ops.aten._neg_view.default:
        raise NotCoveredError(f"{target}")


def known(tensor: Any) -> bool:
    """Return whether the content of a fake tensor is known."""
    return getattr(tensor, "constant", None) is not None


def _require_gradients(value: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors(value))


class _Builder:
    """Makes the new graph."""

    def __init__(self, plan: _Plan, stage: Stage, mode: Any) -> None:
        self.graph = Graph()
        self.root: dict[str, Any] = {}
        self._plan, self._stage, self._mode = plan, stage, mode
        self._env: dict[Node, Any] = {}
        self._sizes: dict[Any, Node] = {}

    def add(self, node: Node) -> None:
        """Add what becomes of a node."""
        if node.op in ("placeholder", "output"):
            copied = self._env[node] = self.graph.node_copy(node, self._env.__getitem__)
            copied.meta = dict(node.meta)
            if node.op == "placeholder" and "val" in node.meta:
                self._set_value(copied, node.meta["val"])
        elif node in self._plan.plain:
            target = self._plan.plain[node]
            args, kwargs = map_arg((node.args, dict(node.kwargs)), self._env.__getitem__)
            name = packet_name(target)
            copied = self.graph.create_node("call_function", target, tuple(args), dict(kwargs), name=name)
            copied.meta = self._history(node)
            self._set_value(copied, self._plan.values[node])
            self._env[node] = copied
        elif node in self._plan.templates:
            self._env[node] = self._inline(node, self._plan.templates[node])
        else:
            source, index = node.args
            self._env[node] = self._env[source][index]  # type: ignore[index]

    def _set_value(self, copied: Node, value: Any) -> None:
        """Describe a node as tracing leaves it: it forgets the content of inputs."""
        if self._stage.decomposes and any(map(known, tensors(value))):
            value = renew(value, self._mode)
            for one in tensors(value):
                one.constant = None  # type: ignore[attr-defined]
        copied.meta["val"] = value
        if isinstance(value, torch.SymInt):
            self._sizes.setdefault(value.node.expr, copied)

    def _inline(self, node: Node, template: Template) -> Any:
        env: dict[Any, Any] = {place: self._sizes[size] for size, place in template.sizes.items()}
        env.update(zip(template.operands, map(self._env.__getitem__, node.all_input_nodes), strict=True))
        history = self._history(node)
        for part in template.nodes:
            value = part.meta.get("val")
            size = value.node.expr if isinstance(value, torch.SymInt) else None
            if size in self._sizes:
                env[part] = self._sizes[size]
                continue
            if part.op == "get_attr":
                name = f"_tensor_constant{len(self.root)}"
                self.root[name] = template.constants[part].clone()
                made = self.graph.create_node("get_attr", name, (), {})
            else:
                args, kwargs = map_arg((part.args, part.kwargs), env.__getitem__)
                made = self.graph.create_node("call_function", part.target, args, kwargs, name=packet_name(part.target))
                made.meta = {**{name: part.meta[name] for name in FROM_TRACING if name in part.meta}, **history}
            env[part] = made
            made.meta["val"] = renew(value, self._mode)
            if size is not None:
                self._sizes[size] = made
        results = template.results
        return [env.get(result) for result in results] if isinstance(results, tuple) else env[results]

    def _history(self, node: Node) -> dict[str, Any]:
        """Return the metadata that what a node becomes takes over from it."""
        if self._stage.decomposes and node.target is operator.getitem:
            node = node.args[0]  # type: ignore[assignment]  # tracing takes the elements when it traces the call
        meta = {name: node.meta[name] for name in COPIED_META if name in node.meta}
        if "from_node" not in meta or not self._stage.continues_history(node):
            meta["from_node"] = [source_of(node, self._stage.name)]
        return meta
