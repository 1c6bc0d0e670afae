"""What a plan advises: changes of the model or the call that were tried on a copy; no backend is called."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.fakes import FakeTensor, known_size, linear_in, size_hint
from exir_lowering._upstream.programs import pytree
from exir_lowering.errors import exception_text, few
from exir_lowering.graphs import sources
from exir_lowering.graphs.copies import private_copy, specialise_program
from exir_lowering.model import EdgeMethod
from exir_lowering.plans.formatting import many, place
from exir_lowering.plans.planned import MethodPlan
from exir_lowering.plugins import registry

Attempt = Callable[[EdgeMethod, Mapping[str, str]], MethodPlan]
"""Plans a method, with what is assumed of its inputs if that is anything."""

_ASSUMED = re.compile(r'assume=\{"(.+?)": "(\w+)"\}')
_LOG = logging.getLogger(__name__)
_OTHERS = (torch.bfloat16, torch.float64)  # types that backends for float32 refuse


def advise(given: EdgeMethod, method: EdgeMethod, planned: MethodPlan, attempt: Attempt) -> tuple[str, ...]:
    """Return the changes of a method, not yet rewritten, with which less is on the host, and what the plan is then."""
    found = list[str]()

    def attempted(what: str, changed: EdgeMethod, assume: Mapping[str, str]) -> MethodPlan | None:
        """Try a change; return its plan if it does not help."""
        tried, now = attempt(changed, assume), (len(planned.host), len(planned.partitions))
        if (len(tried.host), len(tried.partitions)) >= now:
            return tried
        left = {node.node for node in tried.host} | {one.node for one in planned.host if "sym_size" in one.operator}
        lines = dict.fromkeys(place(one.source).short for one in planned.host if one.node not in left and one.source)
        where = f" ({few(lines, 3)})" if lines else ""
        gain = f"{many(len(tried.host), 'operator')} on the host, {many(len(tried.partitions), 'partition')}"
        found.append(f"{what}: {gain}, instead of {now[0]:,} and {now[1]:,}{where}")
        return None

    with _attempting():
        words, assumed, last = dict[str, None](), dict[str, str](), planned if planned.host else None
        while last is not None:  # one assumption may lead to the next
            refused = [(one.advice, _ASSUMED.search(one.advice)) for one in last.refused_rewrites]
            new = [(advice, match) for advice, match in refused if match and match[1] not in assumed]
            words.update(dict.fromkeys(advice for advice, _ in new))
            assumed.update((match[1], match[2]) for _, match in new)
            last = attempted(" and ".join(words), given, assumed) if new else None
    for what, change in _changes(method, planned) if planned.host else ():
        with _attempting():
            attempted(what, change(method), {})
    return tuple(found)


@contextmanager
def _attempting() -> Iterator[None]:
    """Give no advice where a change cannot be tried: torch may not take what was made of the program."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        _LOG.debug("A change could not be tried: %s", exception_text(error))


def _changes(method: EdgeMethod, planned: MethodPlan) -> Iterator[tuple[str, Callable[[EdgeMethod], EdgeMethod]]]:
    names = {one.node for one in planned.host} | {one.node for one in planned.legalized}
    host = [node for path, node in graphs.every_node(method.program.graph_module) if node.name in names and not path]
    read = pytree.tree_leaves([one.meta.get("val") for node in host for one in (node, *node.all_input_nodes)])
    values = [value for value in read if isinstance(value, FakeTensor)]
    dtypes = {value.dtype for value in values}
    if not method.partitioners:
        yield 'give a partitioner, "xnnpack"', _with_xnnpack
    elif not dtypes.isdisjoint(_OTHERS):
        yield "export it in float32, after model.float()", _in_float32
    if torch.bfloat16 in dtypes and planned.partitioners == ("XnnpackPartitioner",):
        yield "give xnnpack(enable_bf16=True), for a runtime that has it", partial(_with_xnnpack, enable_bf16=True)
    dynamic = [known_size(size) for value in values for size in value.shape if not isinstance(size, int)]
    if method.partitioners and dynamic and None not in dynamic:  # which depends on data
        yield "lower it for fixed sizes, with exir_lowering.buckets", _with_fixed_sizes
    if method.partitioners and (views := {node.name for node in host if _has_a_size(node)}):
        yield "write -1 for the dynamic size of a view", partial(_with_unknown_size, views=views)


def _with_xnnpack(method: EdgeMethod, **options: bool) -> EdgeMethod:
    return replace(method, partitioners=(registry.load(registry.PARTITIONERS, "xnnpack")(**options),))


def _with_unknown_size(method: EdgeMethod, views: Collection[str]) -> EdgeMethod:
    program = private_copy(method.program)
    for node in (node for node in program.graph.nodes if node.name in views):
        shape: Any = node.args[1]
        node.update_arg(1, [-1 if isinstance(size, Node) else size for size in shape])
    return replace(method, program=program)


def _with_fixed_sizes(method: EdgeMethod) -> EdgeMethod:
    """Return a method as it is for the sizes of the example."""
    given = [node.meta.get("val") for node in graphs.user_inputs(method.program)]
    sizes = [size for one in given for size in (one.shape if isinstance(one, torch.Tensor) else ())]
    linear = [(linear_in(size), size_hint(size)) for size in sizes if not isinstance(size, int)]
    numbers = {one[0]: (hint - one[2]) // one[1] for one, hint in linear if one is not None}
    return replace(method, program=specialise_program(method.program, numbers))


def _has_a_size(node: Node) -> bool:
    """Return whether the model's author wrote a view with one size in its shape that is not known."""
    shape: Any = node.args[1] if graphs.operator_name(node) == "aten.view_copy.default" else ()
    frames = sources.stack(node)
    return sum(isinstance(size, Node) for size in shape) == 1 and sources.find_innermost(frames) == len(frames) - 1


def _in_float32(method: EdgeMethod) -> EdgeMethod:
    """Return a method as partitioners see it: with values of other types, and weights without content."""
    program = private_copy(method.program)
    for _, node in graphs.every_node(program.graph_module):
        change: Any = lambda value: value.float() if value.dtype in _OTHERS else value  # noqa: E731
        node.meta["val"] = pytree.tree_map_only(FakeTensor, change, node.meta.get("val"))
        if node.kwargs.get("dtype") in _OTHERS:
            node.update_kwarg("dtype", torch.float32)
    for name, value in program.state_dict.items():
        if value.dtype in _OTHERS:
            program.state_dict[name] = torch.empty_like(value, dtype=torch.float32)  # of which no page is touched
    return replace(method, program=program)
