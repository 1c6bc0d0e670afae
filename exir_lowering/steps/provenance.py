"""What a file says about how it was made: the versions, what was asked for and done, and the model's own names.

It has nothing that two lowerings of the same programs do not have in common, such as paths, times or options of speed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from xxhash import xxh3_128_digest

from exir_lowering import graphs
from exir_lowering._upstream import pins
from exir_lowering._upstream.delegates import named_buffers
from exir_lowering._upstream.fakes import expression, linear_in, names_of_symbols, ranges_in_file, shape_env_of
from exir_lowering._upstream.programs import bounds_of, has_limits, pytree
from exir_lowering._upstream.tensors import is_plain
from exir_lowering.errors import InputError, few, ignoring_errors
from exir_lowering.model import EdgeMethod, NarrowedDimension
from exir_lowering.options import LoweringOptions
from exir_lowering.plans.lowering_plan import LoweringPlan
from exir_lowering.pte.provenance import Bounds, Dimension, MethodProvenance, NamedValue, Provenance
from exir_lowering.steps.assumed_sizes import list_assumed
from exir_lowering.steps.file import EmitOptions, File

_VERSIONS = ("exir-lowering", "executorch", "torch")
_OPTIONS = (
    "non_convex",
    "on_backend_error",
    "assume",
    "edge_compile_config",
    "memory_planner",
    "bounds",
    "unsupported",
    "target",
)
"""The options of a lowering on which its result depends, but for the rewrites and partitioners, which are listed."""

_FORMS = ((0, 2, 3, 1), (1, 2, 3, 0))  # in which other orders of dimensions backends keep a weight of four

_OPERATORS = (type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add))
_UNBOUNDED = 1 << 31


def versions() -> dict[str, str]:
    """Return the versions on which the result of a lowering depends."""
    return {name: metadata.version(name) for name in _VERSIONS}


def describe(
    methods: Sequence[EdgeMethod], backends: Mapping[str, Any], planned: LoweringPlan, options: LoweringOptions
) -> Provenance:
    """Return what is known of a lowering before it is emitted; the backends are those that were called, by id."""
    made, chosen = {}, _differing(options, LoweringOptions(), _OPTIONS)
    if options.target is not None:
        chosen["target"] = Path(options.target).name  # where it lies differs from machine to machine
    for method in methods:
        names = tuple(_qualified(type(one)) for one in method.partitioners)
        counts = dict(sorted(Counter(one.rewrite for one in method.rewritings).items()))
        # The conversion knows less about sizes: a least of 0 or 1 becomes 2 there.
        original = method.converted_from or method.program
        inputs = tuple(NamedValue(name, _bounds(original, value)) for name, value in _user_inputs(original))
        outputs = tuple(_outputs(original, method.program))
        dimensions = tuple(_dimensions(original, declared=original is method.converted_from))
        joint = has_limits(method.program)
        made[method.name] = MethodProvenance(names, counts, inputs, outputs, dimensions=dimensions, joint=joint)
    return Provenance(
        dict(planned.versions),
        chosen,
        {backend_id: str(backend.version) for backend_id, backend in sorted(backends.items())},
        {},
        made,
    )


def complete(file: File) -> Provenance:
    """Return what is known of a file: its values as the emitter numbered them, and how many results delegates have."""
    known, config, methods = file.lowered.made_by, file.options.config, {}
    for name in file.lowered.programs:
        own = {value.number: value.name for value in file.values.get(name, ()) if not value.is_input}
        results = {call.delegate: call.results for call in file.calls.get(name, ()) if call.module is not None}
        counts = tuple(results[number] for number in sorted(results))
        methods[name] = replace(known.methods.get(name, MethodProvenance()), values=own, results=counts)
    emission = _differing(file.options, EmitOptions(), ("keep_originals",))  # the tables show the others
    if config is not None:
        settings = [each.name for each in fields(ExecutorchBackendConfig)]
        emission.update(_differing(config, ExecutorchBackendConfig(), settings))
    weights = _weights(file.lowered.programs)
    return replace(known, methods=methods, weights=weights, options={**known.options, **emission})


def _differing(options: Any, default: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the options that are not the default."""
    pairs = ((name, _plain(getattr(options, name)), _plain(getattr(default, name))) for name in names)
    return {name: value for name, value, usual in pairs if value not in (usual, {})}


def _plain(value: Any) -> Any:
    """Return an option as JSON; what has no value there by its class, as its text might have an address or a path."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return sorted((_plain(item) for item in value), key=json.dumps)
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, _OPERATORS):
        return str(value)
    if isinstance(value, EdgeCompileConfig):
        return _differing(value, EdgeCompileConfig(), [each.name for each in fields(value)])
    return _qualified(value if isinstance(value, type) else type(value))


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def list_narrowed(
    methods: Sequence[EdgeMethod], made: Mapping[str, ExportedProgram] = MappingProxyType({})
) -> tuple[NarrowedDimension, ...]:
    """Return the dimensions of inputs that have fewer sizes in what was made of methods than in what was given."""
    return tuple(narrowed for narrowed, _, _ in _narrowed(methods, made))


def narrowed_in_file(file: File) -> tuple[NarrowedDimension, ...]:
    """Return what has fewer sizes in a file than in the programs that were given, by the names of the latter."""
    programs, known = file.lowered.programs, file.lowered.made_by.methods
    found = {(one.method, one.input, one.dimension): one for one in file.report.narrowed}
    for one in list_narrowed([EdgeMethod(name, program) for name, program in programs.items()], file.programs):
        inputs = known.get(one.method, MethodProvenance()).inputs
        names = zip(_user_inputs(programs[one.method]), inputs, strict=False)
        name = next((given.name for (now, _), given in names if now == one.input), one.input)
        before = found.get((one.method, name, one.dimension), replace(one, input=name))
        found[one.method, name, one.dimension] = replace(before, converted=one.converted)
    return tuple(found.values())


def check_declared(methods: Sequence[EdgeMethod]) -> None:
    """Raise InputError if a dimension is narrowed that was declared, and not only by torch's least size of 2."""
    for narrowed, size, converted in _narrowed(methods):
        (low, high), (least, most) = narrowed.given, narrowed.converted
        env, symbols = shape_env_of(size), set(expression(size).free_symbols)
        named = symbols <= set(names_of_symbols(env).values())
        declared = named or not any(env.var_to_sources.get(one) for one in symbols)  # by a Dim, or in a file
        # Export itself takes sizes for at least 2.
        if declared and high is not None and (least > max(low, 2) or most is None or most < high):
            reasons = [str(guard.expr) for guard in converted.guards if symbols & guard.expr.free_symbols]
            raise InputError(
                f"Method {narrowed.method!r}: dimension {narrowed.dimension} of input {narrowed.input} was declared as "
                f"{low}..{high}, but its conversion to Edge dialect holds for {least}..{most} only"
                f"{f', as operators of the model depend on {few(reasons, 3)}' if reasons else ''}. Export with a Dim "
                f"of that range (min={least}, max={most}), or let torch choose it with Dim.AUTO."
                f"{pins.explain('sizes without guards')}"
            )


def _narrowed(
    methods: Sequence[EdgeMethod], made: Mapping[str, ExportedProgram] = MappingProxyType({})
) -> Iterator[tuple[NarrowedDimension, Any, Any]]:
    """Yield what is narrowed, with the size in the program that was given, and the environment of the converted one."""
    for method in methods:
        programs = (method.converted_from or method.program, made.get(method.name, method.program))
        lines = {node.name: graphs.sources.lines_of(node.users)[-1:] for node in graphs.user_inputs(programs[0])}
        for (name, given), (_, converted) in zip(*map(_user_inputs, programs), strict=False):
            env = shape_env_of(converted)
            sizes = zip(_sizes(programs[0], given), _sizes(programs[1], converted, ranges_in_file(env)), strict=False)
            for number, (before, after) in enumerate(sizes):
                if after[0] > before[0] or (after[1] is not None and (before[1] is None or after[1] < before[1])):
                    found = NarrowedDimension(method.name, name, number, before, after, "".join(lines[name]))
                    yield found, given.shape[number], env


def _user_inputs(program: ExportedProgram) -> list[tuple[str, Any]]:
    return [(node.name, node.meta.get("val")) for node in graphs.user_inputs(program)]


def _dimensions(program: ExportedProgram, declared: bool) -> Iterator[Dimension]:
    """Yield what is known of the sizes of inputs beside the bounds of each; a least size of 2 if it was declared."""
    places, names = dict[Any, list[tuple[int, int, int, int]]](), dict[Any, str]()
    for index, (_, value) in enumerate(_user_inputs(program)):
        for number, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if not isinstance(size, int) and (found := linear_in(size)) is not None:
                places.setdefault(found[0], []).append((index, number, *found[1:]))
                names.update({named: name for name, named in names_of_symbols(shape_env_of(size)).items()})
    # Those that are too small for what export assumed, where larger ones are not.
    assumed = (one for one in list_assumed(program) if one.wrong == tuple(one.sizes[: len(one.wrong)]))
    small = {one.symbol: one.wrong[-1] for one in assumed if one.wrong[-1] < one.sizes[-1]}
    for symbol, found_at in places.items():
        least = int(bounds_of(symbol, program.range_constraints).lower)
        # Export takes sizes without a Dim, and those that others are computed from, for at least 2, as does the
        # conversion, and eager mode takes others too.
        itself = declared and symbol in names and any(place[2:] == (1, 0) for place in found_at)
        least = max(least, 0) if least > 2 or itself else 0
        least = max(least, small.get(symbol, -1) + 1)
        if least or len(found_at) > 1 or found_at[0][2:] != (1, 0):
            yield Dimension(names.get(symbol, ""), least, tuple(found_at))


def _outputs(original: ExportedProgram, converted: ExportedProgram) -> Iterator[NamedValue]:
    """Yield what a method returns in its file: the new values of its inputs, then what the model returns."""
    entry = original.module_call_graph[0].signature if original.module_call_graph else None
    paths = _paths(entry.out_spec) if entry is not None else []
    values = {node.name: node.meta.get("val") for node in original.graph.nodes}
    specs = original.graph_signature.output_specs
    returned = [getattr(spec.arg, "name", "") for spec in specs if spec.kind is OutputKind.USER_OUTPUT]
    number = 0
    for spec in converted.graph_signature.output_specs:
        if spec.kind is OutputKind.USER_INPUT_MUTATION:
            yield NamedValue(str(spec.target), _bounds(original, values.get(str(spec.target))))
        elif spec.kind is OutputKind.USER_OUTPUT:
            name = paths[number] if number < len(paths) else f"output {number}"
            value = values.get(returned[number]) if number < len(returned) else None
            yield NamedValue(name, _bounds(original, value))
            number += 1


def _paths(spec: Any) -> list[str]:
    """Return names for what a model returns: the keys that lead to it, else its number."""
    leaves: list[Any] = []
    with ignoring_errors():  # a class of the model's may have no keys, or take nothing but tensors
        leaves, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(spec.num_leaves), spec))
    names = []
    for number, (path, _) in enumerate(leaves):
        keys = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path]
        only_numbers = all(isinstance(key, pytree.SequenceKey) for key in path)
        names.append(f"output {number}" if only_numbers else ".".join(keys))
    return names


def _bounds(program: ExportedProgram, value: Any) -> Bounds | None:
    """Return the bounds of a tensor's sizes; None if none of them is dynamic."""
    if not isinstance(value, torch.Tensor) or all(isinstance(size, int) for size in value.shape):
        return None
    return _sizes(program, value)


def _sizes(program: ExportedProgram, value: Any, known: Mapping[Any, Any] = MappingProxyType({})) -> Bounds:
    found: list[tuple[int, int | None]] = []
    for size in value.shape if isinstance(value, torch.Tensor) else ():
        least, greatest = size, size
        if not isinstance(size, int):
            bounds = bounds_of(size.node.expr, {**program.range_constraints, **known})
            ends = (int(end) if abs(end) < _UNBOUNDED else None for end in (bounds.lower, bounds.upper))
            least, greatest = ends
        found.append((max(least or 0, 0), greatest))
    return tuple(found)


def _weights(programs: Mapping[str, ExportedProgram]) -> dict[str, str]:
    """Return the model's names of the delegates' named data, by key, where it has a weight's bytes."""
    found: dict[str, str] = {}
    for program in programs.values():
        for _, module, attribute in graphs.delegates(program.graph_module):
            delegate, names = getattr(module, attribute), dict[bytes, str]()
            data = named_buffers(delegate.named_data_store_output)
            contents = {key: content for key, _, content in data if type(content) is bytes and key not in found}
            sizes = set(map(len, contents.values())) - {0}
            for spec in graphs.lifted_inputs(delegate.original_module).values() if contents else ():
                value = graphs.lifted_value(delegate.original_module, spec.target)
                if is_plain(value) and value.nbytes in sizes:
                    plain = value.detach()
                    for form in (plain, *(plain.permute(order) for order in _FORMS if plain.dim() == 4)):
                        kept: Any = form.contiguous().reshape(-1).view(torch.uint8).numpy()
                        names.setdefault(xxh3_128_digest(kept), str(spec.target))
            digests = ((key, xxh3_128_digest(content)) for key, content in contents.items())
            found.update((key, names[digest]) for key, digest in digests if digest in names)
    return found
