"""Exported programs in files: what could run code in a `.pt2` file is refused before `torch.export.load` gets it.

Reading a file, torch unpickles weights, constants and example inputs; evaluates symbolic sizes (`sympy.sympify`), and
later guards (`exec`); makes Python code of the names of values; imports the modules of enumerations and default
factories that structures of arguments name; follows the names of operators from attribute to attribute; and loads
compiled code. Each text that does so is checked here. How much memory and time a file takes is not.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO

import torch
from torch.export.pt2_archive import PT2ArchiveReader

from exir_lowering._upstream.operators import list_registered_operators
from exir_lowering._upstream.programs import find_registered_type, list_registered_types
from exir_lowering.errors import InputError, explained
from exir_lowering.graphs import treespecs
from exir_lowering.graphs.operators.functions import FUNCTIONS, HIGHER_ORDER, REFUSED, split_words
from exir_lowering.graphs.serialized.grammar import PATH, UnsafeFileError, check_text

# What a program may call: torch follows a name such as `torch.os.system` from attribute to attribute, and compilers
# execute operators on constants.
_NAMESPACES = split_words(
    """
    aten prims quantized_decomposed dim_order_ops executorch_prim et_copy export quant_fusion
    torchao torchvision torchaudio llama cadence cortex_m arm tosa
    """
)
_VMAP = "_add_batch_dim _remove_batch_dim _vmap_increment_nesting _vmap_decrement_nesting lazy_load_decompositions"
_CALLED = frozenset(
    [f"{one.__module__}.{one.__name__}" for one in FUNCTIONS.values() if one.__module__ != "builtins"]
    + [f"torch.ops.higher_order.{name}" for name in HIGHER_ORDER | {"flex_attention", "with_effects"}]
    + [f"torch._functorch.predispatch.{name}" for name in _VMAP.split()]
)
_OVERLOAD = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)", re.ASCII)

# The fields of torch's schema whose keys are names that the program chose.
_MAPS = split_words(
    """
    tensor_values sym_int_values sym_float_values sym_bool_values custom_obj_values range_constraints config metadata
    opset_version treespec_namedtuple_fields as_string_to_argument
    """
)
_SAMPLE = "data/sample_inputs/model.pt"
_FAKE_TENSOR_READER = "torch._export.serde.serialize._reconstruct_fake_tensor"
Rules = Mapping[str, Callable[[Any], None]]


def check_devices(file: BinaryIO) -> None:
    """Raise InputError for a device in a file that is not here, for which torch ends the process."""
    with suppress(zipfile.BadZipFile, NotImplementedError), zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            tree = None
            with suppress(Exception):  # torch says what is wrong
                tree = json.loads(archive.read(name)) if name.endswith(".json") else None
            _walk(tree, {"type": _check_device})


def check_file(file: BinaryIO) -> BinaryIO:
    """Return the file, or a copy without example inputs of classes and foreign outputs; else UnsafeFileError."""
    rules, changed, renamed = _make_rules(), dict[str, bytes](), list[str]()
    with zipfile.ZipFile(file) as archive:
        names, folder = archive.namelist(), ""
        read: Callable[[str], bytes] = archive.read
        file.seek(0)
        try:
            found = PT2ArchiveReader(file)
        except RuntimeError:  # then torch reads the format of PyTorch 2.7 and before, with Python's reader of archives
            pickles = [name for name in names if name.startswith(("serialized_state_dict.", "serialized_constants."))]
            examples, model = "serialized_example_inputs.pt", "serialized_exported_program.json"
        else:
            if "version" in names or "serialized_exported_program.json" in names:
                raise UnsafeFileError("it is an archive in two formats at once")
            names, read, folder, examples = found.get_file_names(), found.read_bytes, "archive/", _SAMPLE
            pickles, model = _check_archive(names, read, rules), "models/model.json"
        tree = json.loads(read(model).decode(), object_hook=lambda one: _name_outputs(one, renamed))
        _walk(tree, rules)
        for name in pickles:
            _check_pickle(name, read(name))
        if renamed:
            changed[model] = json.dumps(tree).encode()
        if examples in names and not _check_pickle(examples, read(examples), droppable=True):
            changed[examples] = b""
        if not changed:
            return file
        with zipfile.ZipFile(copy := io.BytesIO(), "w") as written:
            for name in dict.fromkeys(names):
                written.writestr(folder + name, changed[name] if name in changed else read(name))
        return copy


def _name_outputs(found: dict[str, Any], renamed: list[str]) -> dict[str, Any]:
    """Make dicts, with their keys, of transformers' `ModelOutput`s whose classes are not here."""
    if isinstance(text := found.get("out_spec"), str) and "transformers" in text[: treespecs.LARGEST]:
        with suppress(Exception):  # `_check_structure` says what is wrong with it
            found["out_spec"] = json.dumps(json.loads(text, object_hook=lambda one: _name_outputs(one, renamed)))
    kind, keys = str(found.get("type")), str(found.get("context"))
    if not kind.startswith("transformers.") or not keys.startswith("[") or find_registered_type(kind):
        return found
    renamed.append(kind)
    return {**found, "type": "builtins.dict"}


def _check_archive(names: list[str], read: Callable[[str], bytes], rules: Rules) -> list[str]:
    """Check an archive of now but for its pickles, whose names are returned."""
    for name in names:
        if name.startswith(("data/aotinductor/", "models/")) and name != "models/model.json":
            raise UnsafeFileError(f"it has compiled code, or a second program ({name[:200]!r})")
    pickles = []
    for part in ("weights", "constants"):
        if f"data/{part}/model.pt" in names:
            pickles.append(f"data/{part}/model.pt")
            continue
        table = json.loads(read(f"data/{part}/model_{part}_config.json").decode())
        _walk(table, rules)
        for name, meta in table["config"].items():
            member = f"data/{part}/{meta['path_name']}"
            if part == "constants" and not meta["path_name"].startswith("tensor_"):
                raise UnsafeFileError(f"the constant {name!r} is a pickled object of a custom class ({member[:200]!r})")
            if meta.get("use_pickle"):
                pickles.append(member)
    return pickles


def _check_pickle(name: str, content: bytes, droppable: bool = False) -> bool:
    """Return whether torch reads a pickle with `weights_only`; False if it may be dropped, else UnsafeFileError."""
    if not content:
        return True
    damaged = f"its member {name!r} cannot be read"
    with explained(lambda error: InputError(f"{damaged} ({type(error).__name__}: {str(error)[:200]})")):
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
        if not unsafe:  # if this raises, torch unpickles everything
            torch.load(io.BytesIO(content), weights_only=True)
            return True
    classes: list[Any] = [*list_registered_types(), *treespecs.enumerations()]
    known = {f"{one.__module__}.{one.__qualname__}" for one in classes if isinstance(one, type)}
    if droppable and known.issuperset(set(unsafe) - {_FAKE_TENSOR_READER}):
        return False
    named = ", ".join(repr(one) for one in unsafe[:5] if one not in known)
    raise UnsafeFileError(f"its member {name[:200]!r} is a pickle that calls {named} when it is read")


def _walk(tree: Any, rules: Rules) -> None:
    """Apply the rule of each field that has one, wherever it is: torch ignores fields that it does not know."""
    left = [(tree, False)]
    while left:
        value, is_map = left.pop()
        if isinstance(value, list):
            left.extend((item, False) for item in value)
        elif isinstance(value, dict):
            for key, item in value.items():
                if key in rules and not is_map and item is not None:
                    rules[key](item)
                left.append((item, key in _MAPS and not is_map))


def _expect(what: str, pattern: re.Pattern[str]) -> Callable[[Any], None]:
    """Return a rule for a text, the texts of a list, or the keys of a dict."""

    def check(value: Any) -> None:
        for one in [value] if isinstance(value, str) else value:
            if not pattern.fullmatch(one) or not one.isprintable():
                raise UnsafeFileError(f"it has {what} {one[:100]!r}")

    return check


def _check_structure(text: Any) -> Any:
    try:
        return treespecs.loads(text)
    except treespecs.ForeignNameError as error:
        raise UnsafeFileError(f"the structure of its arguments or outputs names {error}") from error


def _check_target(name: Any, known: frozenset[str]) -> None:
    overload = _OVERLOAD.fullmatch(name)
    if name in _CALLED:
        return
    if overload is None or overload[1] not in _NAMESPACES or f"{overload[1]}::{overload[2]}" in REFUSED:
        raise UnsafeFileError(f"it calls {name[:200]!r}, which is in no closed list of operators that only compute")
    space, operator, kind = overload.groups()
    if f"{space}::{operator}{'' if kind == 'default' else '.' + kind}" not in known:
        raise InputError(
            f"it calls {name!r}, which no library in this process has registered: --import MODULE imports it, unless "
            "it is of another version of PyTorch"
        )


def _check_device(device: Any) -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device not in ("cpu", "meta", accelerator and accelerator.type):
        raise InputError(
            f"it has a tensor on the device {str(device)[:100]!r}, which this machine does not have. Export the model "
            "on the CPU: model.cpu(), and the example inputs too"
        )


def _refuse_class(name: Any) -> None:
    raise UnsafeFileError(f"it needs an object of the custom class {str(name)[:100]!r}, which is stored as a pickle")


def _make_rules() -> Rules:
    known = frozenset(list_registered_operators())  # without TorchScript's, which read and write files too
    identifier = _expect("a value or an argument with the name", re.compile(r"([^\W\d]\w*(\.[^\W\d]\w*)*)?"))
    weight = _expect("a weight with the name", PATH)

    def check_arguments(text: Any) -> None:
        named = _check_structure(text).children()[1]
        identifier(named.context if named.type is dict else [])

    return {
        **dict.fromkeys(("name", "as_name", "user_input_name", "forward_arg_names"), identifier),
        **dict.fromkeys(("parameter_name", "buffer_name", "tensor_constant_name", "fqn", "config"), weight),
        **dict.fromkeys(("target", "as_operator"), lambda name: _check_target(name, known)),
        "range_constraints": _expect("a symbol", re.compile(r"(\D*\d){0,7}\D*")),  # torch counts up to its number
        "expr_str": lambda text: check_text("symbolic expression", text) and None,
        "guards_code": lambda guards: [check_text("guard", text) for text in guards] and None,
        "in_spec": check_arguments,
        "out_spec": _check_structure,
        "class_fqn": _refuse_class,
        "type": _check_device,
    }
