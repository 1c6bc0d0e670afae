"""A whole backend and its delegate in under 60 lines: three operators of two arguments, and relu, as JSON."""

import json

import torch
from torch.export.graph_signature import InputKind, OutputKind

from exir_lowering import Backend, Delegate, InputError, PreprocessResult

OPERATORS = {"aten.add.Tensor": torch.add, "aten.sub.Tensor": torch.sub, "aten.mul.Tensor": torch.mul}
OPERATORS["aten.relu.default"] = torch.relu


class ToyBackend(Backend):
    backend_id = "toy"

    def preprocess(self, program, compile_specs):
        inputs, weights, steps = [], {}, []
        signature = program.graph_signature
        for spec in signature.output_specs:
            if spec.kind != OutputKind.USER_OUTPUT:
                raise InputError(f"toy keeps no state, and {spec.target} is written.")
        for spec in signature.input_specs:
            if spec.kind == InputKind.USER_INPUT:
                inputs.append(spec.arg.name)
            else:
                tensor = {**program.state_dict, **program.constants}[spec.target]
                weights[spec.arg.name] = [str(tensor.dtype)[6:], list(tensor.shape), tensor.tolist()]
        for node in program.graph.nodes:
            if node.op == "call_function":
                name = getattr(node.target, "__name__", str(node.target))
                if name not in OPERATORS or node.kwargs or not all(hasattr(arg, "name") for arg in node.args):
                    raise NotImplementedError(f"toy does not have {name} with {node.args}, {node.kwargs}.")
                steps.append([node.name, name, [arg.name for arg in node.args]])
        results = [node.name for node in program.graph.output_node().args[0]]
        return PreprocessResult(json.dumps(["toy 1", inputs, weights, steps, results]).encode())


class ToyDelegate(Delegate):
    delegate_id = "toy"

    def compile(self, processed, compile_specs, context):
        head, inputs, weights, steps, results = json.loads(processed)
        if head != "toy 1":
            raise InputError(f"This is no payload of toy 1: it starts with {head!r}.")
        made = {name: torch.tensor(v, dtype=getattr(torch, d)).reshape(s) for name, (d, s, v) in weights.items()}
        return inputs, made, steps, results

    def execute(self, handle, inputs):
        names, weights, steps, results = handle
        values = {**weights, **dict(zip(names, inputs, strict=True))}
        for name, operator, arguments in steps:
            values[name] = OPERATORS[operator](*(values[argument] for argument in arguments))
        return [values[name] for name in results]
