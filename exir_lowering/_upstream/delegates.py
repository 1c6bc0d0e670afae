"""Lowered modules, which delegate calls call, and the named data that they provide."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

# Where a backend puts data that several payloads share; its module has no public alias.
from executorch.exir._serialize._named_data_store import NamedDataStore, NamedDataStoreOutput
from executorch.exir._serialize.data_serializer import DataEntry  # the entries of that store; no public alias either
from executorch.exir.backend.backend_details import PreprocessResult
from executorch.exir.lowered_backend_module import LoweredBackendModule as LoweredBackendModule  # what calls call
from executorch.exir.scalar_type import ScalarType
from executorch.exir.tensor_layout import TensorLayout
from torch._subclasses.fake_tensor import FakeTensorMode  # caches results, with the delegates that they were made with
from torch.export import ExportedProgram

from exir_lowering._upstream.edge import EdgeProgramManager
from exir_lowering._upstream.programs import fake_mode_of


@contextmanager
def forgetting_delegates(programs: Sequence[ExportedProgram]) -> Iterator[None]:
    """Drop the delegates that enter torch's caches of results on fake tensors, which are never cleared."""
    before = {id(table): set(map(id, table)) for table in _results(programs)}
    try:
        yield
    finally:
        for table in _results(programs):
            known = before.get(id(table), set())
            # Other threads add to the table meanwhile; a list is made of it at once.
            for key in list(table):
                if id(key) not in known and any(isinstance(part, LoweredBackendModule) for part in key.key):
                    table.pop(key, None)


def _results(programs: Iterable[ExportedProgram]) -> list[dict[Any, Any]]:
    modes = [fake_mode_of(program.graph_module) for program in programs]
    own = [mode.shape_env.fake_tensor_cache for mode in modes if mode is not None and mode.shape_env is not None]
    return [FakeTensorMode.cache, *own]


def named_data(data: Mapping[str, bytes], alignment: int) -> Any:
    """Return named data in the form that `PreprocessResult.data_store_output` takes."""
    store = NamedDataStore()
    for key, content in data.items():
        store.add_named_data(key, content, alignment)
    return store.get_named_data_store_output()


def named_data_contents(module: LoweredBackendModule) -> dict[str, bytes]:
    """Return the named data that a delegate provides, by key, whatever files it is for."""
    return {key: bytes(content) for key, _, content in named_buffers(module.named_data_store_output)}


def named_buffers(output: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield named data: the key, the data file ("" for the `.pte`), and the content: bytes, or what is on the disk."""
    for file, entries in () if output is None else {"": output.pte_data, **output.external_data}.items():
        for key, entry in entries.items():
            yield key, file, output.buffers[entry.buffer_index]


def place_named_data(module: LoweredBackendModule, file_of: Callable[[str, int], str | None]) -> LoweredBackendModule:
    """Return a delegate with the named data of its `.pte` in the files that `file_of` returns, None for the `.pte`."""
    output = module.named_data_store_output
    if output is None:
        return module
    inside: dict[str, Any] = {}
    outside = {file: dict(entries) for file, entries in output.external_data.items()}
    for key, entry in output.pte_data.items():
        file = file_of(key, len(output.buffers[entry.buffer_index]))
        (inside if file is None else outside.setdefault(file, {}))[key] = entry
    return changed(module, named_data_store_output=NamedDataStoreOutput(output.buffers, inside, outside))


def add_named_data(module: LoweredBackendModule, *added: Any) -> LoweredBackendModule:
    """Return a delegate that provides more named data; the given one is unchanged."""
    store = NamedDataStore()
    for output in (module.named_data_store_output, *added):
        if output is not None:
            store.merge_named_data_store(output)
    return changed(module, named_data_store_output=store.get_named_data_store_output())


def changed(module: LoweredBackendModule, **attributes: Any) -> LoweredBackendModule:
    """Return a delegate with other attributes; the given one is unchanged."""
    # ExecuTorch has no way to change it; its copies copy the weights of the original program too.
    copied: LoweredBackendModule = copy.copy(module)
    for name, value in attributes.items():
        setattr(copied, f"_{name}", value)
    return copied


def add_last_named_data(edge: EdgeProgramManager, key: str, content: bytes) -> None:
    """Add named data whose segment comes after all others in the `.pte` file; there is no public way to do so."""
    edge._named_data_store.add_named_data(key, content)


def delegate_info(result: PreprocessResult) -> Any:
    """Return what a backend wants to keep in its lowered module's metadata."""
    return result._delegate_info_meta


_RESULT_TYPES = (PreprocessResult, NamedDataStoreOutput, DataEntry, TensorLayout, ScalarType, dict, set, frozenset)


def dump_results(results: Sequence[PreprocessResult]) -> bytes:
    """Write results of backends that hold plain values and named data in memory; or PicklingError."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, MappingProxyType):
                return dict, (dict(value),)
            kind = value if isinstance(value, type) else type(value)
            if kind not in _RESULT_TYPES:
                raise pickle.PicklingError(f"a result holds a {kind.__name__}")
            return NotImplemented

    with io.BytesIO() as stream:
        Pickler(stream).dump(list(results))
        return stream.getvalue()


def load_results(content: bytes, count: int) -> list[PreprocessResult]:
    """Read so many results that `dump_results` wrote, or any error; nothing else is imported, found or called."""
    types = {(kind.__module__, kind.__qualname__): kind for kind in _RESULT_TYPES}

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return types[module, name]

    found = Unpickler(io.BytesIO(content)).load()
    if len(found) != count or not all(isinstance(one, PreprocessResult) for one in found):
        raise TypeError(f"{type(found).__name__} instead of {count} results")
    return list(found)
