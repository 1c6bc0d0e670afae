"""A small backend for tests, and its delegate: operators as JSON, constants as named data, executed with torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from executorch.exir._serialize._named_data_store import NamedDataStore
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

from exir_lowering import (
    Artifact,
    Backend,
    CompileSpec,
    Delegate,
    DelegateContext,
    PreprocessResult,
    lower,
)
from exir_lowering.graphs import operator_name


class ScriptBackend(Backend):
    """Writes down a partition, operator by operator."""

    backend_id = "script"

    def preprocess(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        store, constants, steps = NamedDataStore(), {}, []
        signature = program.graph_signature
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        names.update(signature.inputs_to_lifted_tensor_constants)
        inputs = []
        for node in program.graph.nodes:
            if node.op == "placeholder" and node.name in names:
                target = names[node.name]
                tensor = (program.state_dict | program.constants)[target].detach().contiguous()
                key = f"script/{target}"
                store.add_named_data(key, tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
                constants[node.name] = [key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            elif node.op == "placeholder":
                inputs.append(node.name)
            elif node.op == "call_function":
                steps.append([node.name, operator_name(node), _plain(node.args), _plain(node.kwargs)])
        (output,) = (node for node in program.graph.nodes if node.op == "output")
        payload = {
            "inputs": inputs,
            "constants": constants,
            "steps": steps,
            "outputs": _plain(output.args[0]),
            "specs": [[spec.key, spec.value.decode()] for spec in compile_specs],
        }
        return PreprocessResult(json.dumps(payload).encode(), data_store_output=store.get_named_data_store_output())


class ScriptDelegate(Delegate):
    """Executes what `ScriptBackend` wrote down; counts what it is asked to do."""

    delegate_id = "script"

    def __init__(self) -> None:
        self.methods: list[str] = []
        self.executed = 0
        self.destroyed = 0

    def compile(self, processed: bytes, compile_specs: list[CompileSpec], context: DelegateContext) -> Any:
        script = json.loads(processed)
        if script["specs"] != [[spec.key, bytes(spec.value).decode()] for spec in compile_specs]:
            raise ValueError(f"compile specs {compile_specs}, expected {script['specs']}")
        self.methods.append(context.method)
        script["values"] = {}
        for name, (key, dtype, shape) in script["constants"].items():
            data = context.named_data(key)
            if data is None:
                raise KeyError(key)
            script["values"][name] = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)
        return script

    def execute(self, handle: Any, inputs: list[Any]) -> Sequence[Any]:
        self.executed += 1
        values = {**handle["values"], **dict(zip(handle["inputs"], inputs, strict=True))}
        for name, operator, args, kwargs in handle["steps"]:
            values[name] = _operator(operator)(*_filled(args, values), **_filled(kwargs, values))
        return list(_filled(handle["outputs"], values))

    def destroy(self, handle: Any) -> None:
        self.destroyed += 1


def scripted(programs: Any, partitioners: Any, **emit: Any) -> Artifact:
    """Lower with the backend at hand."""
    return lower(programs, partitioners, backends={"script": ScriptBackend()}).emit(**emit)


def _plain(value: Any) -> Any:
    def one(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            return {"node": leaf.name}
        return {"dtype": str(leaf).removeprefix("torch.")} if isinstance(leaf, torch.dtype) else leaf

    return pytree.tree_map(one, _lists(value))


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, Iterable) and not isinstance(value, str) else value


def _filled(value: Any, values: dict[str, Any]) -> Any:
    if isinstance(value, dict) and set(value) == {"node"}:
        return values[value["node"]]
    if isinstance(value, dict) and set(value) == {"dtype"}:
        return getattr(torch, value["dtype"])
    if isinstance(value, dict):
        return {key: _filled(item, values) for key, item in value.items()}
    return [_filled(item, values) for item in value] if isinstance(value, list) else value


def _operator(name: str) -> Any:
    if name in ("<built-in function getitem>", "getitem"):
        return lambda items, index: items[index]
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found
