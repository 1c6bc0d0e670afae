"""A backend of this package as a class that ExecuTorch's own lowering finds."""

from __future__ import annotations

import threading
from typing import Any

from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.export import ExportedProgram

from exir_lowering.errors import InputError
from exir_lowering.graphs.copies import list_tensors, private_copy
from exir_lowering.graphs.weights import WeightStore
from exir_lowering.plugins import registry
from exir_lowering.plugins.backend import Backend, BackendContext, context_argument

_CLASSES: dict[str, type[BackendDetails]] = {}  # ExecuTorch finds classes as long as something holds them
_LOCK = threading.Lock()


def as_backend_details(backend: Backend | type[Backend] | str) -> type[BackendDetails]:
    """Make a backend one of ExecuTorch's own, which `to_edge_transform_and_lower` and exporters find by its id.

    ExecuTorch looks for a class that has the id as its name. It lowers as ever: the partitions of each method are in
    one call of `preprocess_all`, and what this package checks of results is not checked.

    Args:
        backend: A `Backend` (object or class), or the id of a registered or installed one. Another one of the same id
            takes its place in ExecuTorch.

    Returns:
        The class; nothing has to be done with it.

    Raises:
        InputError: It is no `Backend`, has no id, or ExecuTorch has another class of that name.
        UnknownPluginError: No backend of that id is installed.
        PluginLoadError: The backend cannot be made.
    """
    backend_id: Any = backend if isinstance(backend, str) else getattr(backend, "backend_id", None)
    kind = backend if isinstance(backend, type) else type(backend)
    if not isinstance(backend_id, str) or not backend_id or not (kind is str or issubclass(kind, Backend)):
        expected = "expected an exir_lowering.Backend (object or class) with a backend_id, or the id of one"
        raise InputError(f"as_backend_details: got {backend!r}, {expected}.")
    with _LOCK:
        others = [one for one in BackendDetails.__subclasses__() if one.__name__ == backend_id]
        if others and others[0] is not _CLASSES.get(backend_id):
            place = f"{others[0].__module__}.{others[0].__qualname__}"
            raise InputError(
                f"as_backend_details: ExecuTorch has a backend {backend_id!r} already, {place}. Give yours another id."
            )
        made = registry.find_backend(backend_id, None if isinstance(backend, str) else {backend_id: backend})
        found: Any = _CLASSES.get(backend_id) or type(backend_id, (_Adapter, BackendDetails), {"__module__": __name__})
        found.backend = made
        return _CLASSES.setdefault(backend_id, found)


class _Adapter:
    """What ExecuTorch calls, for a backend."""

    backend: Backend

    @classmethod
    def copy_exported_program_for_preprocess(
        cls, edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> ExportedProgram:
        """Return a copy of the graph with the model's tensors, or the backend's own copy."""
        return cls.backend.copy_program(edge_program, compile_specs) or private_copy(edge_program, unbacked=True)

    @classmethod
    def preprocess(cls, edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        """Lower one program."""
        return cls.preprocess_multimethod({"forward": [edge_program]}, {"forward": [compile_specs]})["forward"][0]

    @classmethod
    def preprocess_multimethod(
        cls, edge_programs: dict[str, list[ExportedProgram]], compile_specs: dict[str, list[list[CompileSpec]]]
    ) -> dict[str, list[PreprocessResult]]:
        """Lower all programs in one call."""
        tensors = list_tensors(one for programs in edge_programs.values() for one in programs)
        also = context_argument(cls.backend.preprocess_all, BackendContext(WeightStore(tensors)))
        return cls.backend.preprocess_all(edge_programs, compile_specs, **also)
