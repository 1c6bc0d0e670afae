"""Part of step emit: how the content of the file is made of the model's weights, so that `refit` can make it again.

What ExecuTorch's XNNPACK code does to weights is recorded while it works once more on each partition, without writing a
payload. Each recipe is executed, and kept only if it makes the bytes that are in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from executorch.exir import ExecutorchProgramManager
from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering._upstream.acceleration import accelerating
from exir_lowering._upstream.delegates import named_data_in_memory
from exir_lowering._upstream.emission import GivenValue, cord_pieces, data_file_contents, pte_contents
from exir_lowering._upstream.recording import RECORDED, RecordedView, Recording, record
from exir_lowering.graphs.serialized.container import NotSerialisableError
from exir_lowering.pte import flatbuffer, header, slots
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.recipes import (
    Place,
    Recipe,
    Recipes,
    View,
    Weight,
    is_bounded,
    raw,
    replay,
    write_call,
    write_content,
)

if TYPE_CHECKING:
    from exir_lowering.steps.emit import Lowered

_SMALL = 1 << 16
"""Bytes of a constant up to which a recipe may have it."""

_INTEGERS = (torch.int8, torch.uint8, torch.int16)
"""What quantised weights are of; wider integers and truth values are tables that lowering computes with."""

_Named = dict[tuple[str, str], tuple[int, str | None]]


class _NoRecipeError(Exception):
    """Nothing repeats how something was made; the message is the reason."""


def replaceable(program: ExportedProgram) -> frozenset[str]:
    """Return the names of the tensors of a program's state_dict of which lowering only knows how large they may be."""
    return frozenset(name for name, value in program.state_dict.items() if _is_replaceable(value))


def _is_replaceable(value: Any) -> bool:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and value.device.type == "cpu"
    if not plain or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return False
    return is_bounded(value) if value.is_floating_point() else value.dtype in _INTEGERS


def digest(value: torch.Tensor) -> str:
    """Return the digest of a tensor's elements."""
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return str(xxhash.xxh3_128_hexdigest(flat.numpy().data))


def make_recipes(
    lowered: Lowered,
    copies: Mapping[str, ExportedProgram],
    manager: ExecutorchProgramManager,
    values: Mapping[str, Sequence[GivenValue]],
) -> Recipes:
    """Return how what was emitted is made of the weights; `copies` were emitted, with these values."""
    found = _Found(lowered, manager)
    for method, program in copies.items():
        found.add_constants(method, program, values.get(method, ()))
        for path, module, attribute in graphs.delegates(program.graph_module):
            found.add_delegate(".".join((method, *path, attribute)), getattr(module, attribute))
    return found.recipes()


class _Found:
    """What is known so far."""

    def __init__(self, lowered: Lowered, manager: ExecutorchProgramManager) -> None:
        programs = [lowered.unchanged.get(name, program) for name, program in lowered.edge_programs.items()]
        self._program, self._numbers = manager.executorch_program, _named_data(manager)
        self._tensors: dict[str, torch.Tensor] = {}
        self._weights: dict[str, Weight] = {}
        self._places: dict[tuple[str, int], Place] = {}
        self._used = {str(spec.target) for one in programs for node, spec in _lifted(one) if node.users}
        written = frozenset().union(*map(graphs.written_state, programs))
        tied: dict[Any, str] = {}
        for name, value in ((name, value) for one in lowered.weights.values() for name, value in one.items()):
            if name.startswith("_lifted_tensor"):  # a constant of the model's code
                continue
            known = self._tensors.setdefault(name, value)
            if known is value and name not in self._weights:
                place = value.data_ptr(), value.dtype, tuple(value.shape), tuple(value.stride())
                first = tied.setdefault(place, name) if value.numel() else name
                kind = str(value.dtype).removeprefix("torch.")
                self._weights[name] = Weight(kind, tuple(value.shape), "" if first == name else first)
                if name in self._used - written and not _is_replaceable(value):
                    self._fix(name, "the lowering may have computed with its values")
            elif known.data_ptr() != value.data_ptr() and not _are_equal(known, value):
                self._fix(name, "methods have different tensors of this name")

    def _fix(self, name: str, reason: str) -> None:
        weight = self._weights.get(name)
        if weight is not None and not weight.reason:
            self._weights[name] = replace(weight, digest=digest(self._tensors[name]), reason=reason)

    def _add(self, kind: str, number: int, size: int, prefix: str | None, recipe: Recipe | None) -> None:
        known = self._places.setdefault((kind, number), Place(kind, number, size, prefix))
        if recipe is not None and recipe not in known.recipes:
            self._places[kind, number] = replace(known, recipes=(*known.recipes, recipe))

    def add_constants(self, method: str, program: ExportedProgram, values: Sequence[GivenValue]) -> None:
        """Add the constants and the initial state of a method."""
        (plan,) = (plan for plan in self._program.execution_plan if plan.name == method)
        for value in values:
            tensor: Any = plan.values[value.number].val
            content = program.state_dict.get(value.name, program.constants.get(value.name))
            if value.is_input or not isinstance(content, torch.Tensor) or not content.numel():
                continue
            external = tensor.extra_tensor_info is not None and tensor.extra_tensor_info.location.name == "EXTERNAL"
            initial = tensor.allocation_info is not None
            if not external and not tensor.data_buffer_idx:
                if value.name in self._weights and any(node.users for node, spec in _lifted(program) if spec.target == value.name):
                    self._fix(value.name, "its initial value is 0, which is not stored")
                continue
            weight, recipe = self._weights.get(value.name), None
            if weight is not None:
                same = content.shape == weight.shape and str(content.dtype).endswith(f".{weight.dtype}")
                if same and content.untyped_storage().nbytes() == content.nbytes:
                    recipe = Recipe(((value.name, tuple(content.stride())),))
                else:
                    self._fix(value.name, "the file has it in another form")
            if external:
                key = tensor.extra_tensor_info.fully_qualified_name
                for (file, name), (number, _) in self._numbers.items():
                    if file and name == key:
                        self._add(file, number, content.nbytes, None, recipe)
            else:
                self._add("initial" if initial else "constant", tensor.data_buffer_idx, content.nbytes, None, recipe)

    def add_delegate(self, name: str, delegate: Any) -> None:
        """Add the named data of a delegate."""
        program, contents = delegate.original_module, named_data_in_memory(delegate)
        weights = {str(spec.target) for _, spec in _lifted(program)} & self._weights.keys()
        made: list[tuple[str, Recipe | None]] = []
        reason = f"{delegate.backend_id} has it in {name} in a form of its own"
        if delegate.backend_id == RECORDED:
            with accelerating():
                recording = record(graphs.copy_program(program), delegate.compile_specs)
            sources = {value.untyped_storage().data_ptr(): (name, value) for name, value in self._sources(program)}
            try:
                if {key for key, _ in recording.data} != contents.keys():
                    raise _NoRecipeError("its data is not what it was")
                made = [(key, _recipe(recording, memory, sources, contents[key])) for key, memory in recording.data]
            except _NoRecipeError as error:
                made, reason = [], f"{reason}, and nothing is known to make that again: {error}"
        for key, recipe in made or [(key, None) for key in contents]:
            for file, known in self._numbers:
                if known == key:
                    number, prefix = self._numbers[file, key]
                    self._add(file or "named", number, len(contents[key]), prefix, recipe)
        for weight in weights.difference(*(one.names for _, one in made if one is not None)):
            self._fix(weight, reason)

    def _sources(self, program: ExportedProgram) -> Iterator[tuple[str, torch.Tensor]]:
        for _, spec in _lifted(program):
            name, value = str(spec.target), program.state_dict.get(spec.target, program.constants.get(spec.target))
            weight = self._weights.get(name)
            if isinstance(value, torch.Tensor) and weight is not None and not weight.reason:
                if value.untyped_storage().nbytes() == value.nbytes and value.shape == weight.shape:
                    yield name, value

    def recipes(self) -> Recipes:
        """Return what is known at the end."""
        taken = {name for place in self._places.values() for one in place.recipes for name in one.names}
        for name in self._used.difference(taken, (self._weights[one].tied for one in taken)):
            self._fix(name, "nothing in the file is known to be made of it")
        weights = {
            name: replace(weight, bounded=not weight.reason and self._tensors[name].is_floating_point() and is_bounded(self._tensors[name]))
            for name, weight in self._weights.items()
        }
        return Recipes(weights, tuple(self._places[key] for key in sorted(self._places)))


def _lifted(program: ExportedProgram) -> list[tuple[torch.fx.Node, Any]]:
    return list(graphs.lifted_inputs(program).items())


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and digest(one) == digest(other)


def _named_data(manager: ExecutorchProgramManager) -> _Named:
    """Return the number of each named datum in its file, and what its key has before a digest of the content."""
    found: _Named = {}
    files = {"": pte_contents(manager), **data_file_contents(manager)}
    for file, cord in files.items():
        first, *_ = cord_pieces(cord)
        tables = memoryview(bytes(first))
        if file:
            entries = flatbuffer.root(tables[: header.read_ptd(tables, sum(map(len, cord_pieces(cord)))).tables]).tables(slots.FlatTensor.NAMED_DATA)
        else:
            entries = flatbuffer.root(tables[: header.read_pte(tables, len(cord)).tables]).tables(slots.Program.NAMED_DATA)
        for number, entry in enumerate(entries):
            key = entry.text(slots.NamedData.KEY)
            found[file, key] = number, key[:-64] if _is_digest(key[-64:]) else None
    return found


def _is_digest(text: str) -> bool:
    return len(text) == 64 and not set(text) - set("0123456789abcdef")


def _recipe(
    recording: Recording, memory: int | None, sources: Mapping[int, tuple[str, torch.Tensor]], content: bytes
) -> Recipe | None:
    """Return what makes named data, None if no weight is in it; a _NoRecipeError if that is not known."""
    if memory is None:
        raise _NoRecipeError("it is not what an operator made")
    given: dict[int, tuple[Any, ...]] = {}
    calls: list[tuple[int, Any, int]] = []
    _trace(recording, memory, sources, given, calls)
    numbers = {each: number for number, each in enumerate([*given, *(made for made, *_ in calls)])}

    def renumbered(value: Any) -> Any:
        if isinstance(value, RecordedView):
            return View(numbers[value.memory], value.dtype, value.shape, value.strides, value.offset)
        return type(value)(map(renumbered, value)) if isinstance(value, (list, tuple)) else value

    if all(name is None for name, _ in given.values()):
        return None
    weights = {name: value for name, value in sources.values()}
    try:
        written = tuple(
            write_call(str(call.operator), renumbered(call.args), {k: renumbered(v) for k, v in call.kwargs.items()}, place)
            for _, call, place in calls
        )
        recipe = Recipe(tuple(given.values()), written)
        with torch.no_grad():
            same = raw(replay(recipe, weights)) == memoryview(content)
    except (ValueError, NotSerialisableError, CorruptError) as error:
        raise _NoRecipeError(str(error)) from None
    if not same:
        raise _NoRecipeError("other bytes are computed")
    return recipe


def _trace(
    recording: Recording,
    memory: int,
    sources: Mapping[int, tuple[str, torch.Tensor]],
    given: dict[int, tuple[Any, ...]],
    calls: list[tuple[int, Any, int]],
) -> None:
    """Find what a memory is made of: its sources, and the calls in their order."""
    if memory in given or any(memory == made for made, *_ in calls):
        return
    tensor, made_by = recording.memories[memory], recording.made_by[memory]
    source = sources.get(tensor.untyped_storage().data_ptr())
    if source is not None:
        given[memory] = source[0], tuple(source[1].stride())
    elif memory in recording.written:
        raise _NoRecipeError("an operator wrote into what it is made of")
    elif made_by is not None:
        call, place = made_by
        for view in torch.utils._pytree.tree_leaves((call.args, call.kwargs)):
            if isinstance(view, RecordedView):
                _trace(recording, view.memory, sources, given, calls)
        calls.append((memory, call, place))
    elif tensor.untyped_storage().nbytes() <= _SMALL:
        given[memory] = write_content(tensor)
    else:
        raise _NoRecipeError("a large constant is in it")
