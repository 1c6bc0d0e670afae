"""How large the inputs of a program get, as its user says: dimensions, products of several, or whole sets of sizes.

`torch.export` bounds each symbol alone. What the user says narrows the ranges of symbols in a private copy; what is
about several symbols together stays with the copy's shape environment, for who plans memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from exir_lowering._upstream.bounds import Limits, Products, from_one, restrict
from exir_lowering._upstream.fakes import narrow
from exir_lowering._upstream.programs import shape_env_in
from exir_lowering.errors import InputError
from exir_lowering.graphs.copies import private_copy
from exir_lowering.steps.arguments import RequestedMethod, by_method
from exir_lowering.steps.conversion_context import converting
from exir_lowering.steps.dimensions import Dimensions

_BOUNDS = 'such as {"height*width": 1_000_000, "seq": 512}'
_SIZES = 'such as [{"seq": 16, "batch": 64}, {"seq": 512, "batch": 2}]'


def limit(methods: tuple[RequestedMethod, ...], bounds: Any, sizes: Any = None) -> tuple[RequestedMethod, ...]:
    """Return methods whose programs know the largest inputs that they get; InputError for what they do not have."""
    if not bounds and sizes is None:
        return methods
    names, of = [one.name for one in methods], {one.name: Dimensions(one.program, data=True) for one in methods}
    nested = any(isinstance(most, Mapping) for most in bounds.values())
    products = by_method("bounds", bounds, names, _read) if nested else dict.fromkeys(names, _read("bounds", bounds))
    sets = by_method("sizes", {} if sizes is None else sizes, names, read_sets)

    def resolve(who: str, method: str, one: Mapping[str, int], given: Mapping[str, Any]) -> Products:
        """Return what is given for the dimensions of a method: they may also be those of others with the same."""
        for key in one:
            if not any(of[name].product(key) for name in names if given.get(name) is given[method]):
                raise InputError(f"{who}: the program has no dynamic dimension {key!r}. {of[method]}")
        return tuple((of[method].product(key), most) for key, most in one.items() if of[method].product(key))

    limited = []
    with converting((one.program for one in methods), gradients=True):  # another thread may convert the same programs
        for method in methods:
            common = resolve("bounds", method.name, products.get(method.name, {}), products)
            each = (resolve("sizes", method.name, one, sets) for one in sets.get(method.name, ()))
            alternatives = tuple(common + one for one in each) or (common,)
            limited.append(replace(method, program=_limit(method, of[method.name], alternatives)))
    return tuple(limited)


def read_sets(who: str, value: Any) -> list[Mapping[str, int]]:
    """Return sets of sizes that inputs have together; InputError for anything else."""
    if isinstance(value, Mapping) or not isinstance(value, Sequence) or not value:
        raise InputError(f"{who}: got {value!r}, expected sets of sizes that inputs have together, {_SIZES}.")
    return [_read(f"{who}[{number}]", one) for number, one in enumerate(value)]


def _read(who: str, value: Any) -> Mapping[str, int]:
    if not isinstance(value, Mapping):
        raise InputError(f"{who}: got {value!r}, expected numbers by dimension, {_BOUNDS}.")
    for key, most in value.items():
        if not isinstance(key, str) or type(most) is not int or most < 1:
            raise InputError(f"{who}: got {key!r}: {most!r}, expected a dimension and an int of at least 1, {_BOUNDS}.")
    return value


def _limit(method: RequestedMethod, dims: Dimensions, alternatives: Limits) -> Any:
    """Return a private copy of a program that knows its limits; the program if there are none."""
    if not any(alternatives):
        return method.program
    program, before = private_copy(method.program), shape_env_in(method.program)
    environment = shape_env_in(program)
    if environment is None or environment is before:
        raise InputError(f"Method {method.name!r}: bounds and sizes are for programs with dynamic dimensions. {dims}")
    symbols = {symbol for products in alternatives for group, _ in products for symbol in group}
    known = {one: from_one(environment.var_to_range[one]) for one in symbols}
    for products in alternatives:
        for group, most in products:
            least, greatest = (math.prod(getattr(known[one], end) for one in group) for end in ("lower", "upper"))
            if not least <= most <= greatest:
                what = "*".join(next(key for key, one in dims.keys.items() if one == symbol) for symbol in group)
                raise InputError(f"Method {method.name!r}: {what} cannot be at most {most}. {dims}")
    found = [restrict(products, known) for products in alternatives]
    greatest = {one: max(each[one].upper for each in found) for one in symbols}
    alone = len(alternatives) == 1 and all(len(set(group)) == 1 and most > 1 for group, most in alternatives[0])
    narrow(environment, program.range_constraints, greatest, () if alone else alternatives)
    return program
