"""The weights, constants and example inputs of a `.pt2` file."""

from __future__ import annotations

import io
import itertools
import logging
import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

from exir_lowering._upstream.exported_files import FAKE_TENSOR_READER, dtype_of
from exir_lowering._upstream.programs import list_registered_types
from exir_lowering.cli.pt2.archive import Archive
from exir_lowering.cli.pt2.program import check_device, check_path, parse
from exir_lowering.errors import InputError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.graphs import treespecs
from exir_lowering.graphs.serialized.grammar import ExcessiveFileError, UnsafeFileError

_logger = logging.getLogger(__name__)

EXAMPLES = "data/sample_inputs/"
MOST_EXAMPLES = 1_000_000
MOST_EXPANDED = 2**30
"""How many bytes tensors may have beyond those in the file: some share memory, or repeat it, as an expanded mask."""

_PAYLOAD = re.compile(r"[\w.\-]+")


def read_tensors(archive: Archive, model: str, part: Literal["weights", "constants"]) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model, or its constants; what shares memory in the file shares it here."""
    legacy = f"data/{part}/{model}.pt"
    if legacy in archive:
        return read_state(f"the {part} {legacy!r}", archive.read(legacy))
    metas = parse("PayloadConfig", archive.read(f"data/{part}/{model}_{part}_config.json")).config
    shared: dict[str, torch.Tensor] = {}
    return {name: _read_payload(archive, part, name, meta, shared) for name, meta in metas.items()}


def read_state(what: str, content: bytes | bytearray) -> dict[str, torch.Tensor]:
    """Return tensors by name that `torch.save` wrote; UnsafeFileError if reading them runs code, else InputError."""
    if not content:
        return {}
    found = _unpickle(what, content)
    tensors = isinstance(found, dict) and all(isinstance(one, torch.Tensor) for one in found.values())
    if not tensors or not all(isinstance(name, str) for name in found):
        raise InputError(f"{what} are not a dict of tensors by name")
    for name in found:
        check_path(name)
    return dict(found)


def read_examples(where: str, content: bytes | bytearray) -> Any:
    """Return the inputs that a program was exported with; None for values of classes, which lowering does not need.

    What a class does when torch unpickles it is not known; what calls anything else is an UnsafeFileError.
    """
    if not content:
        return None
    content = _check_inner(f"the example inputs {where!r}", content)
    unsafe = _list_unsafe(f"the example inputs {where!r}", content)
    foreign = [name for name in unsafe if not _is_value_class(name)]
    if foreign:
        raise UnsafeFileError(
            f"the example inputs {where!r} are a pickle that calls {', '.join(map(repr, foreign[:5]))} when it is read"
        )
    if unsafe:
        _logger.info("The example inputs in %r are left out: they have values of %s.", where, ", ".join(unsafe))
        return None
    found = _load(f"the example inputs {where!r}", content)
    is_call = (
        isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], tuple) and isinstance(found[1], dict)
    )
    # A small pickle can hold one list many times over.
    parts = itertools.islice(_iterate_parts(found), MOST_EXAMPLES + 1)
    return found if is_call and sum(1 for _ in parts) <= MOST_EXAMPLES else None


def _read_payload(archive: Archive, part: str, name: str, meta: Any, shared: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return one tensor; `shared` has the memory of each member that was read before."""
    check_path(name)
    member = f"data/{part}/{meta.path_name}"
    if _PAYLOAD.fullmatch(meta.path_name) is None:
        raise UnsafeFileError(f"the weight {name!r} is in the member {meta.path_name[:100]!r}")
    if part == "constants" and not meta.path_name.startswith("tensor_"):
        raise UnsafeFileError(f"the constant {name!r} is a pickled object of a custom class ({member!r})")
    if meta.use_pickle:
        pickled = _unpickle(f"the weight {name!r}", archive.read(member))
        if not isinstance(pickled, torch.Tensor):
            raise InputError(f"the weight {name!r} is a {type(pickled).__name__}")
        return pickled
    if meta.tensor_meta is None:
        raise InputError(f"the weight {name!r} has no shape")
    if meta.path_name not in shared:
        shared[meta.path_name] = _make_memory(name, archive.read(member), meta.tensor_meta)
    tensor = _make_view(name, shared[meta.path_name], meta.tensor_meta)
    return torch.nn.Parameter(tensor, requires_grad=meta.tensor_meta.requires_grad) if meta.is_param else tensor


def _make_memory(name: str, content: bytearray, meta: Any) -> torch.Tensor:
    """Return the memory of a tensor."""
    dtype = dtype_of(meta.dtype)
    if dtype is None:
        raise InputError(f"the weight {name!r} has the dtype {meta.dtype}, which this PyTorch does not have")
    check_device(meta.device.type)
    if len(content) % dtype.itemsize:
        raise InputError(f"the weight {name!r} has {len(content)} bytes, which is not a multiple of {dtype.itemsize}")
    tensor = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    if meta.device.type != "cpu":
        device = torch.device(meta.device.type, meta.device.index or 0)
        try:
            tensor = tensor.to(device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise InputError(
                f"the weight {name!r} is on {device}, which this machine does not have ({error})"
            ) from error
    if meta.requires_grad:
        tensor.requires_grad_(True)
    return tensor


def _make_view(name: str, flat: torch.Tensor, meta: Any) -> torch.Tensor:
    """Return a tensor in its memory."""
    numbers = [*meta.sizes, *meta.strides, meta.storage_offset]
    if any(one.type != "as_int" or not 0 <= one.as_int < 2**62 for one in numbers) or len(meta.sizes) > 64:
        raise InputError(f"the weight {name!r} has no fixed shape")
    sizes, strides = [one.as_int for one in meta.sizes], [one.as_int for one in meta.strides]
    try:
        return torch.as_strided(flat, sizes, strides, meta.storage_offset.as_int)
    except RuntimeError as error:
        raise InputError(f"the weight {name!r} does not lie within its memory ({str(error)[:200]})") from error


def check_extents(archive: Archive, *groups: Any) -> None:
    """Raise ExcessiveFileError if tensors, made whole as copies are, take more than the file and `MOST_EXPANDED`."""
    distinct = {}
    for one in (part for part in _iterate_parts(groups) if isinstance(part, torch.Tensor)):
        plain = one.layout is torch.strided and one.device.type != "meta"
        place = (one.data_ptr(), one.stride()) if plain and type(one) in (torch.Tensor, torch.nn.Parameter) else id(one)
        distinct[place, one.dtype, one.shape] = one.numel() * one.element_size()
    total, allowed = sum(distinct.values()), sum(archive.sizes.values()) + MOST_EXPANDED
    if total > allowed:
        raise ExcessiveFileError(
            f"its weights, constants and example inputs have {total} bytes when each is made whole, the largest "
            f"{max(distinct.values())}; allowed are {allowed}, which is the file's size and {MOST_EXPANDED}"
        )


def _check_inner(what: str, content: bytes | bytearray) -> bytes:
    """Return the archive that torch.save wrote as a plain one, with the members that were checked."""
    try:
        inner = Archive(io.BytesIO(content))
    except UnsafeFileError as error:
        raise type(error)(f"{what} are an archive in the archive, and {error}") from error
    except InputError as error:
        raise InputError(f"{what} are damaged, or a pickle of another kind ({error})") from error
    _refuse_memory(what, inner.read("data.pkl") if "data.pkl" in inner else bytearray())
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as plain:
        for name in inner.sizes:
            plain.writestr(f"archive/{name}", inner.read(name))
    return buffer.getvalue()


def _refuse_memory(what: str, pickled: bytearray) -> None:
    """Refuse what makes memory of a size that a pickle says, though torch takes it for safe."""
    try:
        names = [given for opcode, given, _ in pickletools.genops(bytes(pickled)) if opcode.name == "GLOBAL"]
    except Exception as error:  # of any kind, for a damaged file
        let_through(error)
        raise InputError(f"{what} are damaged ({type(error).__name__}: {str(error)[:200]})") from error
    if any(str(name).endswith(" bytearray") for name in names):
        raise ExcessiveFileError(f"{what} are a pickle that makes a bytearray when it is read")


def _list_unsafe(what: str, content: bytes | bytearray) -> list[str]:
    """Return what a pickle calls besides the functions that torch considers safe."""
    try:
        return list(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content)))
    except Exception as error:  # of any kind, for a damaged file
        let_through(error)
        raise InputError(
            f"{what} are damaged, or a pickle of another kind ({type(error).__name__}: {str(error)[:200]})"
        ) from error


def _unpickle(what: str, content: bytes | bytearray) -> Any:
    content = _check_inner(what, content)
    unsafe = _list_unsafe(what, content)
    if unsafe:
        raise UnsafeFileError(f"{what} are a pickle that calls {', '.join(map(repr, unsafe[:5]))} when it is read")
    return _load(what, content)


def _load(what: str, content: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:  # of any kind, for a damaged file
        let_through(error)
        raise InputError(f"{what} cannot be read ({type(error).__name__}: {str(error)[:200]})") from error


def _is_value_class(name: str) -> bool:
    """Return whether a name in a pickle is a class of inputs: registered with pytree, or an enumeration."""
    if name == FAKE_TENSOR_READER:
        return True
    classes: list[Any] = [*list_registered_types(), *treespecs.enumerations()]
    return any(isinstance(one, type) and f"{one.__module__}.{one.__qualname__}" == name for one in classes)


def _iterate_parts(value: Any) -> Iterator[Any]:
    left = [value]
    while left:
        one = left.pop()
        yield one
        if isinstance(one, (list, tuple)):
            left.extend(one)
        elif isinstance(one, Mapping):
            left.extend(one.values())
