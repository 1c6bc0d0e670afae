"""The archive around an exported program: a ZIP file, with complete and plain members."""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Mapping
from typing import BinaryIO

from exir_lowering.errors import InputError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.graphs.serialized.grammar import UnsafeFileError

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
