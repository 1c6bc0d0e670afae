"""Look-ups of torch and ExecuTorch that are repeated for each node, tensor or operator, remembered.

Functions return what replaces one of them; what is imported in them has names that may be gone in another version.
"""

from __future__ import annotations

import os
import threading
import typing
from collections.abc import Container, Mapping
from functools import lru_cache
from typing import Any, get_type_hints

import torch
import torch._ops
from torch._subclasses import fake_impls
from torch.export import ExportGraphSignature, graph_signature

# It has the class that describes where a node came from, which copies the description that the other node has.
from torch.fx import traceback

from exir_lowering._upstream.tracing import set_rule
from exir_lowering.fast import current

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def histories() -> list[tuple[Any, str, Any]]:
    """Make histories of nodes refer to earlier ones, which never change, instead of copying them whole."""
    copying = traceback.NodeSource.__init__

    def sharing(self: Any, node: Any, *args: Any, **kwargs: Any) -> None:
        earlier = node.meta.get("from_node") if node and current() is not None else None
        if not earlier or type(earlier) is not list:
            copying(self, node, *args, **kwargs)
            return
        node.meta["from_node"] = []  # what there is to copy
        try:
            copying(self, node, *args, **kwargs)
        finally:
            node.meta["from_node"] = earlier
        self.from_node = list(earlier)

    return [(traceback.NodeSource, "__init__", sharing)]


def source_of(node: Any, step: str) -> traceback.NodeSource:
    """Return the origin of a node made from another one; it shares the older history, which torch copies for each."""
    source = traceback.NodeSource(None, step, traceback.NodeSourceAction.CREATE)
    source.node_info = traceback.NodeSource.NodeInfo(node.name, _text_of(node.target), id(node.graph))
    source.from_node = list(node.meta.get("from_node", ()))
    return source


@lru_cache(maxsize=4096)
def _text_of(target: Any) -> str:
    return str(target)


def dim_orders() -> list[tuple[Any, str, Any]]:
    """Remember orders of dimensions, for which a class is defined at each call, and the annotations of classes."""
    # The first one is imported by name in the other modules; `_dataclass` writes JSON for flatc.
    from executorch.exir import tensor, tensor_layout
    from executorch.exir._serialize import _dataclass
    from executorch.exir.emit import _emitter
    from executorch.exir.passes import replace_view_copy_with_view_pass

    def hints(kind: Any, *args: Any, **kwargs: Any) -> Any:
        work = current()
        if work is None or args or kwargs or not isinstance(kind, type):
            return get_type_hints(kind, *args, **kwargs)
        if kind not in work.hints:
            work.hints[kind] = get_type_hints(kind)
        return work.hints[kind]

    users = (tensor, tensor_layout, _emitter, replace_view_copy_with_view_pass)
    name = "dim_order_from_stride"
    return [
        *((module, name, _remembering_orders(getattr(module, name))) for module in users),
        (_dataclass, "get_type_hints", hints),
    ]


def _remembering_orders(order_of: Any) -> Any:
    """Return what asks a function, whoever has put it there, once for the same numbers."""
    remembered = lru_cache(maxsize=4096)(order_of)

    def dim_order_from_stride(stride: Any) -> Any:
        known = current() is not None and type(stride) is tuple and all(type(step) is int for step in stride)
        return remembered(stride) if known else order_of(stride)

    return dim_order_from_stride


_TABLES = (
    *("inputs_to_parameters", "inputs_to_buffers", "inputs_to_lifted_tensor_constants", "buffers_to_mutate"),
    *("parameters", "buffers", "lifted_tensor_constants", "user_inputs"),
)
# The classes of what the tables are made from: their objects can be changed.
_SPECS = ("InputSpec", "OutputSpec", "TensorArgument", "SymIntArgument", "SymFloatArgument", "SymBoolArgument")
_MOST = 1000  # how many tables are kept at most


class _Changes:
    """When anything in a signature was last changed: another object each time."""

    last: object = object()


def signature_tables() -> list[tuple[Any, str, Any]]:
    """Remember tables of signatures, until the lists of one are replaced, or anything in any signature has changed."""

    def noticing(assign: Any) -> Any:
        def assigned(self: Any, name: str, value: Any) -> None:
            assign(self, name, value)
            _Changes.last = object()

        return assigned

    specs = [getattr(graph_signature, name) for name in _SPECS]
    tables = [(ExportGraphSignature, name, _remembering(name)) for name in _TABLES]
    return [*((kind, "__setattr__", noticing(kind.__setattr__)) for kind in specs), *tables]


def _remembering(name: str) -> property:
    make = vars(ExportGraphSignature)[name].fget

    def table(self: ExportGraphSignature) -> Any:
        work = current()
        if work is None:
            return make(self)
        key, changes = (id(self), name), _Changes.last
        known = work.tables.get(key)
        if known is not None and known[1] is changes and known[2] == self.input_specs and known[3] == self.output_specs:
            return known[4]
        made = make(self)
        if len(work.tables) >= _MOST:
            work.tables.clear()
        # It keeps the signature, so that no other has its identity.
        work.tables[key] = (self, changes, list(self.input_specs), list(self.output_specs), made)
        return made

    return property(table)


class _Collected:
    """The composite operators, and what they were found in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: tuple[Any, set[Any]] | None = None
        self._packets: tuple[Any, list[Any]] = (None, [])
        self._operators: tuple[int, list[Any]] = (-1, [])
        self._preservable: dict[Any, bool] = {}  # what torch says of operators
        self._thread: int | None = None  # the one that collects
        self._asked = False  # whether it has asked the dispatcher

    def collect(self, collect: Any) -> set[Any]:
        """Return a copy of the operators that are found, which are those found before if nothing was registered."""
        with self._lock:
            state = self._state()
            if self._found is None or self._found[0] != state:
                self._thread, self._asked = threading.get_ident(), False
                try:
                    found = collect()
                finally:
                    self._thread = None
                self._found = (self._state(), found)  # collecting gives torch.ops names for what it finds
                self._preservable = {}
            return set(self._found[1])

    def is_preservable(self, operator: Any, ask: Any) -> bool:
        """Return whether torch can keep an operator whole; it asks for each in a table, after it has collected them."""
        known = self._preservable
        if operator not in known:
            known[operator] = ask(operator)
        return known[operator]

    def materialize(self, materialize: Any) -> None:
        """Give torch.ops names for what the dispatcher has; once in a collection, which asks for each namespace."""
        if self._thread != threading.get_ident():
            materialize()
        elif not self._asked:
            materialize()
            self._asked = True

    def _state(self) -> Any:
        """Return what the answer depends on: the kernels of the dispatcher, and those in Python."""
        registered = tuple(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
        spaces = [(name, getattr(torch.ops, name, None)) for name in torch.ops._dir]
        # An operator may be another one of the same name; those that were found stay alive, so that none has its id.
        names = tuple(
            (name, tuple(getattr(space, "_dir", ())), tuple(map(id, vars(space).values())) if space is not None else ())
            for name, space in spaces
        )
        if self._packets[0] != names:
            found = (getattr(getattr(torch.ops, space), name) for space, known, _ in names for name in known)
            self._packets = (names, [packet for packet in found if isinstance(packet, torch._ops.OpOverloadPacket)])
            self._operators = (-1, [])
        overloads = sum(len(packet._overload_names) for packet in self._packets[1])
        if self._operators[0] != overloads:
            self._operators = (overloads, [each for packet in self._packets[1] for each in packet.op_overloads()])
        in_python = tuple(id(each) for each in self._operators[1] if _COMPOSITE in each.py_kernels)
        return registered, names, overloads, in_python


_COLLECTED = _Collected()
os.register_at_fork(after_in_child=lambda: setattr(_COLLECTED, "_lock", threading.Lock()))


def composites() -> list[tuple[Any, str, Any]]:
    """Remember torch's composite operators, for all threads, and what is made anew for each conversion or kernel.

    torch asks its dispatcher for those of all namespaces, for each namespace, five times in each conversion to Edge
    dialect, and for each operator of a table whether it is one. It rebuilds the type of an annotation for each kernel
    that a conversion replaces, and empty states of random numbers: half of the time of a small conversion.
    """
    # It collects the operators with CompositeImplicitAutograd kernels; the other modules import it by name.
    from torch._decomp.decompositions_for_rng import PhiloxState
    from torch._export import utils
    from torch.export import decomp_utils, exported_program

    collect, materialize = utils._collect_all_valid_cia_ops, utils._materialize_cpp_cia_ops
    is_preservable = utils._is_preservable_cia_op
    with torch._C._DisableTorchDispatch():  # of no mode, which it would keep alive
        empty = torch.empty(0)

    def remembered() -> set[Any]:
        return _COLLECTED.collect(collect)

    def reset(self: Any) -> None:
        self.seed = self.base_offset = empty  # others take its place before anything reads them
        self.relative_offset, self.offset_advanced_at_least_once = 0, False

    return [
        *((module, collect.__name__, remembered) for module in (utils, decomp_utils, exported_program)),
        (utils, "_materialize_cpp_cia_ops", lambda: _COLLECTED.materialize(materialize)),
        (exported_program, is_preservable.__name__, lambda op: _COLLECTED.is_preservable(op, is_preservable)),
        (PhiloxState, "reset", reset),
        (torch._ops, "Callable", typing.Callable),
    ]


# By composite operator: its kernels and its rule before, and what conversions put there: 20 kernels for each of 550.
_KERNELS: dict[Any, tuple[dict[Any, Any], Any, dict[Any, Any], Any]] = {}


def reuse_kernels(before: Any, operators: Mapping[Any, Any]) -> dict[Any, Any]:
    """Put the kernels that were put before into operators that are as they were then; return the other ones."""
    others = {}
    for operator, decomposition in operators.items():
        known = _KERNELS.get(operator)
        if known is None or known[0] != operator.py_kernels or known[1] is not before.rules.get(operator):
            others[operator] = decomposition
            continue
        operator.py_kernels.update({**known[2], _COMPOSITE: decomposition})
        operator._dispatch_cache.clear()
        set_rule(operator, known[3])
    return others


def remember_kernels(before: Any, operators: Container[Any]) -> None:
    """Remember what was put into operators, but for the decompositions, which come with each conversion."""
    for operator, table in before.tables:
        if operator in operators:
            made = {**operator.py_kernels, _COMPOSITE: None}
            rule = fake_impls.op_implementations_dict.get(operator)
            _KERNELS[operator] = (table, before.rules.get(operator), made, rule)
