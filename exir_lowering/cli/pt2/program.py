"""The exported program in a `.pt2` file: JSON in torch's schema, in which each text is checked before torch reads it.

torch makes Python code of the names in it, follows names of operators from attribute to attribute, evaluates symbolic
sizes and guards, and imports what structures name. So each text has to be what torch writes in its place.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import cache, partial
from typing import Annotated, Any

import torch

from exir_lowering._upstream.exported_files import evaluate_size, from_schema, is_union, schema_names
from exir_lowering._upstream.operators import list_registered_operators
from exir_lowering.errors import InputError, let_through
from exir_lowering.graphs import treespecs
from exir_lowering.graphs.operators import functions
from exir_lowering.graphs.operators.functions import HIGHER_ORDER, REFUSED, split_words
from exir_lowering.graphs.serialized.grammar import (
    PATH,
    ExcessiveFileError,
    UnsafeFileError,
    check_expression,
    check_guard,
    is_symbol,
    show,
)

DEEPEST = 200
"""How deep the JSON may nest: a graph in a graph takes six."""

MOST_DIMENSIONS = 64

MOST_UNBACKED = 1_000_000
"""The largest number in the name of a symbol, up to which torch counts."""

STEPS, STEPS_OF_CHARACTER = 3_000_000, 200
"""How many calls of functions sympy may need for all sizes of a file, and for each of their characters beside."""

DEVICES = frozenset(("cpu", "meta"))
DIALECTS = frozenset(("ATEN", "TRAINING", "EDGE", ""))

# torch takes a name such as `torch.os.system` apart, and follows it from attribute to attribute; here, the dispatcher
# has to have it. These lists say what a program may name. `graphs.operators.pure` says what a `.pte` file may have
# executed by its mere name: far less, and by schema. A program may have operators of libraries, which backends take.
NAMESPACES = split_words(
    """
    aten prims quantized_decomposed dim_order_ops executorch_prim et_copy export quant_fusion
    torchao torchvision torchaudio llama cadence cortex_m arm tosa
    """
)
"""The namespaces of operators that only compute: PyTorch's, ExecuTorch's and those of the libraries of models."""

_HIGHER_ORDER = HIGHER_ORDER | {"flex_attention", "with_effects"}

FUNCTIONS = {f"{one.__module__}.{one.__name__}" for one in functions.FUNCTIONS.values() if one.__module__ != "builtins"}
FUNCTIONS |= split_words(
    """
    torch._functorch.predispatch._add_batch_dim torch._functorch.predispatch._remove_batch_dim
    torch._functorch.predispatch._vmap_increment_nesting torch._functorch.predispatch._vmap_decrement_nesting
    torch._functorch.predispatch.lazy_load_decompositions
    """
)
"""Functions other than operators: of symbolic sizes, and those that `torch.vmap` is exported as."""

_OVERLOAD = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)", re.ASCII)
_HIGHER_ORDER_NAME = re.compile(r"torch\.ops\.higher_order\.(\w+)", re.ASCII)

Rule = Callable[[Any], None]


def parse(kind: str, content: bytes | bytearray) -> Any:
    """Read JSON as the class of torch's schema of that name, each field with its type; else an InputError."""
    try:
        tree = json.loads(content.decode())
        _check_depth(tree)
        made = from_schema(kind, tree)
        _check_types(made, type(made))
        return made
    except InputError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError) as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise InputError(f"it cannot be read as {kind} of torch's schema ({why})") from error


def check_program(program: Any) -> None:
    """Raise UnsafeFileError for text that torch does not write in its place, InputError for what is unknown here."""
    known = frozenset(list_registered_operators())  # without TorchScript's, which read and write files too
    sizes: Counter[str] = Counter()

    def check_size(text: Any) -> None:
        if text not in sizes:
            check_expression(text)
        sizes[text] += 1

    own: dict[str, Rule] = {
        "SymExpr.expr_str": check_size,
        "Node.target": partial(_check_target, known=known),
        "Argument.as_operator": partial(_check_target, known=known),
    }
    _walk(program, {**_RULES, **own})
    check_evaluation(sizes)
    for name in program.range_constraints:
        if not is_symbol(name) or len(re.sub(r"\D", "", name)) > len(str(MOST_UNBACKED)):
            raise UnsafeFileError(f"it has a symbol {name[:100]!r}")
    root = program.graph_module.module_call_graph
    if root and root[0].signature is not None:
        _check_keywords(treespecs.loads(root[0].signature.in_spec))


def check_path(name: Any) -> None:
    """Check the name of a weight; UnsafeFileError if it cannot be part of a Python string literal."""
    if PATH.fullmatch(name) is None or not name.isprintable():
        raise UnsafeFileError(f"it has a weight with the name {name[:100]!r}")


def check_device(device: Any) -> None:
    """Check the device of a tensor; InputError if it is neither one of `DEVICES` nor what accelerates this machine."""
    if device in DEVICES:
        return
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or device != accelerator.type:
        raise InputError(
            f"it has a tensor on the device {device[:100]!r}, which this machine does not have. Export the model on "
            "the CPU: model.cpu(), and the example inputs too"
        )


def _walk(value: Any, rules: Mapping[str, Rule]) -> None:
    if isinstance(value, (list, tuple)):
        for item in value:
            _walk(item, rules)
    elif isinstance(value, dict):
        for item in value.values():
            _walk(item, rules)
    elif dataclasses.is_dataclass(value):
        kind = type(value).__name__
        for name, item in _list_fields(value):
            rule = rules.get(f"{kind}.{name}")
            if rule is not None and item is not None:
                rule(item)
            _walk(item, rules)


def _list_fields(value: Any) -> list[tuple[str, Any]]:
    """Return the fields of an instance of the schema; a union has one."""
    if is_union(value):
        return [(value.type, value.value)]
    return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]


def _check_rank(sizes: Any) -> None:
    if len(sizes) > MOST_DIMENSIONS:
        raise InputError(f"it has a tensor of {len(sizes)} dimensions; allowed are {MOST_DIMENSIONS}")


def _check_name(name: Any) -> None:
    if not name.isidentifier():
        raise UnsafeFileError(f"it names a value {name[:100]!r}, which is not a Python identifier")


def _check_names(names: Any) -> None:
    for name in names:
        _check_name(name)


def _check_graph_name(name: Any) -> None:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UnsafeFileError(f"it has a nested graph with the name {name[:100]!r}")


def _refuse_objects(value: Any) -> None:
    if value:
        raise UnsafeFileError("it needs an object of a custom class (TorchBind), which is stored as a pickle")


def _check_structure(text: Any) -> None:
    try:
        treespecs.loads(text)
    except treespecs.ForeignNameError as error:
        raise UnsafeFileError(f"the structure of its arguments or outputs names {error}") from error
    except InputError as error:
        raise InputError(f"the structure of its arguments or outputs cannot be read: {error}") from error


def _check_guards(guards: Any) -> None:
    for guard in guards:
        check_guard(guard)


def _check_dialects(names: Any) -> None:
    if not names or not DIALECTS.issuperset(names):
        raise InputError(f"its dialects are {[name[:50] for name in names]}; expected one of {sorted(DIALECTS)}")


def _check_metadata(metadata: Any) -> None:
    for entry in metadata.get("source_fn_stack", "").split(";"):
        _check_source(entry.rpartition(",")[2])
    for key in ("custom", "from_node"):
        if key in metadata:
            _check_depth(json.loads(metadata[key]))


_FIELDS: Mapping[Rule, str] = {
    _check_name: """
        TokenArgument.name SymIntArgument.as_name SymFloatArgument.as_name SymBoolArgument.as_name
        GradientToUserInputSpec.user_input_name UserInputMutationSpec.user_input_name
    """,
    lambda name: _check_names([name] if name else ()): """
        TensorArgument.name Node.name NamedArgument.name InputToConstantInputSpec.name
    """,
    _check_names: """
        Graph.tensor_values Graph.sym_int_values Graph.sym_float_values Graph.sym_bool_values
        ModuleCallSignature.forward_arg_names
    """,
    _check_graph_name: "GraphArgument.name",
    check_path: """
        InputToParameterSpec.parameter_name InputToBufferSpec.buffer_name InputToTensorConstantSpec.tensor_constant_name
        BufferMutationSpec.buffer_name ParameterMutationSpec.parameter_name GradientToParameterSpec.parameter_name
        ModuleCallEntry.fqn
    """,
    _refuse_objects: "Graph.custom_obj_values Argument.as_custom_obj InputSpec.custom_obj",
    _check_metadata: "Node.metadata",
    _check_structure: "ModuleCallSignature.in_spec ModuleCallSignature.out_spec",
    check_device: "Device.type",
    _check_rank: "TensorMeta.sizes TensorMeta.strides",
    _check_guards: "ExportedProgram.guards_code",
    _check_dialects: "ExportedProgram.verifiers",
}
_RULES: Mapping[str, Rule] = types.MappingProxyType(
    {field: rule for rule, fields in _FIELDS.items() for field in fields.split()}
)


def _check_keywords(spec: Any) -> None:
    """Check the names of the arguments that are given by name: they are parameters in code that torch makes."""
    parts = spec.children()
    if [part.type for part in parts] != [tuple, dict]:
        raise InputError("its arguments are not a tuple and a dict")
    for name in parts[1].context:
        if not isinstance(name, str) or not name.isidentifier():
            raise UnsafeFileError(f"it has an argument with the name {str(name)[:100]!r}")


def _check_depth(tree: Any) -> None:
    """Check that JSON nests no deeper than torch can read."""
    level = [tree]
    for _ in range(DEEPEST):
        level = [child for one in level for child in _list_children(one)]
        if not level:
            return
    raise InputError(f"its JSON is nested more than {DEEPEST} levels deep")


def _list_children(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return list(tree.values())
    return tree if isinstance(tree, list) else []


@cache
def _find_hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, globalns=schema_names())


def _check_types(value: Any, hint: Any) -> None:
    """Check that a value is of the type that the schema says; torch takes any."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        _check_types(value, arguments[0])
    elif origin in (typing.Union, types.UnionType):
        if value is not None:
            _check_types(value, arguments[0])
    elif origin is list and isinstance(value, list):
        for item in value:
            _check_types(item, arguments[0])
    elif origin is dict and isinstance(value, dict):
        for item in value.values():
            _check_types(item, arguments[1])
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, hint):
        hints = _find_hints(hint)
        for name, item in _list_fields(value):
            _check_types(item, hints[name])
    elif not _is_plain(value, hint):
        raise TypeError(f"a {type(value).__name__} in place of {hint}")


def _is_plain(value: Any, hint: Any) -> bool:
    if hint is float:
        return type(value) in (int, float)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return type(value) is int or isinstance(value, hint)
    return hint in (str, int, bool) and type(value) is hint


def _check_target(name: str, known: frozenset[str]) -> None:
    """Check what a node calls: UnsafeFileError if it is in no closed list, InputError if it is not registered here."""
    higher = _HIGHER_ORDER_NAME.fullmatch(name)
    if name in FUNCTIONS or (higher and higher[1] in _HIGHER_ORDER):
        return
    overload = _OVERLOAD.fullmatch(name)
    if overload is None or overload[1] not in NAMESPACES or f"{overload[1]}::{overload[2]}" in REFUSED:
        raise UnsafeFileError(
            f"it calls {name[:200]!r}, which is not in the closed lists of operators that only compute"
        )
    space, operator, kind = overload.groups()
    if f"{space}::{operator}{'' if kind == 'default' else '.' + kind}" not in known:
        raise InputError(
            f"it calls {name!r}, which no library in this process has registered. Import the library that has it, or "
            "install the version of PyTorch that the program was exported with"
        )


def _check_source(name: str) -> None:
    """Check what a model called, which torch looks up: UnsafeFileError if the way leaves torch over a module there."""
    first, *rest = name.split(".")
    if first != "torch":
        return
    found: Any = torch
    for part in rest:
        if not isinstance(found, types.ModuleType):
            return
        found = vars(found).get(part)
        if isinstance(found, types.ModuleType) and found.__name__.partition(".")[0] != "torch":
            raise UnsafeFileError(f"a node names {name[:200]!r} as its source, which is not torch's")


# -- how long torch takes to evaluate symbolic sizes -------------------------------------------------------------------


def check_evaluation(sizes: Mapping[str, int]) -> None:
    """Evaluate checked symbolic expressions, each so often; ExcessiveFileError for one that takes too many calls."""
    # A short expression can have sympy multiply out millions of terms, and no simple rule says which does; the number
    # of calls is the same on every machine. The caller may have a profiler, which Python may not be able to put back.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_count_all_steps, sizes).result()


def _count_all_steps(sizes: Mapping[str, int]) -> None:
    allowed = STEPS + STEPS_OF_CHARACTER * sum(len(text) * count for text, count in sizes.items())
    left = allowed
    for text, count in sizes.items():
        left -= _count_steps(text, left)
        if left > 0 and count > 1:
            left -= (count - 1) * _count_steps(text, left)  # sympy remembers a part
        if left <= 0:
            raise ExcessiveFileError(
                f"the symbolic expression {show(text)} is refused: with it, evaluating the file's sizes takes more "
                f"than {allowed} steps, the limit for a file of this size"
            )


class _OutOfStepsError(BaseException):
    """Ends an evaluation; sympy handles what is an Exception."""


def _count_steps(text: str, most: int) -> int:
    """Return how many functions are called when a size is evaluated, `most` if that is not the end of it."""
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps >= most:
            raise _OutOfStepsError

    try:
        sys.setprofile(count)
        evaluate_size(text)
    except _OutOfStepsError:
        return most
    except Exception as error:  # torch will say what is wrong with it
        let_through(error)
    finally:
        sys.setprofile(None)
    return steps
