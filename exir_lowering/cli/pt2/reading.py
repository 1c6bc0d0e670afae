"""Read a `.pt2` file: the archive, its tensors and examples, and the program."""

from __future__ import annotations

import io
import itertools
import json
import logging
import pickletools
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch.export import ExportedProgram

from exir_lowering._upstream import exported_files
from exir_lowering._upstream.exported_files import FAKE_TENSOR_READER, SCHEMA_MAJOR, dtype_of
from exir_lowering._upstream.programs import list_registered_types
from exir_lowering.cli.pt2 import program
from exir_lowering.cli.pt2.program import check_device, check_path, parse
from exir_lowering.errors import InputError, let_through
from exir_lowering.graphs import treespecs
from exir_lowering.graphs.serialized.grammar import ExcessiveFileError, UnsafeFileError

MOST_MEMBERS = 1_000_000


class Archive:
    """The members of an open `.pt2` file: plain ones, so that what is read has one meaning, and no more bytes."""

    sizes: Mapping[str, int]  # by the member's name without the archive's folder

    def __init__(self, file: BinaryIO) -> None:
        """Read the list of members; UnsafeFileError for one that torch does not write, InputError for no ZIP file."""
        try:
            self._zip = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OverflowError) as error:
            let_through(error)
            raise InputError(f"it is not a ZIP archive ({type(error).__name__}: {error})") from error
        members = self._zip.infolist()
        if not members or len(members) > MOST_MEMBERS:
            raise InputError(f"it is an archive with {len(members)} files")
        for one in members:
            _check(one)
        size = file.seek(0, 2)
        if sum(one.file_size for one in members) > size:
            raise UnsafeFileError("its members overlap, or are larger than the file")
        folder = _folder([one.filename for one in members])
        self._members = {one.filename[len(folder) :]: one for one in members}
        if len(self._members) != len(members):
            raise UnsafeFileError("several of its members have the same name")
        self.sizes = {name: one.file_size for name, one in self._members.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def read(self, name: str) -> bytearray:
        """Return what is in a member; InputError if there is no such member, or it is damaged."""
        member = self._members.get(name)
        if member is None:
            raise InputError(f"it has no member {name!r}")
        content = bytearray(member.file_size)
        try:
            with self._zip.open(member) as stream:
                found = stream.readinto(content)  # type: ignore[attr-defined]
                surplus = stream.read(1)
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OSError) as error:
            let_through(error)
            raise InputError(f"its member {name!r} is damaged ({type(error).__name__}: {error})") from error
        if found != len(content) or surplus:
            raise InputError(f"its member {name!r} is cut short")
        return content


def _folder(names: list[str]) -> str:
    """Return the folder that all members are in, "" for the format before PyTorch 2.8, which has none."""
    first, slash, _ = names[0].partition("/")
    folder = first + slash
    return folder if slash and all(name.startswith(folder) for name in names) else ""


def _check(member: zipfile.ZipInfo) -> None:
    """Check that a member is what torch writes; UnsafeFileError if it is not."""
    name = member.filename
    parts = name.split("/")
    if not name.isprintable() or "\\" in name or not all(parts) or {".", ".."} & {*parts}:
        raise UnsafeFileError(f"it has a member with the name {name!r}")
    if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
        raise UnsafeFileError(f"its member {name!r} is compressed, which torch.export.save never does")
    if member.flag_bits & 0x1:
        raise UnsafeFileError(f"its member {name!r} is encrypted")
    mode = member.external_attr >> 16
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        raise UnsafeFileError(f"its member {name!r} is not a regular file")


_logger = logging.getLogger(__name__)

EXAMPLES = "data/sample_inputs/"
MOST_EXAMPLES = 1_000_000
MOST_EXPANDED = 2**30
"""How many bytes tensors may have beyond those in the file: some share memory, or repeat it, as an expanded mask."""

MODEL = "model"
"""The name that `torch.export.save` gives a program in its archive."""

_PAYLOAD = re.compile(r"[\w.\-]+")


def read_tensors(archive: Archive, part: Literal["weights", "constants"]) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model, or its constants; what shares memory in the file shares it here."""
    legacy = f"data/{part}/{MODEL}.pt"
    if legacy in archive:
        return read_state(f"the {part} {legacy!r}", archive.read(legacy))
    metas = parse("PayloadConfig", archive.read(f"data/{part}/{MODEL}_{part}_config.json")).config
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
    if "data.pkl" not in inner:
        raise InputError(f"{what} have no data.pkl: expected a dict of tensors that torch.save wrote")
    _refuse_memory(what, inner.read("data.pkl"))
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


_COMPILED = "data/aotinductor/"
_OLD = "serialized_exported_program.json"


def read_program(path: Path) -> ExportedProgram:
    """Read a program that `torch.export.save` wrote, from a stranger too: nothing in the file is executed.

    torch gets what was checked, instead of the file, which is opened once. UnsafeFileError (ExcessiveFileError if it
    takes much more memory or time than its size says) and InputError say what is wrong as a clause.
    """
    with path.open("rb") as file:
        parts = _read_parts(file)
    return exported_files.read_program(*parts)


def check_devices(path: Path) -> None:
    """Raise InputError for a device in a file that is not here, for which torch ends the process."""
    try:
        with zipfile.ZipFile(path) as archive:
            described = [archive.read(name) for name in archive.namelist() if name.endswith(".json")]
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error):
        return
    for content in described:
        _check_devices_in(content)


def _check_devices_in(content: bytes) -> None:
    try:
        json.loads(content, object_hook=_check_device)
    except InputError:
        raise
    except (ValueError, RecursionError):  # it is no JSON, or JSON that Python does not read
        return


def _check_device(table: dict[str, Any]) -> dict[str, Any]:
    for device in (table.get("device"), table.get("as_device")):
        if isinstance(device, dict) and isinstance(device.get("type"), str):
            program.check_device(device["type"])
    return table


def _read_parts(file: BinaryIO) -> tuple[Any, Any, Any, Any]:
    """Return a program in torch's schema, its weights, its constants and its example inputs, all checked."""
    archive = Archive(file)
    if _OLD in archive:
        return _read_old_parts(archive)
    if bytes(archive.read("archive_format")) != b"pt2":
        raise InputError("it is not an archive of torch.export.save")
    version = bytes(archive.read("archive_version"))
    if version.strip() != b"0":
        raise InputError(f"its archive version is {version[:20]!r}, expected 0")
    compiled = [name for name in archive.sizes if name.startswith(_COMPILED)]
    if compiled:
        raise UnsafeFileError(f"it has compiled code, which torch.export.load would load ({compiled[0]!r})")
    serialized = _parse_checked(archive.read(f"models/{MODEL}.json"))
    sample = f"{EXAMPLES}{MODEL}.pt"
    examples = read_examples(sample, archive.read(sample)) if sample in archive else None
    weights = read_tensors(archive, "weights")
    constants = read_tensors(archive, "constants")
    check_extents(archive, weights, constants, examples)
    return serialized, weights, constants, examples


def _read_old_parts(archive: Archive) -> tuple[Any, Any, Any, Any]:
    """Return the parts of a file of PyTorch 2.7 or before."""
    version = archive.read("version").decode("ascii", "replace").split(".")
    if version[0] != str(SCHEMA_MAJOR):
        raise InputError(f"its schema version is {version[0][:20]!r}, expected {SCHEMA_MAJOR}")
    serialized = _parse_checked(archive.read(_OLD))
    found = []
    for part in ("state_dict", "constants"):
        name = f"serialized_{part}.pt"
        # Before PyTorch 2.1 it had another ending.
        member = name if name in archive else f"serialized_{part}.json"
        found.append(read_state(f"the {part} {member!r}", archive.read(member)))
    sample = "serialized_example_inputs.pt"
    examples = read_examples(sample, archive.read(sample)) if sample in archive else None
    check_extents(archive, *found, examples)
    return serialized, found[0], found[1], examples


def _parse_checked(content: bytearray) -> Any:
    serialized = program.parse("ExportedProgram", content)
    try:
        program.check_program(serialized)
    except json.JSONDecodeError as error:
        raise InputError(f"its metadata is not JSON ({error})") from error
    return serialized
