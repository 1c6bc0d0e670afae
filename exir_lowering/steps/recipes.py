"""Part of step emit: how the content of the file is made of the model's weights, so that `refit` can make it again.

What ExecuTorch's XNNPACK code does to weights is recorded while it works once more on each partition, with other ones.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from executorch.exir import ExecutorchProgramManager
from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering._upstream.acceleration import accelerating
from exir_lowering._upstream.contents import Apart
from exir_lowering._upstream.delegates import named_data_in_memory, with_result
from exir_lowering._upstream.emission import GivenValue, cord_pieces, data_file_contents, pte_contents
from exir_lowering._upstream.programs import pytree
from exir_lowering._upstream.recording import Recording, View
from exir_lowering._upstream.tensors import is_plain
from exir_lowering.graphs.serialized.plain import NotSerialisableError, PlainWriter
from exir_lowering.model import EdgeMethod
from exir_lowering.options import LoweringOptions
from exir_lowering.plugins.backend import ExecutorchBackend
from exir_lowering.plugins.registry import as_backend
from exir_lowering.pte import container, flatbuffer, slots
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.recipes import (
    DIGEST,
    Place,
    Recipe,
    Recipes,
    Weight,
    digest,
    digest_for,
    find,
    is_bounded,
    origin_of,
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
    if not is_plain(value) or name.startswith("_lifted_tensor"):  # of the model's code
        return False
    return is_bounded(value) if value.is_floating_point() else value.dtype in _INTEGERS


class _NoRecipeError(Exception):
    """Nothing repeats how something was made; the message is the reason."""


class Replacing:
    """What is known of weights that can be replaced, and what in a file is made of them; nothing without `refit=True`.

    Equal content is stored once only if it is made of the same, so that other weights have the same layout. The
    delegates of `copies`, which will be emitted, get keys of their own for the rest.

    Attributes:
        origins: What content is made of, by the name of a weight, the key of named data and the number of a constant.
        names: The names of the weights that named data is, perhaps in another order, by key.
    """

    def __init__(self, lowered: Lowered, copies: Mapping[str, ExportedProgram]) -> None:
        self.origins: dict[Any, str] = {}
        self.names: dict[str, str] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._weights: dict[str, Weight] = {}
        self._named: dict[str, tuple[Recipe, ...]] = {}
        self._places: dict[tuple[str, int], Place] = {}
        if not lowered.weights:
            return
        programs = [lowered.unchanged.get(name, program) for name, program in lowered.edge_programs.items()]
        self._used = {
            str(spec.target) for one in programs for node, spec in graphs.lifted_inputs(one).items() if node.users
        }
        self._list(lowered.weights, frozenset().union(*map(graphs.written_state, programs)))
        self.origins.update({name: self._first(name) for name, one in self._weights.items() if not one.reason})
        for method, program in copies.items():
            for path, module, attribute in graphs.delegates(program.graph_module):
                name = ".".join((method, *path, attribute))
                setattr(module, attribute, self._separate(name, getattr(module, attribute)))

    def _list(self, given: Mapping[str, Mapping[str, torch.Tensor]], written: Set[str]) -> None:
        tied: dict[Any, str] = {}
        for name, value in (item for one in given.values() for item in one.items() if is_plain(item[1])):
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

    def _first(self, name: str) -> str:
        """Return the name that stands for all of a tied weight."""
        return self._weights[name].tied or name

    def _fix(self, name: str, reason: str) -> None:
        weight = self._weights.get(name)
        if weight is not None and not weight.reason:
            self._weights[name] = replace(weight, digest=digest(self._tensors[name]), reason=reason)

    def _add(self, place: Place) -> None:
        known = self._places.setdefault((place.kind, place.number), place)
        more = tuple(one for one in place.recipes if one not in known.recipes)
        self._places[place.kind, place.number] = replace(known, recipes=(*known.recipes, *more))

    def _separate(self, name: str, delegate: Any) -> Any:
        """Return a delegate with a key for each of its named data that has an origin of its own."""
        program, taken = delegate.original_module, set[str]()
        reason = f"{delegate.backend_id} has it in {name} in a form of its own"
        try:
            if delegate.backend_id == _RECORDED:
                sources = self._sources(program)
                delegate, made = _record(delegate, {name: (self._first(name), sources[name]) for name in sources})
                self._named.update(made)
                taken = {weight for recipes in made.values() for one in recipes for weight in one.names}
        except _NoRecipeError as error:
            reason += f", and nothing is known to make that again: {error}"
        for weight in {str(spec.target) for spec in graphs.lifted_inputs(program).values()}:
            if weight in self._weights and self._first(weight) not in taken:
                self._fix(weight, reason)
        return delegate

    def _sources(self, program: ExportedProgram) -> dict[str, torch.Tensor]:
        found = {}
        for spec in graphs.lifted_inputs(program).values():
            name = str(spec.target)
            value = graphs.lifted_value(program, name)
            known = name in self._weights and not self._weights[name].reason
            if known and _is_equal(self._tensors[name], value) and value.untyped_storage().nbytes() == value.nbytes:
                found[name] = value
        return found

    def complete(
        self,
        copies: Mapping[str, ExportedProgram],
        manager: ExecutorchProgramManager,
        values: Mapping[str, Sequence[GivenValue]],
    ) -> Recipes:
        """Return how what was emitted is made of the weights; `copies` were emitted, with these values."""
        if not self._weights:
            return Recipes({}, ())
        numbers = _number_named_data(manager)
        for (file, key), (number, size) in numbers.items():
            recipes = self._named.get(key, ())
            if recipes:
                self.origins[key] = origin_of(recipes)
                self._add(Place(file or "named", number, size, recipes, key[:-DIGEST]))
            names = {name for one in recipes for name in one.names if self._tensors[name].nbytes == size}
            if len(names) == 1 and all(call[0] in _COPIES for one in recipes for call in one.calls):
                self.names[key] = names.pop()
        for plan in manager.executorch_program.execution_plan:
            if plan.name in copies:
                self._add_host(plan, copies[plan.name], values.get(plan.name, ()), numbers)
        self.origins.update(
            {place.number: origin_of(place.recipes) for place in self._places.values() if place.kind == "constant"}
        )
        taken = {name for place in self._places.values() for name in place.names}
        for name in self._used & self._weights.keys():
            if self._first(name) not in taken:
                self._fix(name, "nothing in the file is known to be made of it")
        fixed = {self._first(name): weight.reason for name, weight in self._weights.items() if weight.reason}
        for name in self._weights:  # each name of a tied one
            if self._first(name) in fixed:
                self._fix(name, fixed[self._first(name)])
        return Recipes(self._weights, [self._places[key] for key in sorted(self._places)])

    def _add_host(
        self, plan: Any, program: ExportedProgram, values: Sequence[GivenValue], numbers: Mapping[tuple[str, str], Any]
    ) -> None:
        """Add the weights and the initial state that a method has on the host."""
        sources = self._sources(program)
        used = {spec.target for node, spec in graphs.lifted_inputs(program).items() if node.users}
        for value in values:
            content = graphs.lifted_value(program, value.name)
            if value.is_input or not isinstance(content, torch.Tensor) or not content.numel():
                continue
            tensor: Any = plan.values[value.number].val
            extra = tensor.extra_tensor_info
            external = extra is not None and extra.location.name == "EXTERNAL"
            if not external and not tensor.data_buffer_idx:
                if value.name in used:
                    self._fix(value.name, "its initial value is 0, which is not stored")
                continue
            if value.name not in sources:
                self._fix(value.name, f"{plan.name} does not have it as it was given")
                continue
            kind, number = "constant" if tensor.allocation_info is None else "initial", tensor.data_buffer_idx
            if external:
                key = extra.fully_qualified_name
                kind = next(file for file, known in numbers if file and known == key)
                number, _ = numbers[kind, key]
            recipe = Recipe(((self._first(value.name), tuple(content.stride())),))
            self._add(Place(kind, number, content.nbytes, (recipe,)))


def _is_equal(one: torch.Tensor, other: Any) -> bool:
    if not is_plain(other) or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return same or digest(one) == digest(other)


def _number_named_data(manager: ExecutorchProgramManager) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the number and size of each named datum, by file and key."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    files = {"": pte_contents(manager)} | {data_name(name): cord for name, cord in data_file_contents(manager).items()}
    for file, cord in files.items():
        tables, of = flatbuffer.root(memoryview(cord_pieces(cord)[0])), slots.FlatTensor if file else slots.Program
        sizes = [size for _, size in container.segment_ranges(tables.tables(of.SEGMENTS))]
        for number, entry in enumerate(tables.tables(of.NAMED_DATA)):
            size = sizes[entry.number(slots.NamedData.SEGMENT_INDEX, "I")]
            found[file, entry.text(slots.NamedData.KEY)] = number, size
    return found


def _record(
    delegate: Any, weights: Mapping[str, tuple[str, torch.Tensor]]
) -> tuple[Any, dict[str, tuple[Recipe, ...]]]:
    """Return a delegate in which only data of one origin has one key, and how that is made of weights, by key.

    XNNPACK's code is given other weights: the payload has to be the same but for keys, and the recipes of what is made
    of these weights have to make what the delegate has of the old ones. So nothing else depends on their values. A
    _NoRecipeError if that is not so. `weights` have the names for recipes, too.
    """
    contents, old = named_data_in_memory(delegate), dict(weights.values())
    new = dict(zip(old, _vary(old), strict=True))
    result, recording = _preprocess(delegate, {name: new[first] for name, (first, _) in weights.items()})
    sources = {value.untyped_storage().data_ptr(): (name, value) for name, value in new.items()}
    memories: dict[bytes, list[int]] = {}
    for number, memory in enumerate(recording.memories):
        memories.setdefault(xxhash.xxh3_128_digest(raw(memory)), []).append(number)
    keys = {(key[:-DIGEST], xxhash.xxh3_128_digest(content)): key for key, content in contents.items()}
    made: dict[str, tuple[Recipe, ...]] = {}
    before: dict[str, str] = {}
    after: dict[str, str] = {}
    data = result.data_store_output
    buffers, entries = ([*data.buffers], data.pte_data) if data is not None else ([], {})
    for key, entry in entries.items():
        content = buffers[entry.buffer_index]
        recipes = _recipes(recording, memories.get(xxhash.xxh3_128_digest(content), ()), sources)
        found = {(key[:-DIGEST], xxhash.xxh3_128_digest(_replay(recipe, old, content))) for recipe in recipes}
        if len(found) != 1 or not found <= keys.keys():
            raise _NoRecipeError("other bytes are computed")
        before[key] = after[key] = keys[found.pop()]
        value = contents[before[key]]
        if recipes != [_STAYS]:
            origin = origin_of(recipes)
            after[key] = key[:-DIGEST] + digest_for(origin, value)
            made[after[key]], value = tuple(recipes), Apart(value, origin)
        data.buffers[entry.buffer_index] = value
    if {*before.values()} != {*contents} or substitute(result.processed_bytes, before) != delegate.processed_bytes:
        raise _NoRecipeError("what it makes depends on values of weights in a way that is not known")
    if data is not None:
        data.pte_data = {after[key]: entry for key, entry in entries.items()}
    return with_result(delegate, substitute(result.processed_bytes, after), data), made


def _preprocess(delegate: Any, weights: Mapping[str, torch.Tensor]) -> tuple[Any, Recording]:
    """Make a delegate of XNNPACK once more, with other weights."""
    from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend

    program = graphs.copy_program(delegate.original_module)
    for table in (program.state_dict, program.constants):
        table.update({name: value for name, value in weights.items() if name in table})
    backend = as_backend(XnnpackBackend.__name__, XnnpackBackend)
    if isinstance(backend, ExecutorchBackend):
        backend.prepare(program)
    with accelerating(), torch.no_grad(), Recording() as recording:
        result = XnnpackBackend.preprocess(program, delegate.compile_specs)
    for value in weights.values():
        recording.number(value)
    return result, recording


def _recipes(recording: Recording, numbers: Sequence[int], sources: _Sources) -> list[Recipe]:
    """Return what makes the content that these memories have, each once."""
    copies = [each for each in numbers if (recording.made_by[each] or ("",))[0] in _COPIES]
    copied = {one for each in copies for one in _operands(recording, each)}
    found: list[Recipe] = []
    for recipe in (_recipe(recording, number, sources) for number in numbers if number not in copied):
        found += [recipe] * (recipe not in found)
    return found


def _replay(recipe: Recipe, weights: Mapping[str, torch.Tensor], content: bytes) -> bytes | memoryview:
    try:
        return replay(recipe, weights, len(content)) if recipe.sources else content
    except (CorruptError, ValueError, TypeError, RuntimeError) as error:
        raise _NoRecipeError(str(error)) from None


def _vary(weights: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield other weights: numbers near the old ones, or the old integers in another order, as four bits hold them."""
    random = torch.Generator().manual_seed(0)
    for value in weights.values():
        with torch.no_grad():
            if value.is_floating_point():
                factor = torch.rand(value.shape, generator=random)
                made = (value.nan_to_num(0) * (0.5 + factor / 2) + factor / 1024).to(value.dtype)
            else:
                order = torch.randperm(value.numel(), generator=random)
                made = value.reshape(-1)[order].reshape(value.shape)
            made = torch.empty_like(value, requires_grad=False).copy_(made)
        yield torch.nn.Parameter(made, value.requires_grad) if isinstance(value, torch.nn.Parameter) else made


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
    leaves = pytree.tree_leaves(recording.made_by[memory], is_leaf=lambda value: isinstance(value, View))
    return [each.memory for each in leaves if isinstance(each, View)]
