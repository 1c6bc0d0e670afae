"""How a method is called: its parameters, the structure of its arguments and outputs, and what export fixed in them."""

from __future__ import annotations

import inspect
import keyword
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from exir_lowering._upstream.programs import pytree
from exir_lowering.errors import InputError, exception_text, explained, ignoring_errors
from exir_lowering.runtime.inputs import show


@dataclass(frozen=True, slots=True)
class Fixed:
    """A value that export made part of the program."""

    value: bool | int | float | str | None


Leaf = Fixed | None  # what export fixed a value to; None for one that is given or computed


@dataclass(slots=True, eq=False)
class Convention:
    """How a method is called; InputError if a name is no Python identifier, or parts do not fit together."""

    method: str
    positional: tuple[str, ...]  # the parameters that were given by position at export
    keywords: tuple[str, ...]  # those that were given by name
    in_spec: Any  # the structure of its arguments
    out_spec: Any  # the structure of what it returns
    inputs: tuple[Leaf, ...]  # what export fixed, for each value in the arguments
    outputs: tuple[Leaf, ...]  # what export fixed, for each value that it returns
    # which values in the arguments it writes into; the program returns their new values first
    written: tuple[int, ...] = ()
    signature: inspect.Signature = field(init=False)  # with the fixed parameters' values as defaults
    labels: tuple[str, ...] = field(init=False)  # what messages call each value in the arguments

    def __post_init__(self) -> None:
        names = (*self.positional, *self.keywords)
        if not all(map(_is_name, names)) or len(set(names)) != len(names):
            raise InputError(f"Method {self.method!r}: its parameters {names} are not distinct Python identifiers.")
        if (len(self.inputs), len(self.outputs)) != (self.in_spec.num_leaves, self.out_spec.num_leaves):
            raise InputError(f"Method {self.method!r}: its structure has another number of inputs or outputs.")
        parameters, labels, start = [], [], 0
        for number, (name, spec) in enumerate(self._parameters()):
            kind = Parameter.POSITIONAL_OR_KEYWORD if number < len(self.positional) else Parameter.KEYWORD_ONLY
            leaves = self.inputs[start : start + spec.num_leaves]
            start += spec.num_leaves
            fixed = [leaf.value for leaf in leaves if leaf is not None]
            default = _nest(self.method, "arguments", fixed, spec) if len(fixed) == len(leaves) else Parameter.empty
            parameters.append(Parameter(name, kind, default=default))
            labels += [f"argument {name!r}{path}" for path in _paths(spec)]
        # A parameter that is fixed may come before one that is not.
        self.signature = inspect.Signature(parameters, __validate_parameters__=False)
        self.labels = tuple(labels)
        if not all(type(index) is int and 0 <= index < len(self.inputs) for index in self.written):
            who = f"Method {self.method!r}"
            raise InputError(f"{who}: it writes into inputs {self.written}, but has only {len(self.inputs)}.")

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the values of a call, in the program's order; InputError if they are not as at export."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(f"{self.method}(): {error}. It is called as {self}.") from None
        bound.apply_defaults()
        leaves: list[Any] = []
        for name, spec in self._parameters():
            try:
                leaves += spec.flatten_up_to(bound.arguments[name])
            except ValueError as error:
                what = f"{self.method}(): argument {name!r}"
                raise InputError(f"{what} has a different structure than at export: {error}") from None
        for label, fixed, leaf in zip(self.labels, self.inputs, leaves, strict=True):
            if fixed is not None and not _same(fixed.value, leaf):
                raise InputError(
                    f"{self.method}(): {label} is {show(leaf)}, and was fixed to {fixed.value!r} when the model was "
                    "exported. Leave it out, or export the model again with another value."
                )
            if fixed is None and type(leaf) in (list, tuple, dict):
                raise InputError(f"{self.method}(): {label} is a {type(leaf).__name__}, expected a single value.")
        return leaves

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments that hold the values."""
        args, kwargs = _nest(self.method, "arguments", list(leaves), self.in_spec)
        return args, kwargs

    def write_back(self, leaves: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Copy what a method wrote into its arguments to the caller's tensors; InputError if one is not writable."""
        for index, new in zip(self.written, outputs, strict=False):
            try:
                with torch.no_grad():
                    leaves[index][...] = new if isinstance(leaves[index], torch.Tensor) else new.numpy()  # NumPy's
            except (RuntimeError, ValueError, TypeError) as error:
                raise InputError(
                    f"{self.method}(): {self.labels[index]} is {show(leaves[index])}, which the method writes into, "
                    f"but that fails: {error}. Pass a copy: .clone()."
                ) from error

    def restore(self, outputs: Sequence[Any]) -> Any:
        """Return outputs in the structure that the model returns them in."""
        pairs = zip(self.outputs, outputs[len(self.written) :], strict=True)
        leaves = [output if fixed is None else fixed.value for fixed, output in pairs]
        return _nest(self.method, "outputs", leaves, self.out_spec)

    def output_label(self, index: int) -> str:
        """Return what messages call an output of the model."""
        return _paths(self.out_spec)[index] or str(index)

    def _parameters(self) -> list[tuple[str, Any]]:
        children = [child for part in self.in_spec.children() for child in part.children()]
        return list(zip((*self.positional, *self.keywords), children, strict=True))

    def __str__(self) -> str:
        return f"{self.method}{self.signature}"


def of_program(method: str, program: ExportedProgram) -> Convention:
    """Return how a program's method is called; InputError if it does not say, or a keyword is no Python identifier."""
    entry = program.module_call_graph[0].signature if program.module_call_graph else None
    if entry is None:
        raise InputError(f"Method {method!r}: its program does not say how it is called. Export the model again.")
    args, kwargs = entry.in_spec.children()
    keywords = tuple(str(name) for name in kwargs.context)
    names = list(entry.forward_arg_names or ())[: args.num_children]
    if len(names) != args.num_children or not all(map(_is_name, names)):
        names = [f"arg{index}" for index in range(args.num_children)]
    signature = program.graph_signature
    inputs: list[Any] = [spec.arg for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    outputs: list[Any] = [spec.arg for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    positions = {argument.name: index for index, argument in enumerate(inputs)}
    mutations = [spec for spec in signature.output_specs if spec.kind is OutputKind.USER_INPUT_MUTATION]
    taken, returned = (
        tuple(Fixed(one.value) if isinstance(one, ConstantArgument) else None for one in arguments)
        for arguments in (inputs, outputs)
    )
    written = tuple(positions[str(spec.target)] for spec in mutations)
    return Convention(method, tuple(names), keywords, entry.in_spec, entry.out_spec, taken, returned, written)


def _nest(method: str, what: str, leaves: list[Any], spec: Any) -> Any:
    which = f"{method}(): its {what} cannot be put into the structure"
    advice = "Load a file that was saved with the same definition of the type."
    # A registered type, for which the file has a different context, may raise anything.
    with explained(lambda error: InputError(f"{which} {spec}: {exception_text(error)}. {advice}")):
        return pytree.tree_unflatten(leaves, spec)


def _paths(spec: Any) -> list[str]:
    """Return where each value is in a structure, such as [0]['key']."""
    with ignoring_errors():  # a user's type may not be able to hold numbers, or have no paths
        tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
        return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]
    return [f" (value {index} in it)" for index in range(spec.num_leaves)]


def _is_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _same(fixed: Any, given: Any) -> bool:
    if isinstance(fixed, float) and isinstance(given, (int, float)) and not isinstance(given, bool):
        return given == fixed or (math.isnan(fixed) and math.isnan(given))
    return type(given) is type(fixed) and not isinstance(given, torch.Tensor) and bool(given == fixed)
