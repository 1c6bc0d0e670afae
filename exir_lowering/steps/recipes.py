"""Part of step emit: how the content of the file is made of the model's weights, so that `refit` can make it again.

What ExecuTorch's XNNPACK code does to weights is recorded while it works once more on each partition, with other ones.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from executorch.exir import ExecutorchProgramManager
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.acceleration import accelerating
from exir_lowering._upstream.delegates import named_data_in_memory
from exir_lowering._upstream.emission import GivenValue, cord_pieces, data_file_contents, pte_contents
from exir_lowering._upstream.recording import Recording, View
from exir_lowering.graphs.serialized.container import NotSerialisableError
from exir_lowering.graphs.serialized.plain import PlainWriter
from exir_lowering.model import EdgeMethod
from exir_lowering.options import LoweringOptions
from exir_lowering.pte import flatbuffer, slots
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.recipes import (
    Place,
    Recipe,
    Recipes,
    Weight,
    digest,
    find,
    is_bounded,
    raw,
    replay,
    substitute,
)
from exir_lowering.steps.sealing import data_name

if TYPE_CHECKING:
    from exir_lowering.steps.emit import Lowered

_RECORDED = "XnnpackBackend"
_SMALL = 1 << 12  # bytes of a constant up to which a recipe may have it
_INTEGERS = (torch.int8, torch.uint8, torch.int16)  # of quantised weights; others are of tables, for computing
_COPIES = ("aten._to_copy.default", "aten.clone.default")
_STAYS = Recipe()

_Sources = dict[int, tuple[str, torch.Tensor]]
"""Weights by the address of their memory, with their names."""


def replaceable(program: ExportedProgram) -> frozenset[str]:
    """Return the names of the tensors of a program's state_dict of which lowering only knows how large they may be."""
    return frozenset(name for name, value in program.state_dict.items() if _is_replaceable(name, value))


def list_weights(methods: Sequence[EdgeMethod], options: LoweringOptions) -> dict[str, Mapping[str, torch.Tensor]]:
    """Return the state_dicts of the programs that were given, by method; nothing if they will not be replaced."""
    return {one.name: (one.converted_from or one.program).state_dict for one in methods if options.refit}


def _is_replaceable(name: str, value: Any) -> bool:
    if not _is_plain(value) or name.startswith("_lifted_tensor"):  # of the model's code
        return False
    return is_bounded(value) if value.is_floating_point() else value.dtype in _INTEGERS


def _is_plain(value: Any) -> bool:
    kind = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return kind and value.device.type == "cpu" and value.layout is torch.strided and not value.is_neg()


class _NoRecipeError(Exception):
    """Nothing repeats how something was made; the message is the reason."""


def make_recipes(
    lowered: Lowered,
    copies: Mapping[str, ExportedProgram],
    manager: ExecutorchProgramManager,
    values: Mapping[str, Sequence[GivenValue]],
) -> Recipes:
    """Return how what was emitted is made of the weights; `copies` were emitted, with these values."""
    found = _Found(lowered, manager)
    for method, program in copies.items():
        found.add_weights(method, program, values.get(method, ()))
        for path, module, attribute in graphs.delegates(program.graph_module):
            found.add_delegate(".".join((method, *path, attribute)), getattr(module, attribute))
    found.add_constants()
    return found.recipes()


class _Found:
    """What is known so far."""

    def __init__(self, lowered: Lowered, manager: ExecutorchProgramManager) -> None:
        programs = [lowered.unchanged.get(name, program) for name, program in lowered.edge_programs.items()]
        self._program, self._numbers = manager.executorch_program, _number_named_data(manager)
        self._tensors: dict[str, torch.Tensor] = {}
        self._weights: dict[str, Weight] = {}
        self._places: dict[tuple[str, int], Place] = {}
        self._used = {str(spec.target) for one in programs for node, spec in _lifted(one) if node.users}
        self._made: set[tuple[str, int]] = set()  # the values of methods, by number, of which something is known
        written = frozenset().union(*map(graphs.written_state, programs))
        tied: dict[Any, str] = {}
        for name, value in (item for one in lowered.weights.values() for item in one.items() if _is_plain(item[1])):
            if name in self._weights:
                if not _is_equal(self._tensors[name], value):
                    self._fix(name, "methods have different tensors of this name")
                continue
            place = value.data_ptr(), value.dtype, tuple(value.shape), tuple(value.stride())
            first = tied.setdefault(place, name) if value.numel() else name
            kind = str(value.dtype).removeprefix("torch.")
            self._tensors[name] = value
            self._weights[name] = Weight(kind, tuple(value.shape), "" if first == name else first)
            counts = name in written and not value.is_floating_point()  # nothing is assumed of such state
            if name in self._used and not counts and not _is_replaceable(name, value):
                self._fix(name, "the lowering may have computed with its values")

    def _fix(self, name: str, reason: str) -> None:
        weight = self._weights.get(name)
        if weight is not None and not weight.reason:
            self._weights[name] = replace(weight, digest=digest(self._tensors[name]), reason=reason)

    def _add(self, place: Place, recipe: Recipe) -> None:
        known = self._places.setdefault((place.kind, place.number), place)
        if recipe not in known.recipes:
            self._places[place.kind, place.number] = replace(known, recipes=(*known.recipes, recipe))

    def add_weights(self, method: str, program: ExportedProgram, values: Sequence[GivenValue]) -> None:
        """Add the weights and the initial state that a method has on the host."""
        (plan,) = (plan for plan in self._program.execution_plan if plan.name == method)
        sources = self._sources(program)
        used = {spec.target for node, spec in _lifted(program) if node.users}
        for value in values:
            content = program.state_dict.get(value.name, program.constants.get(value.name))
            if value.is_input or not isinstance(content, torch.Tensor) or not content.numel():
                continue
            tensor: Any = plan.values[value.number].val
            extra = tensor.extra_tensor_info
            external = extra is not None and extra.location.name == "EXTERNAL"
            recipe = Recipe(((value.name, tuple(content.stride())),)) if value.name in sources else _STAYS
            if not external and not tensor.data_buffer_idx:
                if value.name in used:
                    self._fix(value.name, "its initial value is 0, which is not stored")
                continue
            if recipe is _STAYS:
                self._fix(value.name, f"{method} does not have it as it was given")
            kind, number = "constant" if tensor.allocation_info is None else "initial", tensor.data_buffer_idx
            if external:
                key = extra.fully_qualified_name
                kind = next(file for file, known in self._numbers if file and known == key)
                number = self._numbers[kind, key][0]
            self._add(Place(kind, number, content.nbytes), recipe)
            self._made.add((method, value.number))

    def add_constants(self) -> None:
        """Add what stays: constants that are not weights may share the memory of one that has the same content."""
        for plan in self._program.execution_plan:
            for number, value in enumerate(plan.values):
                place: Any = getattr(value.val, "data_buffer_idx", 0)
                kind = "constant" if place and value.val.allocation_info is None else "initial"
                if (plan.name, number) not in self._made and (kind, place) in self._places:
                    self._add(self._places[kind, place], _STAYS)

    def add_delegate(self, name: str, delegate: Any) -> None:
        """Add the named data of a delegate."""
        program, contents = delegate.original_module, named_data_in_memory(delegate)
        made = [(key, _STAYS) for key in contents]
        reason = f"{delegate.backend_id} has it in {name} in a form of its own"
        try:
            if delegate.backend_id == _RECORDED:
                made = _record(delegate, contents, self._sources(program))
        except _NoRecipeError as error:
            reason += f", and nothing is known to make that again: {error}"
        for key, recipe in made:
            for file in (file for file, known in self._numbers if known == key):
                number, prefix = self._numbers[file, key]
                self._add(Place(file or "named", number, len(contents[key]), prefix), recipe)
        taken = {weight for _, recipe in made for weight in recipe.names}
        for weight in {str(spec.target) for _, spec in _lifted(program)} - taken:
            self._fix(weight, reason)

    def _sources(self, program: ExportedProgram) -> dict[str, torch.Tensor]:
        found = {}
        for _, spec in _lifted(program):
            name = str(spec.target)
            value = program.state_dict.get(name, program.constants.get(name))
            known = name in self._weights and not self._weights[name].reason
            if known and _is_equal(self._tensors[name], value) and value.untyped_storage().nbytes() == value.nbytes:
                found[name] = value
        return found

    def recipes(self) -> Recipes:
        """Return what is known at the end."""
        taken = {name for place in self._places.values() for name in place.names}
        for name in self._used.difference(taken, (self._weights[one].tied for one in taken)):
            self._fix(name, "nothing in the file is known to be made of it")
        fixed = {weight.tied or name: weight.reason for name, weight in self._weights.items() if weight.reason}
        for name, weight in [*self._weights.items()]:  # each name of a tied one
            if (reason := fixed.get(weight.tied or name)) is not None:
                self._fix(name, reason)
        return Recipes(self._weights, [self._places[key] for key in sorted(self._places)])


def _is_equal(one: torch.Tensor, other: Any) -> bool:
    if not _is_plain(other) or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return same or digest(one) == digest(other)


def _lifted(program: ExportedProgram) -> list[tuple[Node, Any]]:
    return list(graphs.lifted_inputs(program).items())


def _number_named_data(manager: ExecutorchProgramManager) -> dict[tuple[str, str], tuple[int, str | None]]:
    """Return, by file and key, the number of each named datum, and what the key has before a digest of the content."""
    found: dict[tuple[str, str], tuple[int, str | None]] = {}
    files = {"": pte_contents(manager)} | {data_name(name): cord for name, cord in data_file_contents(manager).items()}
    for file, cord in files.items():
        tables = flatbuffer.root(memoryview(cord_pieces(cord)[0]))
        field = slots.FlatTensor.NAMED_DATA if file else slots.Program.NAMED_DATA
        for number, entry in enumerate(tables.tables(field)):
            key = entry.text(slots.NamedData.KEY)
            hashed = len(key) >= 64 and not set(key[-64:]) - set("0123456789abcdef")
            found[file, key] = number, key[:-64] if hashed else None
    return found


def _record(
    delegate: Any, contents: Mapping[str, bytes], weights: Mapping[str, torch.Tensor]
) -> list[tuple[str, Recipe]]:
    """Return the recipes of a delegate's named data, by key; a _NoRecipeError if they are not all that has weights.

    XNNPACK's code is given other weights: the payload has to be the same but for keys, and the recipes of what is made
    of these weights have to make what is in the file of the old ones. So nothing else depends on their values.
    """
    from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend

    program, others = graphs.copy_program(delegate.original_module), dict(zip(weights, _vary(weights), strict=True))
    for table in (program.state_dict, program.constants):
        table.update({name: other for name, other in others.items() if name in table})
    with accelerating(), torch.no_grad(), Recording() as recording:
        result = XnnpackBackend.preprocess(program, delegate.compile_specs)
    output = result.data_store_output
    sources = {value.untyped_storage().data_ptr(): (name, value) for name, value in others.items()}
    for value in others.values():
        recording.number(value)
    memories: dict[bytes, list[int]] = {}
    for number, memory in enumerate(recording.memories):
        memories.setdefault(xxhash.xxh3_128_digest(raw(memory)), []).append(number)
    keys = {xxhash.xxh3_128_digest(content): key for key, content in contents.items()}
    found: list[tuple[str, Recipe]] = []
    replaced: dict[str, str] = {}
    for key, entry in output.pte_data.items() if output is not None else ():
        content = output.buffers[entry.buffer_index]
        numbers = memories.get(xxhash.xxh3_128_digest(content), [])
        copied = {one for each in numbers if _is_copy(recording, each) for one in _operands(recording, each)}
        for recipe in (_recipe(recording, number, sources) for number in numbers if number not in copied):
            try:
                old = replay(recipe, weights, len(content)) if recipe.sources else content
            except (CorruptError, ValueError, TypeError, RuntimeError) as error:
                raise _NoRecipeError(str(error)) from None
            if replaced.setdefault(key, keys.get(xxhash.xxh3_128_digest(old), "")) not in contents:
                raise _NoRecipeError("other bytes are computed")
            found.append((replaced[key], recipe))
    if {*replaced.values()} != {*contents} or substitute(result.processed_bytes, replaced) != delegate.processed_bytes:
        raise _NoRecipeError("what it makes depends on values of weights in a way that is not known")
    return found


def _vary(weights: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield other weights: numbers near the old ones, or the old integers in another order, as four bits hold them."""
    random = torch.Generator().manual_seed(0)
    for value in weights.values():
        with torch.no_grad():
            if value.is_floating_point():
                factor = torch.rand(value.shape, generator=random)
                made = (value * (0.5 + factor / 2) + factor / 1024).to(value.dtype)
            else:
                order = torch.randperm(value.numel(), generator=random)
                made = value.reshape(-1)[order].reshape(value.shape)
            made = torch.empty_like(value, requires_grad=False).copy_(made)
        yield torch.nn.Parameter(made, value.requires_grad) if isinstance(value, torch.nn.Parameter) else made


def _is_copy(recording: Recording, memory: int) -> bool:
    made_by = recording.made_by[memory]
    return made_by is not None and made_by[0] in _COPIES


def _recipe(recording: Recording, memory: int, sources: _Sources) -> Recipe:
    given: dict[int, tuple[Any, Any]] = {}
    calls: dict[int, Any] = {}
    _trace(recording, memory, sources, given, calls)
    if all(name is None for name, _ in given.values()):
        return _STAYS
    numbers = {each: number for number, each in enumerate([*given, *calls])}
    writer = PlainWriter()
    writer.writers[View] = lambda view, depth: {
        "view": [numbers[view.memory], str(view.dtype).removeprefix("torch."), *map(list, view[2:4]), view.offset]
    }
    try:
        for operator, *_ in calls.values():
            find(operator)
        written = ((name, writer.write(list(a)), writer.write(dict(k)), place) for name, a, k, place in calls.values())
        return Recipe(tuple(given.values()), tuple(written))
    except (ValueError, NotSerialisableError) as error:
        raise _NoRecipeError(str(error)) from None


def _trace(
    recording: Recording, memory: int, sources: _Sources, given: dict[int, tuple[Any, Any]], calls: dict[int, Any]
) -> None:
    """Find what a memory is made of: its sources, and the calls in their order."""
    tensor, made_by = recording.memories[memory], recording.made_by[memory]
    source = sources.get(tensor.untyped_storage().data_ptr())
    if memory in given or memory in calls:
        return
    if source is not None:
        given[memory] = source[0], tuple(source[1].stride())
    elif memory in recording.written:
        raise _NoRecipeError("an operator wrote into what it is made of")
    elif made_by is not None:
        for operand in _operands(recording, memory):
            _trace(recording, operand, sources, given, calls)
        calls[memory] = made_by
    elif tensor.untyped_storage().nbytes() <= _SMALL:
        given[memory] = None, base64.b64encode(raw(tensor)).decode()
    else:
        raise _NoRecipeError("a large constant is in it")


def _operands(recording: Recording, memory: int) -> list[int]:
    """Return the memories from which a call made one."""
    found: list[int] = []

    def note(value: Any) -> None:
        if isinstance(value, View):
            found.append(value.memory)
        elif isinstance(value, (list, tuple)):
            for each in value:
                note(each)

    _, args, kwargs, _ = recording.made_by[memory] or ("", (), {}, 0)
    note([*args, *kwargs.values()])
    return found
