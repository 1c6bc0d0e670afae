"""The dynamic dimensions of a program, by the names that its user has for them."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.fakes import data_dependent, expression, names_of_symbols, shape_env_of
from exir_lowering._upstream.programs import shape_env_in


def user_tensors(program: ExportedProgram) -> list[tuple[Node, torch.Tensor]]:
    """Return the inputs that the user passes as tensors, and their fake values; the order is that of the file."""
    values = ((node, node.meta.get("val")) for node in graphs.user_inputs(program))
    return [(node, value) for node, value in values if isinstance(value, torch.Tensor)]


def dynamic_sizes(value: Any) -> list[tuple[int, Any]]:
    """Return the dynamic dimensions of a value, with the expressions of their sizes."""
    shape = value.shape if isinstance(value, torch.Tensor) else ()
    return [(dim, expression(size)) for dim, size in enumerate(shape) if isinstance(size, torch.SymInt)]


class Dimensions:
    """The dynamic dimensions of a program's inputs; with `data`, also the sizes that depend on data."""

    def __init__(self, program: ExportedProgram, *, data: bool = False) -> None:
        self.program, self.ranges = program, program.range_constraints
        self.users = [str(name) for name in program.graph_signature.user_inputs]
        self.inputs = {self.users.index(node.name): value for node, value in user_tensors(program)}
        self.places = {(key, dim): each for key, value in self.inputs.items() for dim, each in dynamic_sizes(value)}
        self.symbols = {symbol: None for each in self.places.values() for symbol in each.free_symbols}
        named = names_of_symbols(shape_env_of(next(iter(self.inputs.values())))) if self.symbols else {}
        self.names = {name: symbol for name, symbol in named.items() if symbol in self.symbols}
        places = {f"{self.users[key]}.{dim}": each for (key, dim), each in self.places.items() if each.is_Symbol}
        self.keys = {**self.names, **places}
        if data:
            made = data_dependent(shape_env_in(program))
            self.symbols.update(dict.fromkeys(made.values()))
            self.keys.update(made)

    def find(self, key: object) -> Any:
        """Return the symbol of a dimension; None if nothing is called so."""
        if not self.names and self.places and len(self.symbols) == 1 and str(key).isidentifier():
            return next(iter(self.symbols))  # a program of a file has no names
        return self.keys.get(str(key))

    def product(self, key: str) -> tuple[Any, ...]:
        """Return the symbols of dimensions that a text such as "height*width" multiplies; () if one is not known."""
        found = [self.find(part.strip()) for part in key.split("*")]
        return () if None in found else tuple(sorted(found, key=str))

    def __str__(self) -> str:
        listed = []
        for symbol in self.symbols:
            keys, between = (repr(key) for key, each in self.keys.items() if each == symbol), self.ranges.get(symbol)
            listed.append(f"{', '.join(keys)} ({between.lower} to {between.upper})" if between else ", ".join(keys))
        return f"The dynamic dimensions are {'; '.join(listed)}." if listed else "No dimension of it is dynamic."
