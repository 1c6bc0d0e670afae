"""`LoweredModule`: an `nn.Module` whose methods are executed by their delegates."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn

from exir_lowering.errors import InputError, did_you_mean
from exir_lowering.lowered_module import bundled, record
from exir_lowering.lowered_module.convention import Convention
from exir_lowering.lowered_module.record import Record
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.pte import assembling, digests, saving
from exir_lowering.pte.assembling import MODULE
from exir_lowering.pte.container import open_program
from exir_lowering.pte.debug_info import SUFFIX, VERSION, DebugInfo
from exir_lowering.pte.digests import Verify
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.saving import TemporaryFolder
from exir_lowering.pte.value_kinds import NULL
from exir_lowering.runtime import LoadedProgram
from exir_lowering.runtime.by_name import Results
from exir_lowering.runtime.inputs import prepare
from exir_lowering.runtime.program import open_file
from exir_lowering.runtime.source import ProgramFile, Unavailable, read_file

Delegates = Mapping[str, Delegate | type[Delegate]] | Sequence[Delegate | type[Delegate]]


class LoweredMethod:
    """A method of a `LoweredModule`, called as the original was."""

    def __init__(self, loaded: LoadedProgram, method: MethodSpec, convention: Convention) -> None:
        self._loaded, self._method, self._convention = loaded, method, convention
        self.__name__ = self.__qualname__ = convention.method
        self.__signature__ = convention.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Execute the method, as the original was called, and return what the original returns.

        An argument that was fixed at export may be left out; tensors may be arrays of NumPy. What the original writes
        into its arguments is written into those that were given. Errors are those of `LoadedProgram.run`.
        """
        called, method = self._convention, self._method
        leaves = called.bind(args, kwargs)
        given = [
            None if fixed is not None and value.kind == NULL else leaf  # a file has None for a str
            for leaf, fixed, value in zip(leaves, called.inputs, method.inputs, strict=True)
        ]
        outputs = self._loaded.run(called.method, *prepare(f"{called.method}()", method, given, called.labels))
        called.write_back(leaves, outputs)
        return called.restore(outputs)

    def __repr__(self) -> str:
        return f"<lowered method {self._convention}>"


class LoweredModule(nn.Module):
    """Lowered methods as a module, made by `LoweredMethods.module` and `LoweredModule.load`.

    Each method is called by its name as the original was, `forward` by calling the module. A method whose name is not a
    Python identifier, or belongs to `nn.Module` or this class, is called as `module.method(name)(...)`. Delegates are
    executed on this machine.

    Attributes that are set are saved with it: None, bool, int, float, str, tensors, and lists, tuples and dicts of
    these. A name with a leading underscore is not saved.
    """

    def __init__(
        self, file: ProgramFile, loaded: LoadedProgram, contents: Record, folder: TemporaryFolder | None = None
    ) -> None:
        super().__init__()
        self.training = False
        self._file, self._loaded, self._folder = file, loaded, folder  # the folder has the data files of one in memory
        self._conventions = dict(contents.conventions)
        self._methods = {
            name: LoweredMethod(loaded, file.methods[name], one) for name, one in contents.conventions.items()
        }
        self._attributes, self._bundled = dict(contents.attributes), dict(contents.bundled)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        delegates: Delegates | None = None,
        unavailable: Unavailable = "error",
        verify: Verify = True,
    ) -> LoweredModule:
        """Load a module that `save` wrote, without the original model.

        Args:
            path: The path of the `.pte` file.
            data: The path of its `.ptd` data file, or a list of paths if it has several.
            delegates: As for `exir_lowering.load`.
            unavailable: As for `exir_lowering.load`.
            verify: As for `exir_lowering.load`.

        Returns:
            The module, with its attributes and bundled inputs.

        Raises:
            InputError: The file cannot be read, is damaged or was not saved by `save`; its data file was not given; or
                a method takes or returns a type that is not registered in this process.
            BackendUnavailableError, BackendFailure, PluginLoadError: As for `exir_lowering.load`.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise InputError(f"LoweredModule.load: got a {type(path).__name__}, expected the path of a .pte file.")
        several = data if isinstance(data, (list, tuple)) else () if data is None else (data,)
        if not all(isinstance(one, (str, os.PathLike)) for one in several):
            raise InputError("LoweredModule.load: data: expected the path of a .ptd file, or several in a list.")
        names = [Path(one).name for one in several]
        if len(set(names)) < len(names):
            raise InputError(
                f"LoweredModule.load: data: two of {', '.join(map(repr, names))} have the same name in different "
                "directories; save would write them to one file. Rename one of them."
            )
        file = read_file(path, data, verify)
        loaded = open_file(file, delegates, unavailable)
        contents = record.read(file.name, file.methods, open_program(file.file.content)[1].named.get(MODULE))
        return cls(file, loaded, contents)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the `.pte` file with the attributes, and its data files beside it.

        The debug information is `model.debug.json`, as for `Artifact.save`. When none is written, one from an earlier
        save is removed.

        Args:
            path: Where the `.pte` file goes. An existing file is replaced once the new one is complete.

        Returns:
            The path.

        Raises:
            InputError: An attribute, a bundled input or the structure of a method's arguments cannot be stored, or the
                path does not end in `.pte` or cannot be written. No file is written then.
        """
        target = saving.pte_path(path)
        pieces = record.write(Record(self._conventions, self._attributes, self._bundled))
        try:
            pieces = assembling.with_module(self._file.file.content, pieces)
        except CorruptError as error:
            raise InputError(f"{self._file.name} was changed by another tool: {error}. Make it again.") from None
        try:
            methods, beside = self._file.debug.methods, target.with_suffix(SUFFIX)
            files: dict[Path, saving.Write] = {target: lambda file: file.writelines(pieces)}
            for source in (Path(str(one.file.source)) for one in self._file.data.files):
                copy = target.parent / source.name
                if not (copy.exists() and os.path.samefile(copy, source)):
                    files[copy] = saving.copy_of(source)
            if methods:
                debug = DebugInfo(VERSION, digests.identity(pieces[-1]), methods).to_json().encode()
                files[beside] = methodcaller("write", debug)
            saving.replace_files(files, target)
            if not methods:  # an existing one belongs to an earlier file
                beside.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"Cannot save to {str(target)!r}: {error}") from error
        return target

    def method(self, name: str) -> LoweredMethod:
        """Return a method.

        Args:
            name: Its name, whether or not it is a Python identifier.

        Raises:
            InputError: There is no such method.
        """
        found: LoweredMethod | None = self._methods.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(map(repr, self._methods))
            raise InputError(f"The module has no method {name!r}; it has {known}.{did_you_mean(name, self._methods)}")
        return found

    @property
    def method_names(self) -> tuple[str, ...]:
        """The names of the methods."""
        return tuple(self._methods)

    @property
    def forward(self) -> LoweredMethod:  # type: ignore[override]
        """The method "forward", which calling the module calls."""
        if "forward" not in self._methods:
            raise AttributeError("forward")
        return self._methods["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Execute the method "forward"; see `LoweredMethod`.

        Raises:
            InputError: There is no such method, or it does not take the arguments.
        """
        self.method("forward")
        return super().__call__(*args, **kwargs)

    def run(self, method: str, /, *inputs: Any, **named: Any) -> Results:
        """Run a method with flat inputs, or names, and return flat results that have names; see `LoadedProgram.run`."""
        return self._loaded.run(method, *inputs, **named)

    def reset(self) -> None:
        """Put the state of all methods back to what the file starts with; see `LoadedProgram.reset`."""
        self._loaded.reset()

    @property
    def bundled_inputs(self) -> Mapping[str, tuple[Any, ...]]:
        """Calls that are saved with the module, by method: tuples of arguments, or dicts of arguments by name.

        They are copies, and cannot be changed in place. Set a dict of lists, or a list for the method "forward".

        Raises:
            InputError: What is set is not a call of a method.
        """
        return MappingProxyType(
            {name: bundled.list_calls(self._conventions[name], cases) for name, cases in self._bundled.items()}
        )

    @bundled_inputs.setter
    def bundled_inputs(self, given: Any) -> None:
        self._bundled = bundled.bind(self._conventions, given)

    def train(self, mode: bool = True) -> LoweredModule:
        """Do nothing for False.

        Args:
            mode: Whether the module is to be trained.

        Returns:
            The module.

        Raises:
            NotImplementedError: The mode is True: lowered methods are for inference.
        """
        if mode:
            also = " Its method 'train' is module.method('train')." if "train" in self._methods else ""
            raise NotImplementedError(f"A LoweredModule is for inference; it cannot be trained.{also}")
        return self

    def _refuse(self, name: str, *_: Any, **__: Any) -> NoReturn:
        raise InputError(
            f"{name!r} cannot be registered: a LoweredModule has no buffers, parameters or modules of its own, and "
            "would neither use nor save it. To save a plain tensor with it, set an attribute: module.name = tensor."
        )

    register_buffer = register_parameter = add_module = register_module = _refuse

    def _apply(self, fn: Any, recurse: bool = True) -> LoweredModule:
        """Accept `.to`, `.cpu` and the like when they change nothing."""
        moved = fn(torch.zeros(1))
        if isinstance(moved, torch.Tensor) and (moved.device.type, moved.dtype) != ("cpu", torch.float32):
            raise InputError(
                f"A LoweredModule cannot be converted to {moved.dtype} on {moved.device}: its programs are made for "
                "what they were exported with. Convert and export the model, and lower it again."
            )
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if not name:
            raise InputError("The attribute '' cannot be set: attributes are saved by name. Choose a name.")
        if name.startswith("_") or name in ("training", "bundled_inputs"):
            object.__setattr__(self, name, value)
            return
        if name in self._methods or hasattr(type(self), name):
            whose = "the module has a method of that name" if name in self._methods else "it is a name of nn.Module"
            raise InputError(f"The attribute {name!r} cannot be set: {whose}.")
        self._attributes[name] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        table: dict[str, Any] = {**self._methods, **self._attributes}
        if name not in table:
            raise AttributeError(f"The module has no method or attribute {name!r}; it has {', '.join(table)}.")
        return table[name]

    def __delattr__(self, name: str) -> None:
        if name in self._attributes:
            del self._attributes[name]
        else:
            super().__delattr__(name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._methods, *self._attributes})

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "A LoweredModule cannot be pickled or copied: use module.save(path), which writes no pickle, and "
            "LoweredModule.load(path)."
        )

    def __repr__(self) -> str:
        lines = []
        for name, one in self._conventions.items():
            by = ", ".join(self._file.methods[name].backends) or "ExecuTorch's kernels"
            missing = "" if name in self._loaded.runnable else ", which cannot be executed here"
            lines.append(f"{one}: {by}{missing}")
        if self._attributes:
            lines.append(f"attributes: {', '.join(self._attributes)}")
        if self._bundled:
            lines.append("bundled inputs: " + ", ".join(f"{name} ({len(c)})" for name, c in self._bundled.items()))
        return "LoweredModule(\n" + "".join(f"  {line}\n" for line in lines) + ")"
