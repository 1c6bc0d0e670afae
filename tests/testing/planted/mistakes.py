"""Mistakes in an accelerator, each a few lines, with the cases that show it, and what the message has to say."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from accelerator import (
    AcceleratorBackend,
    AcceleratorDelegate,
    AcceleratorPartitioner,
    operator,
    parse,
)
from executorch.exir._serialize._named_data_store import NamedDataStore
from torch.export.graph_signature import InputKind

from exir_lowering import DelegationSpec, PartitionResult, PreprocessResult
from exir_lowering.runtime import LoadedProgram

HERE = 'mistakes.py", line '


@dataclass(frozen=True)
class Mistake:
    """What is wrong, and where it has to be seen.

    Attributes:
        name: What is wrong.
        case: A case that fails.
        check: What fails there.
        says: What the message contains; by default, nothing in particular.
        partitioner, backend, delegate: The parts, of which one is wrong.
    """

    name: str
    case: str
    check: str
    says: str = ""
    partitioner: Callable[[str], Any] = AcceleratorPartitioner
    backend: type[AcceleratorBackend] = AcceleratorBackend
    delegate: type[AcceleratorDelegate] = AcceleratorDelegate

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


MISTAKES: list[Mistake] = []


def planted(name: str, case: str, check: str, says: str = "") -> Callable[[Any], Any]:
    """Add a mistake: the class below."""

    def add(part: Any) -> Any:
        kinds = {
            "partitioner": AcceleratorPartitioner, "backend": AcceleratorBackend, "delegate": AcceleratorDelegate,
        }  # fmt: skip
        (kind,) = (kind for kind, base in kinds.items() if issubclass(part, base))
        MISTAKES.append(replace(Mistake(name, case, check, says), **{kind: part}))
        return part

    return add


# Partitioners


@planted("a check that raises", "life/two-programs", "partitioner", HERE)
class CheckRaises(AcceleratorPartitioner):
    def takes(self, node: Any) -> bool:
        return super().takes(node) and bool(node.meta["scale"])


@planted("a partitioner that raises", "life/two-programs", "partitioner", HERE)
class PartitionRaises(AcceleratorPartitioner):
    def partition(self, exported_program: Any) -> Any:
        return exported_program.graph_module.weights


@planted("a question that raises", "life/two-programs", "lower", HERE)
class QuestionRaises(AcceleratorPartitioner):
    def ops_to_not_decompose(self, ep: Any) -> Any:
        return [self.whole], None


@planted("takes less each second time", "degenerate/long-chain", "partitioner", "does not repeat itself")
class Forgetful(AcceleratorPartitioner):
    calls = 0

    def partition(self, exported_program: Any) -> Any:
        self.calls += 1
        self.count = 0
        return super().partition(exported_program)

    def takes(self, node: Any) -> bool:
        return super().takes(node) and not (self.calls % 2 and node.name.endswith("_3"))


@planted("removes metadata", "life/two-programs", "partitioner", "meta")
class RemovesMetadata(AcceleratorPartitioner):
    def partition(self, exported_program: Any) -> Any:
        result = super().partition(exported_program)
        for node in result.tagged_exported_program.graph.nodes:
            node.meta.pop("val", None)
        return result


@planted("adds an operator", "life/two-programs", "partitioner", "may only set node.meta")
class Adds(AcceleratorPartitioner):
    def partition(self, exported_program: Any) -> Any:
        result = super().partition(exported_program)
        graph = result.tagged_exported_program.graph
        with graph.inserting_before(graph.output_node()):
            graph.call_function(torch.ops.aten.sin.default, (next(iter(graph.nodes)),))
        return result


@planted("a tag without a destination", "life/two-programs", "partitioner", "tag")
class NoDestination(AcceleratorPartitioner):
    def partition(self, exported_program: Any) -> Any:
        return PartitionResult(super().partition(exported_program).tagged_exported_program, {})


@planted("a destination that is a name", "life/two-programs", "partitioner", "expected DelegationSpec")
class NamedDestination(AcceleratorPartitioner):
    def partition(self, exported_program: Any) -> Any:
        result = super().partition(exported_program)
        return replace(result, partition_tags=dict.fromkeys(result.partition_tags, "accelerator"))


@planted("another backend", "life/two-programs", "lower", "'acelerator'")
class Misspelt(AcceleratorPartitioner):
    def partition(self, exported_program: Any) -> Any:
        result = super().partition(exported_program)
        return replace(result, partition_tags=dict.fromkeys(result.partition_tags, DelegationSpec("acelerator", [])))


@planted("nothing is returned", "life/two-programs", "partitioner", "expected a PartitionResult")
class ReturnsNothing(AcceleratorPartitioner):
    def partition(self, exported_program: Any) -> Any:
        super().partition(exported_program)


@planted("takes what the backend refuses", "ops/cat", "preprocess", "leave that on the host")
class TakesAll(AcceleratorPartitioner):
    def takes(self, node: Any) -> bool:
        return node.op == "call_function"


# Backends


@planted("numbers inputs from the last one", "degenerate/output-order", "numbers")
class InputsReversed(AcceleratorBackend):
    def finish(self, content: Any, program: Any) -> Any:
        return {**content, "inputs": content["inputs"][::-1]}


@planted("swaps the values of an operator", "weights/buffer", "numbers")
class ValuesSwapped(AcceleratorBackend):
    def arrange(self, arguments: list[Any]) -> list[Any]:
        values = [one for one in arguments if isinstance(one, dict)]
        return [*values[::-1], *arguments[len(values) :]]


@planted("weights are zero", "weights/buffer", "numbers")
class WeightsZero(AcceleratorBackend):
    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape)


@planted("weights are read as they lie", "weights/transposed", "numbers")
class WeightsPacked(AcceleratorBackend):
    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().as_strided(tensor.shape, torch.empty(tensor.shape).stride()).clone()


@planted("weights begin where their memory does", "weights/offset", "numbers")
class WeightsFromStart(AcceleratorBackend):
    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().as_strided(tensor.shape, tensor.stride(), 0).contiguous()


@planted("writes into a weight", "weights/buffer", "contract", "wrote into")
class WritesWeights(AcceleratorBackend):
    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.detach().mul_(2)
        return super().read(tensor)


@planted("buffers before parameters", "weights/order", "numbers")
class WeightsSwapped(AcceleratorBackend):
    def finish(self, content: Any, program: Any) -> Any:
        numbers = [number for number, _ in content["weights"]][::-1]
        return {**content, "weights": [[n, shape] for n, (_, shape) in zip(numbers, content["weights"], strict=True)]}


class Regrouped(AcceleratorBackend):
    """Gets all partitions in one call."""

    def preprocess_all(self, edge_programs: Any, compile_specs: Any, *, context: Any = None) -> Any:
        return self.regroup(super().preprocess_all(edge_programs, compile_specs, context=context))

    def regroup(self, results: Any) -> Any:
        return results


@planted("swaps methods", "methods/same-name-other-weight", "numbers")
class MethodsSwapped(Regrouped):
    def regroup(self, results: Any) -> Any:
        return dict(zip(results, reversed(results.values()), strict=True))


@planted("swaps partitions", "partitions/alike", "numbers")
class PartitionsSwapped(Regrouped):
    def handles(self, handles: Any) -> Any:
        return None  # they would be those of another partition, which is found before

    def regroup(self, results: Any) -> Any:
        return {method: found[::-1] for method, found in results.items()}


@planted("drops a partition", "partitions/alike", "contract", "returned 1 results for method 'forward', expected 2")
class PartitionDropped(Regrouped):
    def regroup(self, results: Any) -> Any:
        return {method: found[:1] for method, found in results.items()}


@planted("forgets a method", "methods/two", "contract", "missing: ['second']")
class MethodForgotten(Regrouped):
    def regroup(self, results: Any) -> Any:
        return dict(list(results.items())[:1])


@planted("returns no bytes", "life/two-programs", "contract", "expected bytes")
class NoBytes(AcceleratorBackend):
    def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
        result = super().preprocess(program, compile_specs)
        return replace(result, processed_bytes=bytearray(result.processed_bytes))


@planted("raises at a node", "life/two-programs", "preprocess", HERE)
class BackendRaises(AcceleratorBackend):
    def finish(self, content: Any, program: Any) -> Any:
        return {**content, "steps": content["steps"][len(content["steps"])]}


@planted("refuses without a name", "life/two-programs", "preprocess", "raise a NotImplementedError")
class RefusesWithoutName(AcceleratorBackend):
    def finish(self, content: Any, program: Any) -> Any:
        raise ValueError("not supported")


@planted("a counter in the payload", "life/two-programs", "determinism", "payload of partition 0")
class Counting(AcceleratorBackend):
    number = itertools.count()

    def finish(self, content: Any, program: Any) -> Any:
        return {**content, "number": next(self.number)}


@planted("an address in the payload", "life/two-programs", "determinism", "payload of partition 0")
class Addressed(AcceleratorBackend):
    kept: ClassVar[list[Any]] = []

    def finish(self, content: Any, program: Any) -> Any:
        self.kept.append(program)
        return {**content, "address": id(program)}


@planted("names in the payload", "cache/unread", "unread", "with other names:")
class Naming(AcceleratorBackend):
    def finish(self, content: Any, program: Any) -> Any:
        return {**content, "names": [node.name for node in program.graph.nodes]}


@planted("names of weights in the payload", "cache/unread", "unread", "with other names:")
class NamingWeights(AcceleratorBackend):
    def finish(self, content: Any, program: Any) -> Any:
        return {**content, "names": [spec.target for spec in program.graph_signature.input_specs]}


@planted("source lines in the payload", "cache/unread", "unread", "with other stack_trace:")
class Tracing(AcceleratorBackend):
    def finish(self, content: Any, program: Any) -> Any:
        return {**content, "lines": [str(node.meta.get("stack_trace")) for node in program.graph.nodes]}


@planted("modules in the payload", "cache/unread", "unread", "with other nn_module_stack:")
class Modules(AcceleratorBackend):
    def finish(self, content: Any, program: Any) -> Any:
        return {**content, "modules": [str(node.meta.get("nn_module_stack")) for node in program.graph.nodes]}


@planted("identifiers that are counted", "life/profile", "determinism", "debug_handle_map of partition 0")
class CountedHandles(AcceleratorBackend):
    number = itertools.count()

    def handles(self, handles: Any) -> Any:
        return {f"{next(self.number)}": handle for handle in handles.values()}


@planted("handles that no operator has", "life/two-programs", "contract", "names the debug handle 1000")
class UnknownHandles(AcceleratorBackend):
    def handles(self, handles: Any) -> Any:
        return dict.fromkeys(handles, 1000)


@planted("a cache by shapes", "partitions/alike", "numbers")
class CachedByShape(AcceleratorBackend):
    made: ClassVar[dict[str, Any]] = {}

    def handles(self, handles: Any) -> Any:
        return None

    def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
        shapes = [(operator(n), str(n.meta["val"].shape)) for n in program.graph.nodes if n.op == "call_function"]
        key = f"{[spec.kind for spec in program.graph_signature.input_specs]} {shapes}"
        return self.made.setdefault(key, super().preprocess(program, compile_specs))


@planted("a cache by the names of weights", "methods/same-name-other-weight", "numbers")
class CachedByName(AcceleratorBackend):
    made: ClassVar[dict[Any, Any]] = {}

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.made.setdefault((self.target, tensor.shape), super().read(tensor))

    def order(self, specs: Any) -> Any:
        for spec in specs:
            self.target = spec.target
            yield spec


@planted("named data by names of weights", "methods/same-name-other-weight", "")
class NamedByName(AcceleratorBackend):
    def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
        store = NamedDataStore()
        for spec in program.graph_signature.input_specs:
            if spec.kind != InputKind.USER_INPUT:
                tensor = {**program.state_dict, **program.constants}[spec.target]
                store.add_named_data(spec.target, self.read(tensor).numpy().tobytes())
        result = super().preprocess(program, compile_specs)
        return replace(result, data_store_output=store.get_named_data_store_output())


@planted("results from the last one", "degenerate/output-order", "numbers")
class ResultsReversed(AcceleratorBackend):
    def finish(self, content: Any, program: Any) -> Any:
        return {**content, "results": content["results"][::-1]}


@planted("the last result only", "degenerate/output-order", "outputs", "expected 3")
class LastResult(AcceleratorBackend):
    def finish(self, content: Any, program: Any) -> Any:
        return {**content, "results": content["results"][-1:]}


# Delegates


class Executing(AcceleratorDelegate):
    """Does something with inputs before, and with outputs after."""

    def execute(self, handle: Any, inputs: Any) -> Any:
        if len(inputs) != len(handle.content["inputs"]):
            return super().execute(handle, inputs)  # which raises
        return self.after(super().execute(handle, self.before(inputs)), inputs)

    def before(self, inputs: Any) -> Any:
        return inputs

    def after(self, outputs: Any, inputs: Any) -> Any:
        return outputs


@planted("swaps inputs", "degenerate/output-order", "numbers")
class SwapsInputs(Executing):
    def before(self, inputs: Any) -> Any:
        return inputs[::-1]


@planted("ignores inputs but the first", "degenerate/output-order", "numbers")
class IgnoresInputs(Executing):
    def before(self, inputs: Any) -> Any:
        return [inputs[0]] * len(inputs) if inputs else inputs


@planted("remembers the first call", "life/two-programs", "numbers")
class Remembers(AcceleratorDelegate):
    def execute(self, handle: Any, inputs: Any) -> Any:
        handle.first = getattr(handle, "first", None) or [one.clone() for one in super().execute(handle, inputs)]
        return handle.first


@planted("swaps outputs", "degenerate/output-order", "numbers")
class SwapsOutputs(Executing):
    def after(self, outputs: Any, inputs: Any) -> Any:
        return outputs[::-1]


@planted("leaves an output out", "degenerate/output-order", "outputs", "expected 3")
class LeavesOut(Executing):
    def after(self, outputs: Any, inputs: Any) -> Any:
        return outputs[:-1]


@planted("returns float64", "life/two-programs", "outputs", "float64")
class Double(Executing):
    def after(self, outputs: Any, inputs: Any) -> Any:
        return [output.double() for output in outputs]


@planted("returns flat outputs", "life/two-programs", "outputs")
class Flat(Executing):
    def after(self, outputs: Any, inputs: Any) -> Any:
        return [output.reshape(-1) for output in outputs]


@planted("computes in half precision", "life/two-programs", "numbers")
class Half(Executing):
    def after(self, outputs: Any, inputs: Any) -> Any:
        return [output.half().float() for output in outputs]


@planted("has the shapes of the first call", "dynamic/batch", "")
class FixedShapes(AcceleratorDelegate):
    def execute(self, handle: Any, inputs: Any) -> Any:
        outputs = super().execute(handle, inputs)
        handle.shapes = getattr(handle, "shapes", None) or [output.shape for output in outputs]
        return [
            torch.zeros(shape) if shape != output.shape else output
            for shape, output in zip(handle.shapes, outputs, strict=True)
        ]


@planted("reads memory without strides", "layout/channels-last", "numbers")
class IgnoresStrides(Executing):
    def before(self, inputs: Any) -> Any:
        return [one.as_strided(one.shape, torch.empty(one.shape).stride()) for one in inputs]


@planted("writes into an input", "life/two-programs", "inputs", "wrote to input 0")
class WritesInput(Executing):
    def after(self, outputs: Any, inputs: Any) -> Any:
        outputs = [output.clone() for output in outputs]
        inputs[0].numpy()[...] = 0
        return outputs


@planted("takes too many inputs", "errors/wrong-number-of-inputs", "inputs", "accepted 2 inputs instead of 1")
class TooMany(AcceleratorDelegate):
    def execute(self, handle: Any, inputs: Any) -> Any:
        return super().execute(handle, inputs[: len(handle.content["inputs"])])


@planted("an empty program for what cannot be read", "errors/no-payload", "payload", "accepted an empty payload")
class ReadsAnything(AcceleratorDelegate):
    def open(self, processed: bytes) -> Any:
        try:
            return super().open(processed)
        except ValueError:
            return {"inputs": [0], "weights": [], "steps": [], "results": [0]}, b""


@planted("zeros for weights that are cut off", "errors/truncated-payload", "payload", "% of a payload")
class PadsPayloads(AcceleratorDelegate):
    def open(self, processed: bytes) -> Any:
        content, data = parse(processed)
        return content, data + b"\0" * 10_000


@planted("no check of the header", "errors/changed-start", "payload", "byte 0 changed")
class NoHeader(AcceleratorDelegate):
    def open(self, processed: bytes) -> Any:
        content, data = parse(processed)
        good = processed[:4] == b"ACC1"
        return content, data if good else b"\0" * len(data)


class Keeps(AcceleratorDelegate):
    """Has a list of all handles."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def compile(self, processed: bytes, compile_specs: Any, context: Any) -> Any:
        self.kept.append(super().compile(processed, compile_specs, context))
        return self.kept[-1]


@planted("never lets go of a handle", "life/handles", "destroy", "more objects each time")
class NeverLetsGo(Keeps):
    pass


@planted("never empties its table", "life/handles", "destroy", "more objects each time")
class Table(Keeps):
    def compile(self, processed: bytes, compile_specs: Any, context: Any) -> Any:
        super().compile(processed, compile_specs, context)
        return len(self.kept) - 1

    def execute(self, handle: Any, inputs: Any) -> Any:
        return super().execute(self.kept[handle], inputs)


@planted("keeps handles that are tuples", "life/handles", "destroy", "more objects each time")
class KeepsTuples(AcceleratorDelegate):
    kept: ClassVar[list[Any]] = []

    def compile(self, processed: bytes, compile_specs: Any, context: Any) -> Any:
        self.kept.append((super().compile(processed, compile_specs, context), len(processed)))
        return self.kept[-1]

    def execute(self, handle: Any, inputs: Any) -> Any:
        return super().execute(handle[0], inputs)


@planted("keeps programs", "life/handles", "destroy", "0 destroyed")
class KeepsPrograms(AcceleratorDelegate):
    programs: ClassVar[list[Any]] = []

    def execute(self, handle: Any, inputs: Any) -> Any:
        frame: Any = sys._getframe()
        while frame is not None:
            self.programs += [value for value in frame.f_locals.values() if isinstance(value, LoadedProgram)]
            frame = frame.f_back
        return super().execute(handle, inputs)


@planted("empties a handle that two programs share", "life/two-programs", "execute", HERE)
class SharesHandles(AcceleratorDelegate):
    def __init__(self) -> None:
        self.made: dict[bytes, Any] = {}

    def compile(self, processed: bytes, compile_specs: Any, context: Any) -> Any:
        return self.made.setdefault(processed, [super().compile(processed, compile_specs, context)])

    def execute(self, handle: Any, inputs: Any) -> Any:
        return super().execute(handle[0], inputs)

    def destroy(self, handle: Any) -> None:
        handle.clear()


@planted("raises when it destroys", "life/two-programs", "destroy", HERE)
class DestroyRaises(AcceleratorDelegate):
    def destroy(self, handle: Any) -> None:
        del handle.buffer


@planted("raises when it compiles", "life/two-programs", "compile", HERE)
class CompileRaises(AcceleratorDelegate):
    def compile(self, processed: bytes, compile_specs: Any, context: Any) -> Any:
        return super().compile(processed, compile_specs[0], context)


@planted("compiles to nothing", "life/two-programs", "compile", "compile returned None")
class CompilesNothing(AcceleratorDelegate):
    def compile(self, processed: bytes, compile_specs: Any, context: Any) -> Any:
        super().compile(processed, compile_specs, context)


@planted("raises when it executes", "life/two-programs", "execute", HERE)
class ExecuteRaises(AcceleratorDelegate):
    def execute(self, handle: Any, inputs: Any) -> Any:
        return super().execute(handle, inputs + handle.missing)


@planted("takes another partition of the same number", "partitions/alike", "numbers")
class ByMethod(AcceleratorDelegate):
    def __init__(self) -> None:
        self.made: dict[str, Any] = {}

    def compile(self, processed: bytes, compile_specs: Any, context: Any) -> Any:
        return self.made.setdefault(context.method, super().compile(processed, compile_specs, context))


@planted("events of other names", "life/profile", "profile", "is not in the debug_handle_map")
class WrongEvents(AcceleratorDelegate):
    def event(self, number: int) -> Any:
        return f"step {number}"


@planted("events that are no names", "life/profile", "profile", "expected an identifier")
class NoEvents(AcceleratorDelegate):
    def event(self, number: int) -> Any:
        return float(number)


@planted("knows no empty tensors", "degenerate/empty-tensor", "execute", HERE)
class NoEmpty(Executing):
    def before(self, inputs: Any) -> Any:
        return [one + 0 * one.reshape(-1)[0] for one in inputs]
