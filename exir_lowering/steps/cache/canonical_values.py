"""Values in a canonical form: equal text means equal content, in any process."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.fx import Node

from exir_lowering._upstream.fakes import FakeTensor, constant_of, describe_symbols, symbols_of
from exir_lowering._upstream.likeness import PLAIN, SYMBOLS, form_of
from exir_lowering._upstream.operators import identify_operator
from exir_lowering._upstream.tensors import is_readable
from exir_lowering.graphs.checksums import hash_storage
from exir_lowering.steps.cache.keys import NoKeyError


class Storages:
    """The digests of the memory of tensors, each storage once."""

    def __init__(self) -> None:
        self._digests: dict[int, tuple[Any, str]] = {}  # with the storage, so that its address is not reused

    def hash(self, tensor: torch.Tensor) -> str:
        """Return the digest of a tensor's whole storage: backends read beyond a view's elements."""
        storage = tensor.untyped_storage()
        found = self._digests.get(storage.data_ptr())
        if found is None or found[0].nbytes() != storage.nbytes():
            found = storage, hash_storage(storage)
            self._digests[storage.data_ptr()] = found
        return found[1]


class Forms:
    """Writes values of one program in canonical form; unless `named`, names stand for the order of first occurrence."""

    def __init__(self, storages: Storages, *, named: bool) -> None:
        self.nodes: dict[Node, int] = {}
        self._storages, self._named = storages, named
        self._names: dict[str, int] = {}
        self._tensors: dict[int, int] = {}
        self._memories: dict[int, int] = {}
        self._classes: dict[type, str] = {}
        self._sources: dict[int, tuple[Any, str]] = {}
        self._graphs: dict[Any, int] = {}
        self._special: dict[str, Callable[[Any], str]] = {
            "nn_module_stack": self._modules,
            "source_fn_stack": lambda stack: ";".join(map(self._function, stack)),
            "torch_fn": self._function,
            "from_node": self._history,
        }
        self._environments: dict[int, tuple[Any, dict[str, Any]]] = {}

    def name(self, text: str) -> str:
        """Return a name's form: which names are equal shows in any case."""
        return repr(text) if self._named else f"#{self._names.setdefault(text, len(self._names))}"

    def form(self, value: Any) -> str:
        """Return a value's form; raise NoKeyError if it has none."""
        kind = type(value)
        simple = _SIMPLE.get(kind)
        if simple is not None:
            return simple(value)
        if isinstance(value, Node):
            if value not in self.nodes:
                raise NoKeyError(f"the node {value.name!r} is not an earlier one of the program")
            return f"%{self.nodes[value]}"
        if isinstance(value, (list, tuple)):
            mark = "L" if isinstance(value, list) else "T" if kind is tuple else self._class(kind)
            return f"{mark}({','.join(map(self.form, value))})"
        if isinstance(value, Mapping):
            return f"D({','.join(f'{self.form(key)}:{self.form(content)}' for key, content in value.items())})"
        if isinstance(value, (set, frozenset)):
            return f"S({','.join(sorted(map(self.form, value)))})"
        if isinstance(value, PLAIN):
            return str(value)
        if isinstance(value, SYMBOLS):
            return f"{kind.__name__}:{self._symbolic(value)}"
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        return self._rare(value)

    def _rare(self, value: Any) -> str:
        if isinstance(value, slice):
            return f"slice({self.form(value.start)},{self.form(value.stop)},{self.form(value.step)})"
        if isinstance(value, enum.Enum):
            return f"{self._class(type(value))}.{value.name}"
        if isinstance(value, type):
            return self._class(value)
        if is_dataclass(value):
            content = ",".join(self.form(getattr(value, field.name)) for field in fields(value))
            return f"{self._class(type(value))}({content})"
        operator = identify_operator(value)
        if operator is not None:
            return f"op:{operator}"
        raise NoKeyError(f"a value of type {type(value).__module__}.{type(value).__qualname__} has no canonical form")

    def _class(self, kind: type) -> str:
        """Return the form of a class: its name and those of its bases."""
        if kind not in self._classes:
            names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
            self._classes[kind] = f"class:{names!r}"
        return self._classes[kind]

    def tensor(self, value: torch.Tensor) -> str:
        """Return the form of a tensor; a fake one's describes it, another one's has its content too."""
        if value.layout is not torch.strided:
            raise NoKeyError(f"a tensor has the layout {value.layout}")
        facts = (*form_of(value, self._number), isinstance(value, torch.nn.Parameter))
        if type(value) is FakeTensor:
            constant = constant_of(value)
            return f"fake:{facts}" if constant is None else f"fake:{facts}={self.tensor(constant)}"
        return f"tensor:{facts}={self._content(value)}"

    def _content(self, tensor: torch.Tensor) -> str:
        """Return the form of a tensor's memory, and which tensors of the program are the same or share memory."""
        if not is_readable(tensor) or tensor.is_quantized:
            raise NoKeyError(f"the memory of a {type(tensor).__name__} on {tensor.device} cannot be read")
        same = self._tensors.setdefault(id(tensor), len(self._tensors))
        memory = self._memories.setdefault(tensor.untyped_storage().data_ptr(), len(self._memories))
        return f"{same}@{memory}:{self._storages.hash(tensor)}"

    def _number(self, value: Any) -> str:
        return str(value) if type(value) is int else self._symbolic(value)

    def _symbolic(self, value: Any) -> str:
        """Return the form of a symbolic number, and remember its symbols."""
        environment = value.node.shape_env
        if environment is not None:
            self._environments.setdefault(id(environment), (environment, {}))[1].update(symbols_of(value))
        return str(value.node.expr)

    def symbols(self) -> list[str]:
        """Return what is known about the symbols of the values that were written so far."""
        found = self._environments.values()
        return [line for environment, symbols in found for line in describe_symbols(environment, symbols)]

    def metadata(self, key: str, value: Any) -> str:
        """Return the form of an entry of `node.meta`, where names are known as such; NoKeyError if it has none."""
        special = self._special.get(key)
        try:
            return special(value) if special is not None else self.form(value)
        except NoKeyError as error:
            raise NoKeyError(f"node.meta[{key!r}]: {error}") from None
        except (TypeError, ValueError, AttributeError) as error:  # not what torch puts there
            raise NoKeyError(f"node.meta[{key!r}] is not what torch writes: {error}") from None

    def _modules(self, stack: Mapping[str, Any]) -> str:
        return ";".join(
            f"{self.name(key)},{self.name(path)},{self._named_class(kind)}" for key, (path, kind) in stack.items()
        )

    def _named_class(self, kind: Any) -> str:
        """Return the form of a class in metadata by its name alone, as torch.export writes it."""
        return self.form(f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else kind)

    def _function(self, pair: Any) -> str:
        name, function = pair
        return f"{self.name(name)},{self._named_class(function)}"

    def _history(self, sources: Any) -> str:
        """Return the form of torch's `NodeSource`s; their graphs are numbered, as ids differ between processes."""
        texts = []
        for source in sources or ():
            if id(source) not in self._sources:
                passes = f"{source.pass_name!r},{[str(action) for action in source.action]!r}"
                text = f"{self.name(source.name)},{self.name(str(source.target))},{passes}"
                graph = self._graphs.setdefault(source.graph_id, len(self._graphs))
                self._sources[id(source)] = source, f"({text},{graph},{self._history(source.from_node)})"
            texts.append(self._sources[id(source)][1])
        return ";".join(texts)


_SIMPLE: Mapping[type, Callable[[Any], str]] = {
    type(None): repr,
    bool: repr,
    int: repr,
    float: lambda value: "nan" if value != value else value.hex(),
    complex: lambda value: f"{value.real.hex()}+{value.imag.hex()}j",
    str: repr,
    bytes: repr,
}
