"""Structures of nested values (`torch.utils._pytree.TreeSpec`), read from the JSON of `treespec_dumps`.

torch's own `treespec_loads` imports modules that the text names, and looks up their attributes. Here it gets only texts
that choose from what this process already knows: the types that are registered with pytree, the enumerations that are
defined, and a closed table of default factories.
"""

from __future__ import annotations

import json
import operator
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from enum import Enum
from typing import Any

from exir_lowering._upstream.programs import context_reader, find_registered_type, load_treespec, pytree
from exir_lowering.errors import InputError, ignoring_errors

LARGEST, DEEPEST = 1 << 24, 150
"""The limits of a text: its length, and its nesting depth."""

_PYTHON_TYPES = (bool, bytes, complex, dict, float, frozenset, int, list, object, set, str, tuple)
FACTORIES: Mapping[tuple[str, str], type] = {
    (kind.__module__, kind.__qualname__): kind for kind in (*_PYTHON_TYPES, Counter, OrderedDict, defaultdict, deque)
}
"""The default factories that a `defaultdict` may have: Python types that only make an empty value."""

_BUILT_IN = (tuple, list, dict, OrderedDict, defaultdict, deque, namedtuple)


class UnknownTypeError(InputError):
    """A type that is not registered in this process."""


class ForeignNameError(UnknownTypeError):
    """A name that torch would import: of an enumeration or default factory that this process does not know."""


def writable(spec: Any) -> Any:
    """Return a structure with tuples for types that `treespec_dumps` cannot write, as `torch.return_types.topk`."""
    if spec.is_leaf():
        return spec
    own, kind, context = _flat(spec), tuple, None
    with ignoring_errors():
        pytree.treespec_dumps(own)
        kind, context = own.type, own.context
    return pytree.TreeSpec(kind, context, [writable(child) for child in spec.children()])


def loads(text: str) -> Any:
    """Read what `treespec_dumps` wrote; UnknownTypeError, ForeignNameError for a name to import, or else InputError."""
    try:
        if len(text) > LARGEST:
            raise InputError(f"a structure is a text of at most {LARGEST} characters, got {len(text)}.")
        version, tree = json.loads(text)
        if type(version) is not int:
            raise InputError(f"the version of a structure is a number, got {_show(version)}.")
        _check_names(tree, 0)
        spec = load_treespec(text)
        _check_contexts(spec)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # of any kind: a registered type reads its context itself
        raise InputError(f"a structure cannot be read ({type(error).__name__}: {str(error)[:160]}).") from None
    return spec


def _check_names(node: Any, depth: int) -> None:
    """Refuse what is not known in this process; what else is wrong, torch finds."""
    if depth > DEEPEST:
        raise InputError(f"a structure that is nested more than {DEEPEST} deep.")
    name, context, children = node["type"], node["context"], node["children_spec"]
    if not isinstance(children, list):
        raise InputError(f"the children of a structure are a list, got {_show(children)}.")
    kind = None if name is None else _find_registered(name)
    if kind is namedtuple:
        _find_registered(context)
    elif kind is defaultdict:
        named = (context["default_factory_module"], context["default_factory_name"])
        if named not in FACTORIES:
            known = ", ".join(factory.__qualname__ for factory in FACTORIES.values())
            raise ForeignNameError(f"a defaultdict with the factory {_show('.'.join(named))}; known: {known}.")
    elif kind is not None and context_reader(kind) is None:
        json.loads(context, object_hook=_check_enumerator)
    for child in children:
        _check_names(child, depth + 1)


def _find_registered(name: Any) -> Any:
    """Return the type that is registered under a name."""
    kind = find_registered_type(name) if isinstance(name, str) else None
    if kind is None:
        raise UnknownTypeError(f"{_show(name)} is not registered with torch.utils._pytree.")
    return kind


def _check_enumerator(found: dict[str, Any]) -> Any:
    """Refuse an enumerator, as pytree writes it, whose class is not defined where torch looks for it."""
    if "__enum__" not in found:
        return found
    for kind in enumerations():
        module, named = sys.modules.get(kind.__module__), f"{kind.__module__}:{kind.__qualname__}"
        if found.get("fqn") == named and module and operator.attrgetter(kind.__qualname__)(module) is kind:
            return found
    raise ForeignNameError(f"the enumeration {_show(found.get('fqn'))} is not defined.")


def _check_contexts(spec: Any) -> None:
    """Refuse contexts that do not fit: a value of such a structure has another one."""
    if spec.is_leaf():
        return
    own = _flat(spec)
    if spec.type in _BUILT_IN and pytree.tree_structure(pytree.tree_unflatten([0] * own.num_leaves, own)) != own:
        raise InputError(f"no {spec.type.__name__} of {own.num_leaves} values has the context {_show(spec.context)}.")
    for child in spec.children():
        _check_contexts(child)


def _flat(spec: Any) -> Any:
    """Return a structure with plain values in the place of those that it nests."""
    return pytree.TreeSpec(spec.type, spec.context, [pytree.treespec_leaf() for _ in spec.children()])


def enumerations(kind: type[Enum] = Enum) -> list[type[Enum]]:
    """Return the enumerations that are defined in this process."""
    own = type.__subclasses__(kind)
    return own + [one for child in own for one in enumerations(child)]


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
