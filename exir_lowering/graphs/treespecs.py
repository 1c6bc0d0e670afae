"""Structures of nested values (`torch.utils._pytree.TreeSpec`), read from the JSON of `treespec_dumps`.

torch's own `treespec_loads` imports modules that the text names, and looks up their attributes. Here, a text can only
choose from what this process already knows: the types that are registered with pytree, the enumerations that are
defined, and a closed table of default factories. Nothing is imported, and no attribute is looked up by a name from the
text.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

from exir_lowering._upstream.programs import (
    context_reader,
    find_registered_type,
    namedtuple_context,
    namedtuple_fields,
    pytree,
)
from exir_lowering.errors import InputError

PROTOCOL = 1
LARGEST, DEEPEST, MOST = 1 << 24, 150, 250_000
"""The limits of a text: its length, its nesting depth, and the number of its nodes."""

_PYTHON_TYPES = (bool, bytes, complex, dict, float, frozenset, int, list, object, set, str, tuple)
FACTORIES: Mapping[tuple[str, str], type] = {
    (kind.__module__, kind.__qualname__): kind for kind in (*_PYTHON_TYPES, Counter, OrderedDict, defaultdict, deque)
}
"""The default factories that a `defaultdict` may have: Python types that only make an empty value."""

_KEYS = (str, bool, int, float, type(None), Enum)
_FACTORY_FIELDS = {"default_factory_module", "default_factory_name", "dict_context"}


class UnknownTypeError(InputError):
    """A type that is not registered in this process."""


class ForeignNameError(UnknownTypeError):
    """A name that torch would import: of an enumeration or default factory that this process does not know."""


def writable(spec: Any) -> Any:
    """Return a structure with tuples for types that `treespec_dumps` cannot write, as `torch.return_types.topk`."""
    if spec.is_leaf():
        return spec
    own = pytree.TreeSpec(spec.type, spec.context, [pytree.treespec_leaf() for _ in spec.children()])
    try:
        pytree.treespec_dumps(own)
    except MemoryError:
        raise
    except Exception:
        own = pytree.TreeSpec(tuple, None, own.children())
    return pytree.TreeSpec(own.type, own.context, [writable(child) for child in spec.children()])


def loads(text: str) -> Any:
    """Read what `treespec_dumps` wrote; UnknownTypeError, ForeignNameError for a name to import, or else InputError."""
    if not isinstance(text, str) or len(text) > LARGEST:
        raise InputError(f"a structure is a text of at most {LARGEST} characters, got {_show(text)}.")
    tree = _json(text)
    if not isinstance(tree, list) or len(tree) != 2 or type(tree[0]) is not int:
        raise InputError(f"a structure is [{PROTOCOL}, tree], got {_show(tree)}.")
    if tree[0] != PROTOCOL:
        raise InputError(f"a structure of version {tree[0]}; this exir-lowering reads version {PROTOCOL}.")
    return _read(tree[1], 0, itertools.count(1))


def _read(node: Any, depth: int, nodes_so_far: Iterator[int]) -> Any:
    if depth > DEEPEST or next(nodes_so_far) > MOST:
        raise InputError(f"a structure of more than {MOST} values, or that is nested more than {DEEPEST} deep.")
    if not isinstance(node, dict) or set(node) != {"type", "context", "children_spec"}:
        raise InputError(f"a part of a structure has a type, a context and children_spec, got {_show(node)}.")
    name, context, children = node["type"], node["context"], node["children_spec"]
    if not isinstance(children, list):
        raise InputError(f"the children of a structure are a list, got {_show(children)}.")
    if name is None:
        if context is not None or children:
            raise InputError("a value of a structure has neither context nor children.")
        return pytree.treespec_leaf()
    kind = _find_registered(name)
    own = _context(kind, context, len(children))
    return pytree.TreeSpec(kind, own, [_read(child, depth + 1, nodes_so_far) for child in children])


def _find_registered(name: Any) -> Any:
    """Return the type that is registered under a name."""
    kind = find_registered_type(name) if isinstance(name, str) else None
    if kind is None:
        raise UnknownTypeError(f"{_show(name)} is not registered with torch.utils._pytree.")
    return kind


def _context(kind: Any, context: Any, children: int) -> Any:
    """Return the context of a node, which describes it further than its type and children."""
    own = _CONTEXTS.get(kind)
    if own is not None:
        return own(context, children)
    made = context_reader(kind)
    if made is namedtuple_context:
        return _named_tuple(context, children)
    try:
        # A function that this process registered for the type.
        return _plain(context) if made is None else made(context)
    except (InputError, MemoryError):
        raise
    except Exception as error:
        raise InputError(
            f"the context of a {kind.__module__}.{kind.__qualname__} cannot be read: {type(error).__name__}: {error}"
        ) from error


def _plain(context: Any) -> Any:
    """Return a context that is a str of JSON."""
    if not isinstance(context, str):
        raise InputError(f"a context is JSON in a str, got {_show(context)}.")
    return _with_enums(_json(context), 0)


def _nothing(context: Any, children: int) -> None:
    if _plain(context) is not None:
        raise InputError(f"a list or tuple has no context, got {_show(context)}.")


def _check_keys(keys: Any, children: int) -> list[Any]:
    if not isinstance(keys, list) or not all(isinstance(key, _KEYS) for key in keys):
        raise InputError(f"the keys of a dict are a list of str, numbers, None and enumerators, got {_show(keys)}.")
    if len(keys) != children or len(set(keys)) != children:
        raise InputError(f"a dict of {children} values has the keys {_show(keys)}.")
    return keys


def _default_dict(context: Any, children: int) -> list[Any]:
    if not isinstance(context, dict) or set(context) != _FACTORY_FIELDS:
        raise InputError(f"the context of a defaultdict has {sorted(_FACTORY_FIELDS)}, got {_show(context)}.")
    named = (context["default_factory_module"], context["default_factory_name"])
    factory = FACTORIES.get(named) if all(isinstance(part, str) for part in named) else None
    if factory is None:
        known = ", ".join(kind.__qualname__ for kind in FACTORIES.values())
        raise ForeignNameError(f"a defaultdict with the factory {_show('.'.join(map(str, named)))}; known: {known}.")
    return [factory, _check_keys(_with_enums(context["dict_context"], 0), children)]


def _named_tuple(context: Any, children: int) -> Any:
    kind = _find_registered(context)
    fields = namedtuple_fields(kind)
    if fields is None:
        raise InputError(f"{_show(context)} is not a named tuple.")
    if len(fields) != children:
        raise InputError(f"{_show(context)} has the fields {fields}, and {children} values.")
    return kind


def _deque(context: Any, children: int) -> int | None:
    size = _plain(context)
    if size is not None and (type(size) is not int or not children <= size <= sys.maxsize):
        raise InputError(f"a deque of {children} values has the maximal length {_show(size)}.")
    return size


_CONTEXTS: Mapping[Any, Callable[[Any, int], Any]] = {
    **dict.fromkeys((tuple, list), _nothing),
    **dict.fromkeys((dict, OrderedDict), lambda context, children: _check_keys(_plain(context), children)),
    defaultdict: _default_dict,
    deque: _deque,
    namedtuple: _named_tuple,
}


def _with_enums(value: Any, depth: int) -> Any:
    """Replace the objects as which pytree writes enumerators by the enumerators."""
    if depth > DEEPEST:
        raise InputError(f"a context that is nested more than {DEEPEST} deep.")
    if isinstance(value, list):
        return [_with_enums(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if "__enum__" not in value:
        return {key: _with_enums(item, depth + 1) for key, item in value.items()}
    if set(value) != {"__enum__", "fqn", "name"}:  # torch reads what else it has
        raise ForeignNameError(f"an enumerator with {', '.join(sorted(value))[:80]}.")
    return _enumerator(value["fqn"], value["name"])


def _enumerator(kind: Any, name: Any) -> Enum:
    """Return a member of an enumeration of this process, of two with one name the later: a module was reloaded."""
    for one in reversed(enumerations()):
        if isinstance(kind, str) and f"{one.__module__}:{one.__qualname__}" == kind:
            found = one.__members__.get(name) if isinstance(name, str) else None
            if found is None:
                raise InputError(f"the enumeration {_show(kind)} has no {_show(name)}.")
            return found
    raise ForeignNameError(f"the enumeration {_show(kind)} is not defined.")


def enumerations(kind: type[Enum] = Enum) -> list[type[Enum]]:
    """Return the enumerations that are defined in this process."""
    own = type.__subclasses__(kind)
    return own + [one for child in own for one in enumerations(child)]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"a structure is not JSON ({type(error).__name__}: {error}).") from None


def _show(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
