"""A small accelerator that keeps its contract: a partitioner, a backend and a delegate of a few operators.

Each part is made of small methods, so that a mistake is a subclass of a few lines.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.export.graph_signature import InputKind
from torch.fx import Node

from exir_lowering import Backend, Delegate, InputError, PreprocessResult
from exir_lowering.partitioners import SupportPartitioner, where
from exir_lowering.plugins import PROVENANCE

SETS = {
    "elementwise": {
        "aten.sub.Tensor": torch.sub, "aten.mul.Tensor": torch.mul, "aten.add.Tensor": torch.add,
        "aten.tanh.default": torch.tanh, "aten.neg.default": torch.neg,
    },
    "convolution": {
        "aten.mm.default": torch.mm, "aten.convolution.default": torch.convolution, "aten.relu.default": torch.relu,
        "aten.permute_copy.default": lambda x, dims: x.permute(dims), "aten.addmm.default": torch.addmm,
    },
    "attention": {
        "aten.bmm.default": torch.bmm, "aten._softmax.default": torch._softmax, "aten.exp.default": torch.exp,
        "aten.permute_copy.default": lambda x, dims: x.permute(dims),
        "aten.view_copy.default": lambda x, shape: x.reshape(shape),
    },
}  # fmt: skip
"""Five operators each, by their names in Edge dialect."""

OPERATORS = {name: function for table in SETS.values() for name, function in table.items()}
MAGIC = b"ACC1"


def operator(node: Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


class AcceleratorPartitioner(SupportPartitioner):
    """Takes the operators of one set, of float32 tensors and constant arguments."""

    def __init__(self, operators: str) -> None:
        self.names = frozenset(SETS[operators])
        super().__init__({"accelerator": where(self.takes)})

    def takes(self, node: Node) -> bool:
        read = [node.meta.get("val"), *(one.meta.get("val") for one in node.all_input_nodes)]
        tensors = all(isinstance(one, torch.Tensor) and one.dtype == torch.float32 for one in read)
        return operator(node) in self.names and tensors and not node.kwargs


class AcceleratorBackend(Backend):
    """Writes a header, instructions as JSON, and the bytes of the weights."""

    backend_id = "accelerator"
    unread: ClassVar[frozenset[str]] = PROVENANCE

    def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
        tensors = {**program.state_dict, **program.constants}
        numbers: dict[str, int] = {}
        weights = []
        for spec in self.order(program.graph_signature.input_specs):
            numbers[spec.arg.name] = len(numbers)
            if spec.kind != InputKind.USER_INPUT:
                weights.append((numbers[spec.arg.name], self.read(tensors[spec.target])))
        inputs = [i for i in numbers.values() if i not in dict(weights)]
        steps, handles = [], {}
        for node in program.graph.nodes:
            if node.op == "call_function":
                if operator(node) not in OPERATORS:
                    raise NotImplementedError(f"the accelerator has no {operator(node)}")
                numbers[node.name] = len(numbers)
                arguments = torch.fx.map_arg(node.args, lambda one: {"%": numbers[one.name]})
                steps.append([operator(node), self.arrange(list(arguments))])
                if "debug_handle" in node.meta:
                    handles[len(steps) - 1] = node.meta["debug_handle"]
        results = [numbers[one.name] for one in program.graph.output_node().args[0]]
        shapes = [[number, list(one.shape)] for number, one in weights]
        content = self.finish({"inputs": inputs, "weights": shapes, "steps": steps, "results": results}, program)
        data = b"".join(one.numpy().tobytes() for _, one in weights)
        return PreprocessResult(pack(content, data), self.handles(handles))

    def order(self, specs: Any) -> Any:
        return specs

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().contiguous()

    def arrange(self, arguments: list[Any]) -> list[Any]:
        return arguments

    def finish(self, content: dict[str, Any], program: Any) -> dict[str, Any]:
        return content

    def handles(self, handles: dict[Any, Any]) -> Any:
        return handles


def pack(content: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(content).encode()
    body = struct.pack("<I", len(text)) + text + data
    return MAGIC + struct.pack("<I", zlib.crc32(body)) + body


def unpack(payload: bytes) -> tuple[dict[str, Any], bytes]:
    if payload[:4] != MAGIC or len(payload) < 12 or struct.unpack("<I", payload[4:8])[0] != zlib.crc32(payload[8:]):
        raise InputError("This is no payload of the accelerator, or it is damaged. Lower the model again.")
    return parse(payload)


def parse(payload: bytes) -> tuple[dict[str, Any], bytes]:
    end = 12 + struct.unpack("<I", payload[8:12])[0]
    return json.loads(payload[12:end]), payload[end:]


@dataclass(eq=False)
class Compiled:
    """What the delegate executes."""

    content: dict[str, Any]
    weights: dict[int, torch.Tensor]
    context: Any


class AcceleratorDelegate(Delegate):
    """Executes the instructions with torch."""

    delegate_id = "accelerator"

    def compile(self, processed: bytes, compile_specs: Any, context: Any) -> Any:
        content, data = self.open(processed)
        weights, at = {}, 0
        for number, shape in content["weights"]:
            count = torch.Size(shape).numel()
            weights[number] = torch.frombuffer(bytearray(data[at : at + 4 * count]), dtype=torch.float32).reshape(shape)
            at += 4 * count
        return Compiled(content, weights, context)

    def open(self, processed: bytes) -> tuple[dict[str, Any], bytes]:
        return unpack(processed)

    def execute(self, handle: Any, inputs: Any) -> Any:
        content = handle.content
        if len(inputs) != len(content["inputs"]):
            raise InputError(f"got {len(inputs)} inputs, expected {len(content['inputs'])}")
        values = {**handle.weights, **dict(zip(content["inputs"], inputs, strict=True))}
        first = len(content["weights"]) + len(content["inputs"])
        for number, (name, arguments) in enumerate(content["steps"]):
            given = [values[one["%"]] if isinstance(one, dict) else one for one in arguments]
            with handle.context.event(self.event(number)):
                values[first + number] = OPERATORS[name](*given)
        return [values[number] for number in content["results"]]

    def event(self, number: int) -> Any:
        return number
