"""What a program takes and returns: its signature, and how its modules were called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.export import ExportGraphSignature
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
    TokenArgument,
)

from exir_lowering._upstream.programs import pytree
from exir_lowering.errors import InputError
from exir_lowering.graphs import treespecs
from exir_lowering.graphs.serialized.arguments import ValueReader, ValueWriter
from exir_lowering.graphs.serialized.container import NotSerialisableError
from exir_lowering.graphs.serialized.grammar import check_identifier, check_path

_NAMED: dict[str, type[Any]] = {
    "tensor": TensorArgument,
    "int": SymIntArgument,
    "float": SymFloatArgument,
    "bool": SymBoolArgument,
    "token": TokenArgument,
}
_KINDS = {kind: name for name, kind in _NAMED.items()}


def write_signature(signature: ExportGraphSignature, values: ValueWriter) -> list[Any]:
    """Write a program's signature; NotSerialisableError if it has an argument that is an object."""
    return [
        [
            [spec.kind.name, _write_argument(spec.arg, values), spec.target, spec.persistent]
            for spec in signature.input_specs
        ],
        [[spec.kind.name, _write_argument(spec.arg, values), spec.target] for spec in signature.output_specs],
    ]


def read_signature(tree: Any, values: ValueReader) -> ExportGraphSignature:
    """Read a program's signature."""
    inputs, outputs = tree
    return ExportGraphSignature(
        input_specs=[
            InputSpec(InputKind[kind], _read_argument(argument, values), _optional_path(target), persistent)
            for kind, argument, target, persistent in inputs
        ],
        output_specs=[
            OutputSpec(OutputKind[kind], _read_argument(argument, values), _optional_path(target))
            for kind, argument, target in outputs
        ],
    )


def _write_argument(argument: Any, values: ValueWriter) -> list[Any]:
    if type(argument) is ConstantArgument:
        return ["constant", argument.name, values.write(argument.value)]
    kind = _KINDS.get(type(argument))
    if kind is None:
        raise NotSerialisableError(f"an argument of the type {type(argument).__name__}")
    return [kind, argument.name]


def _read_argument(tree: Sequence[Any], values: ValueReader) -> Any:
    kind, name, *rest = tree
    if not isinstance(name, str) or (name and kind != "constant" and check_identifier(name) != name):
        raise ValueError("an argument has a name")
    if kind == "constant":
        (value,) = rest
        return ConstantArgument(name, values.read(value))
    return _NAMED[kind](name)


def _optional_path(name: Any) -> str | None:
    return None if name is None else check_path(name)


def write_calls(entries: Sequence[ModuleCallEntry], values: ValueWriter) -> list[Any]:
    """Write how modules were called; NotSerialisableError if another process need not know an argument's type."""
    return [[entry.fqn, _write_call(entry.signature, values)] for entry in entries]


def read_calls(tree: Any, values: ValueReader) -> list[ModuleCallEntry]:
    """Read how modules were called."""
    return [ModuleCallEntry(check_path(fqn), _read_call(signature, values)) for fqn, signature in tree]


def _write_call(signature: ModuleCallSignature | None, values: ValueWriter) -> Any:
    if signature is None:
        return None
    return [
        [_write_argument(argument, values) for argument in signature.inputs],
        [_write_argument(argument, values) for argument in signature.outputs],
        _write_structure(signature.in_spec),
        _write_structure(signature.out_spec),
        signature.forward_arg_names,
    ]


def _read_call(tree: Any, values: ValueReader) -> ModuleCallSignature | None:
    if tree is None:
        return None
    inputs, outputs, in_spec, out_spec, names = tree
    return ModuleCallSignature(
        inputs=[_read_argument(argument, values) for argument in inputs],
        outputs=[_read_argument(argument, values) for argument in outputs],
        in_spec=treespecs.loads(in_spec),
        out_spec=treespecs.loads(out_spec),
        forward_arg_names=None if names is None else [check_identifier(name) for name in names],
    )


def _write_structure(spec: Any) -> str:
    try:
        text: str = pytree.treespec_dumps(spec)
        if treespecs.loads(text) == spec:
            return text
    except (NotImplementedError, TypeError, ValueError, InputError) as error:
        raise NotSerialisableError(f"the structure {str(spec)[:200]} ({error})") from error
    raise NotSerialisableError(f"the structure {str(spec)[:200]}: it would be read differently")
