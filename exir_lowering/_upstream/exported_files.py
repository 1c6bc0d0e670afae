"""The schema of files of exported programs, and the functions that make a program from its parts."""

from __future__ import annotations

from typing import Any

import sympy
import torch

# `torch.export.load` takes a path and unpickles; the function that reads the parts of a file has no public name.
from torch._export.serde import schema as program_schema, serialize as serde
from torch._export.serde.union import _Union as SchemaUnion

# The functions that torch gives to sympy when it reads a size, and how it multiplies out what it was given, which it
# does with each size that a node computes; the names are in no public module.
from torch.fx.experimental.symbolic_shapes import safe_expand
from torch.utils._sympy import functions as size_functions

# The name by which a pickle refers to the function that rebuilds fake tensors.
FAKE_TENSOR_READER = f"{serde._reconstruct_fake_tensor.__module__}.{serde._reconstruct_fake_tensor.__qualname__}"
SCHEMA_MAJOR = program_schema.SCHEMA_VERSION[0]


def schema_names() -> dict[str, Any]:
    """Return the classes of the schema of exported programs, as named in its type hints."""
    return vars(program_schema)


def from_schema(kind: str, tree: Any) -> Any:
    """Return JSON as a class of the schema, with numbers and texts unchecked; any Exception if it does not fit."""
    return serde._dict_to_dataclass(getattr(program_schema, kind), tree)  # type: ignore[no-untyped-call]


def is_union(value: Any) -> bool:
    """Return whether a value of the schema has one of several fields."""
    return isinstance(value, SchemaUnion)


def dtype_of(code: int) -> torch.dtype | None:
    """Return a dtype from its number in the schema."""
    found: torch.dtype | None = serde._SERIALIZE_TO_TORCH_DTYPE.get(code)
    return found


def evaluate_size(text: str) -> None:
    """Execute the text of a size, which was checked before, and multiply it out, as torch does; any Exception."""
    names = {name: one for name, one in vars(size_functions).items() if isinstance(one, type)}
    str(safe_expand(sympy.sympify(text, locals=names)))


def read_program(
    serialized: Any, state: dict[str, torch.Tensor], constants: dict[str, torch.Tensor], examples: Any
) -> torch.export.ExportedProgram:
    """Make a program from its parts, as `torch.export.load` does; bytes for state or constants would be unpickled."""
    return serde.ExportedProgramDeserializer().deserialize(serialized, state, constants, examples)
