"""Bad input: each a clear error of the right class, the input as it was, and nothing lost."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from executorch.exir import to_edge
from folders import SUPPORT
from lowering_support import TagPartitioner, delegates, snapshot
from torch.export import ExportedProgram
from torch.fx import Node

import exir_lowering
from exir_lowering import (
    Backend,
    BackendContractError,
    BackendFailure,
    CompileSpec,
    DelegationSpec,
    InputError,
    LoweringOptions,
    Partitioner,
    PartitionerContractError,
    PartitionResult,
    PluginLoadError,
    PreprocessResult,
    UnknownPluginError,
)
from exir_lowering.graphs import operator_name, walk

X = torch.tensor([1.0, -2.0, 3.0])


def check(condition: Any, message: str) -> None:
    """Fail with a message."""
    if not condition:
        pytest.fail(message)


class Model(torch.nn.Module):
    """A parameter larger than a block of the checksum, every kind of constant, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(1500.0).reshape(500, 3) / 100)
        self.register_buffer("kept", torch.tensor([4.0, 5.0, 6.0]))
        self.register_buffer("np", torch.tensor([7.0, 8.0, 9.0]), persistent=False)
        self.constant = torch.tensor([0.5, 0.25, 0.125])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x + self.weight).sum(dim=0) * self.kept
        y = torch.cond(y.sum() > 0, lambda v: v * 2 + 1, lambda v: v - 1, (y,))
        return y + self.np * self.constant


class Small(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * x


EXPORTED = torch.export.export(Model(), (X,))
EDGE = {
    "prefill": to_edge(EXPORTED).exported_program(),
    "decode": to_edge(torch.export.export(Small(), (X,))).exported_program(),
}


def _arithmetic(node: Node) -> str | None:
    name = operator_name(node)
    return f"t{id(node.graph)}" if name.startswith("aten.") and not name.startswith("aten.gt.") else None


def good_partitioner(backend: str = "good") -> TagPartitioner:
    return TagPartitioner(_arithmetic, backend)


class Good(Backend):
    """A backend without work."""

    backend_id = "good"

    def preprocess(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        return PreprocessResult(b"good")


def lower(partitioner: Any, backend: Any = Good, **more: Any) -> exir_lowering.LoweredMethods:
    """Lower both methods; `good` is the backend's id."""
    return exir_lowering.to_backend(EDGE, partitioner, backends={"good": backend}, **more)


# -- the input is as it was, and nothing is lost ---------------------------------------------------


@pytest.fixture(autouse=True)
def _nothing_lost() -> Iterator[None]:
    """After each test the programs are what they were, and the same call with good arguments succeeds."""
    everything = {**EDGE, "exported": EXPORTED}
    before = {name: snapshot(program) for name, program in everything.items()}
    yield
    for name, program in everything.items():
        after = snapshot(program)
        for part, value in before[name].items():
            check(after[part] == value, f"{part} of {name} changed")
    lowered = lower(good_partitioner())
    counts = [len(delegates(program)) for program in lowered.values()]
    check(counts == [4, 1], f"the good call makes {counts} delegates now")
    check(torch.equal(lowered["decode"].module()(X), Small()(X)), "the good call computes something else now")


def refused(kind: type[Exception], words: tuple[str, ...], call: Callable[[], Any]) -> Exception:
    """Check that a call raises an error of exactly this class whose message has these words."""
    try:
        result = call()
    except Exception as error:
        check(type(error) is kind, f"expected {kind.__name__}, got {type(error).__name__}: {error}")
        for word in words:
            check(word in str(error), f"expected {word!r} in: {error}")
        return error
    pytest.fail(f"expected {kind.__name__}, got {result!r}")


# -- what the caller gives -------------------------------------------------------------------------


def _manager() -> Any:
    return to_edge(torch.export.export(Small(), (X,)))


PROGRAMS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "module": (Small, ("got Small", "expected a torch.export.ExportedProgram", "torch.export.export(")),
    "module-in-map": (lambda: {"decode": Small()}, ("'decode'", "got Small", "torch.export.export(")),
    "none": (lambda: None, ("got NoneType", "expected a torch.export.ExportedProgram")),
    "empty": (dict, ("empty", "at least one method")),
    "key": (lambda: {7: EDGE["decode"]}, ("method name 7", "expected a text")),
    "no-name": (lambda: {"": EDGE["decode"]}, ("method name ''", "expected a text")),
    "list": (lambda: [EDGE["decode"]], ("got list", "a mapping of method names")),
    "space": (lambda: {"de code": EDGE["decode"]}, ("'de code'", "without spaces")),
    "control": (lambda: {"de\x1b[2Jcode": EDGE["decode"]}, ("'de\\x1b[2Jcode'", "characters that cannot be printed")),
}


@pytest.mark.parametrize("entry", [exir_lowering.to_backend, exir_lowering.lower], ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", PROGRAMS)
def test_something_that_is_no_program(case: str, entry: Callable[..., Any]) -> None:
    make, words = PROGRAMS[case]
    refused(InputError, words, lambda: entry(make(), good_partitioner(), backends={"good": Good}))


@pytest.mark.parametrize("value", [None, Small(), "forward"], ids=["none", "module", "string"])
def test_a_whole_program_that_is_none(value: Any) -> None:
    words = (f"got {type(value).__name__}", "expected a torch.export.ExportedProgram")
    backends = {"good": Good}
    refused(InputError, words, lambda: exir_lowering.lower_whole_program(value, "good", backends=backends))


def test_a_program_that_is_not_in_edge_dialect() -> None:
    programs = {"decode": EDGE["decode"], "prefill": EXPORTED}
    words = ("'prefill'", f"{EXPORTED.dialect} dialect", "expected Edge dialect", "exir_lowering.lower")
    given = {"backends": {"good": Good}}
    refused(InputError, words, lambda: exir_lowering.to_backend(programs, good_partitioner(), **given))


METHODS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "typo": ({"prefil": None}, ("'prefil'", "'prefill', 'decode'", "Did you mean 'prefill'?")),
    "unknown": ({"train": None}, ("no method 'train'", "'prefill', 'decode'")),
}


@pytest.mark.parametrize("case", METHODS)
def test_an_unknown_method_in_the_partitioner_map(case: str) -> None:
    methods, words = METHODS[case]
    refused(InputError, words, lambda: lower({name: good_partitioner() for name in methods}))


_NO_PARTITIONER = "expected an ExecuTorch Partitioner"

CHOSEN: dict[str, tuple[Any, tuple[str, ...]]] = {
    "class": (TagPartitioner, ("TagPartitioner", _NO_PARTITIONER, "Create an instance of it")),
    "number": (5, ("partitioners: got 5", _NO_PARTITIONER)),
    "number-in-map": ({"decode": 5}, ("partitioners['decode']: got 5", _NO_PARTITIONER)),
    "none-in-list": ([good_partitioner(), None], ("partitioners: got None", _NO_PARTITIONER)),
    "function": (lambda program: None, ("function", _NO_PARTITIONER)),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_something_that_is_no_partitioner(case: str) -> None:
    given, words = CHOSEN[case]
    refused(InputError, words, lambda: lower(given))


@pytest.mark.parametrize("name", ["xnpack", "XnnpackPartitioner"])
def test_a_partitioner_name_that_nobody_provides(name: str) -> None:
    words = (repr(name), "exir_lowering.partitioners", "Did you mean 'xnnpack'?", "exir-lower plugins")
    error = refused(UnknownPluginError, words, lambda: lower(name))
    check(error.plugin_id == name, "plugin_id is the name that was asked for")


FIELDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "non_convex": ("splti", ("non_convex='splti'", '"split" or "raise"')),
    "check_weights": ("no", ("check_weights='no'", "True or False")),
    "progress": (1, ("progress=1", "True or False")),
    "edge_compile_config": ({}, ("edge_compile_config={}", "EdgeCompileConfig")),
}


@pytest.mark.parametrize("field", FIELDS)
def test_an_option_of_the_wrong_type(field: str) -> None:
    value, words = FIELDS[field]
    refused(InputError, words, lambda: LoweringOptions(**{field: value}))


BACKENDS: dict[str, tuple[type[Exception], Any, tuple[str, ...]]] = {
    "list": (InputError, [Good()], ("backends=", "expected a mapping")),
    "key": (InputError, {1: Good}, ("backends=", "expected a mapping from ids")),
    "value": (PluginLoadError, {"good": 5}, ("'good'", "got 5", "expected an exir_lowering.Backend")),
    "abstract": (PluginLoadError, {"good": Backend}, ("'good'", "backend.Backend", "raised TypeError")),
    "missing": (UnknownPluginError, {"god": Good}, ("'good'", "Did you mean 'god'", "backends={")),
}


@pytest.mark.parametrize("case", BACKENDS)
def test_backends_of_the_wrong_type(case: str) -> None:
    kind, given, words = BACKENDS[case]
    call = lambda: exir_lowering.to_backend(EDGE, good_partitioner(), backends=given)  # noqa: E731
    refused(kind, words, call)


# -- partitioners ----------------------------------------------------------------------------------


class Also(TagPartitioner):
    """Does something besides its work to the program of "prefill"."""

    def __init__(self, also: Callable[[ExportedProgram], Any]) -> None:
        super().__init__(_arithmetic, "good")
        self.also = also

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        result = super().partition(exported_program)
        changed = self.also(exported_program)
        return changed if isinstance(changed, PartitionResult) else result


def named(program: ExportedProgram, name: str, depth: int = 0) -> Node:
    """Find a node by the start of its operator's name, in the graph at a depth."""
    return next(
        node
        for path, module in walk(program.graph_module)
        if len(path) == depth
        for node in module.graph.nodes
        if node.op == "call_function" and operator_name(node).startswith(name)
    )


def _adds(program: ExportedProgram, depth: int) -> None:
    node = named(program, "aten.mul", depth)
    with node.graph.inserting_after(node):
        node.graph.node_copy(node)


def _removes(program: ExportedProgram, depth: int) -> None:
    node = named(program, "aten.mul", depth)
    node.replace_all_uses_with(node.all_input_nodes[0])
    node.graph.erase_node(node)


def _reorders(program: ExportedProgram, depth: int) -> None:
    graph = named(program, "aten.mul", depth).graph
    first, second = (node for node in list(graph.nodes)[:2])
    second.append(first)


def _changes_argument(program: ExportedProgram, depth: int) -> None:
    node = named(program, "aten.mul", depth)
    node.args = (node.args[0], node.args[0])


REWRITES = [_adds, _removes, _reorders, _changes_argument]


@pytest.mark.parametrize("depth", [0, 1], ids=["top", "branch"])
@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda f: f.__name__.strip("_"))
def test_a_partitioner_that_rewrites_the_graph(rewrite: Callable[..., None], depth: int) -> None:
    words = ("Also", "'prefill'", "changed the graph", "node.meta['delegation_tag']", "before lowering")
    partitioner = {"prefill": Also(lambda program: rewrite(program, depth))}
    error = refused(PartitionerContractError, words, lambda: lower(partitioner))
    check(error.violation == "graph_modified", error.violation)


def _forgets(program: ExportedProgram, depth: int) -> None:
    del named(program, "aten.mul", depth).meta["val"]


def _converts(program: ExportedProgram, depth: int) -> None:
    node = named(program, "aten.mul", depth)
    node.meta["val"] = node.meta["val"].to(torch.float64)


def _takes_nothing(program: ExportedProgram, depth: int) -> None:
    program.graph_signature.input_specs.clear()


@pytest.mark.parametrize("depth", [0, 1], ids=["top", "branch"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_forgets, ("removed meta['val'] of node", "aten_mul_tensor")),
        (_converts, ("changed meta['val'] of node", "aten_mul_tensor", "from float32", "to float64")),
        (_takes_nothing, ("changed the signature", "has 0 inputs")),
    ],
    ids=["forgets", "converts", "takes nothing"],
)
def test_a_partitioner_that_changes_what_is_known_of_the_graph(
    change: Callable[..., None], words: tuple[str, ...], depth: int
) -> None:
    partitioner = {"prefill": Also(lambda program: change(program, depth))}
    error = refused(PartitionerContractError, ("Also", "'prefill'", *words), lambda: lower(partitioner))
    check(error.violation == "graph_modified", error.violation)


def test_what_a_partitioner_writes_into_weights_and_constants_is_lost() -> None:
    def write(program: ExportedProgram) -> None:
        for value in (*program.constants.values(), *program.state_dict.values()):
            value.data.fill_(7)
        program.constants.clear()

    class Asked(Also):
        def ops_to_not_decompose(self, ep: ExportedProgram) -> Any:
            write(ep)
            return [torch.ops.aten.sum.dim_IntList], lambda node: True

    program = torch.export.export(Model(), (X,))
    known = {name: value.clone() for name, value in {**program.state_dict, **program.constants}.items()}
    backends = {"good": Good}
    for call in (exir_lowering.plan, partial(exir_lowering.lower, backends=backends)):
        call(program, Asked(write))
        torch.testing.assert_close({**program.state_dict, **program.constants}, known, rtol=0, atol=0)


def _tag(node: Node, tag: Any) -> None:
    node.meta["delegation_tag"] = tag


def _first_input(program: ExportedProgram) -> Node:
    return next(node for node in program.graph.nodes if node.name == "x")


TAGS: dict[str, tuple[str, Callable[[ExportedProgram], Any], tuple[str, ...]]] = {
    "no-destination": (
        "tag_without_destination",
        lambda program: _tag(named(program, "aten.mul"), "lost"),
        ("aten_mul_tensor", "'lost'", "no destination", "DelegationSpec"),
    ),
    "input": (
        "input_tagged",
        lambda program: _tag(_first_input(program), "t"),
        ("tagged x", "input of the model", "a user input", "Expected"),
    ),
    "output": (
        "output_tagged",
        lambda program: _tag(program.graph.output_node(), "t"),
        ("output node", "Tag the operators"),
    ),
    "list-of-tags": (
        "destinations",
        lambda program: PartitionResult(program, ["t"]),
        ("partition_tags=['t']", "expected a mapping"),
    ),
    "spec-without-list": (
        "destinations",
        lambda program: PartitionResult(program, {"t": DelegationSpec("good", 5)}),
        ("'t'", "expected DelegationSpec(backend_id, [CompileSpec"),
    ),
    "another-program": (
        "graph_modified",
        lambda program: PartitionResult(EDGE["decode"], {"t": DelegationSpec("good", [])}),
        ("changed the graph",),
    ),
}


@pytest.mark.parametrize("case", TAGS)
def test_tags_that_cannot_be_followed(case: str) -> None:
    violation, also, words = TAGS[case]
    error = refused(PartitionerContractError, ("Also", "'prefill'", *words), lambda: lower({"prefill": Also(also)}))
    check(error.violation == violation, error.violation)


class Returns(Partitioner):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@pytest.mark.parametrize("value", [None, {}, EDGE["decode"]], ids=["none", "dict", "program"])
def test_a_partitioner_that_returns_something_else(value: Any) -> None:
    words = ("Returns", "'decode'", f"returned {type(value).__name__}", "expected a PartitionResult")
    error = refused(PartitionerContractError, words, lambda: lower({"decode": Returns(value)}))
    check(error.violation == "result_type", error.violation)


def test_a_partitioner_that_raises() -> None:
    cause = KeyError("aten.foo")
    words = ("Returns", "'decode'", "raised KeyError: 'aten.foo'", "raised at File", "raise self.value")
    error = refused(PartitionerContractError, words, lambda: lower({"decode": Returns(cause)}))
    check(error.violation == "raised", error.violation)
    check(error.__cause__ is cause, "the partitioner's own exception is the cause")


# -- backends: results -----------------------------------------------------------------------------


class Answers(Backend):
    """Changes the right answer for the whole group."""

    backend_id = "good"

    def __init__(self, change: Callable[[dict[str, list[Any]]], Any]) -> None:
        self.change = change

    def preprocess(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        raise NotImplementedError

    def preprocess_all(self, edge_programs: Any, compile_specs: Any) -> Any:
        right = {m: [PreprocessResult(b"x") for _ in programs] for m, programs in edge_programs.items()}
        return self.change(right)


def _replace_last(answer: dict[str, list[Any]], value: Any) -> dict[str, list[Any]]:
    answer["prefill"][-1] = value
    return answer


RESULTS: dict[str, tuple[Callable[[dict[str, list[Any]]], Any], tuple[str, ...]]] = {
    "too-few": (
        lambda r: {**r, "prefill": r["prefill"][:-1]},
        ("returned 3 results for method 'prefill'", "expected 4", "prefill/0:"),
    ),
    "not-a-list": (
        lambda r: {**r, "decode": r["decode"][0]},
        ("returned PreprocessResult results for method 'decode'", "expected 1"),
    ),
    "another-method": (
        lambda r: {"prefill": r["prefill"], "train": r["decode"]},
        ("missing: ['decode']", "not requested: ['train']"),
    ),
    "no-dict": (lambda r: list(r.values()), ("returned list", "expected a dict")),
    "no-result": (
        lambda r: _replace_last(r, b"x"),
        ("returned bytes for partition prefill", "expected a PreprocessResult"),
    ),
    "no-bytes": (
        lambda r: _replace_last(r, PreprocessResult("x")),
        ("processed_bytes of type str", "partition prefill", "expected bytes"),
    ),
}


@pytest.mark.parametrize("case", RESULTS)
def test_results_that_were_not_asked_for(case: str) -> None:
    change, words = RESULTS[case]
    refused(BackendContractError, ("'good'", *words), lambda: lower(good_partitioner(), Answers(change)))


class OneByOne(Backend):
    """Answers wrongly, or raises, for a partition that multiplies."""

    backend_id = "good"

    def __init__(self, value: Any) -> None:
        self.value = value

    def preprocess(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def test_preprocess_that_raises() -> None:
    cause = ArithmeticError("tile does not fit")
    where = ("method 'prefill'", "aten_sum", "test_bad_input.py", "y = (x + self.weight)")
    words = ("'good'", "ArithmeticError: tile does not fit", *where)
    error = refused(BackendFailure, words, lambda: lower(good_partitioner(), OneByOne(cause)))
    check(error.__cause__ is cause, "the backend's own exception is the cause")
    check("decode" not in str(error), "only the partition that failed is named")


def _raise(error: Exception) -> Any:
    raise error


def test_preprocess_all_that_raises() -> None:
    cause = ValueError("cannot share")
    words = ("'good'", "ValueError: cannot share", "method 'prefill'", "method 'decode'", "torch.sin(x) * x")
    error = refused(BackendFailure, words, lambda: lower(good_partitioner(), Answers(lambda right: _raise(cause))))
    check(error.__cause__ is cause, "the backend's own exception is the cause")
    check("y = torch.cond(" in str(error), "a branch's line is that of the model")
    check("<eval_with_key>" not in str(error), "a branch's line is that of generated code")


def test_a_whole_program_that_the_backend_refuses() -> None:
    cause = ValueError("cannot")
    words = ("'good'", "ValueError: cannot", "forward", "torch.sin(x) * x")
    refused(
        BackendFailure,
        words,
        lambda: exir_lowering.lower_whole_program(EDGE["decode"], "good", backends={"good": OneByOne(cause)}),
    )


# -- backends: weights -----------------------------------------------------------------------------


class Writes(Backend):
    """Writes into a tensor that it was lent."""

    backend_id = "good"

    def __init__(self, name: str, write: Callable[..., Any], then: Exception | None = None) -> None:
        self.name, self.write, self.then = name, write, then

    def preprocess(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        for table in (program.state_dict, program.constants):
            if self.name in table:
                self.write(table[self.name])
                if self.then is not None:
                    raise self.then
        return PreprocessResult(b"x")


class WritesAll(Writes):
    """As `Writes`, for the whole group."""

    def preprocess_all(self, edge_programs: Any, compile_specs: Any) -> Any:
        return {m: [self.preprocess(p, []) for p in programs] for m, programs in edge_programs.items()}


def _in_place(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(2)


def _one_element(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1)[-1] += 1


def _new_data(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data * 2


def _numpy(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[0] = -1


def _repack(tensor: torch.Tensor) -> None:
    """Permute within the first bytes: every sum over them stays."""
    flat = tensor.detach().view(-1)
    half = min(flat.numel(), 1000) // 2
    flat[: 2 * half] = torch.cat([flat[half : 2 * half], flat[:half]])


@pytest.fixture
def _restored() -> Iterator[None]:
    """Put back what a backend wrote: the engine cannot, it keeps no copy."""
    tensors = [t for table in (EDGE["prefill"].state_dict, EDGE["prefill"].constants) for t in table.values()]
    kept = [(tensor, tensor.data, tensor.detach().clone()) for tensor in tensors]
    yield
    for tensor, data, values in kept:
        tensor.data = data
        tensor.data.copy_(values)


WRITES = [_in_place, _one_element, _new_data, _numpy, _repack]


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(
    ("write", "name", "backend"),
    [(write, "weight", Writes) for write in WRITES]
    + [(_in_place, name, WritesAll) for name in ("kept", "np", "constant")],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_a_backend_that_writes_into_a_weight(write: Callable[..., None], name: str, backend: type[Writes]) -> None:
    words = ("'good'", "wrote into", f"prefill:{name}", "Restore", "copy")
    error = refused(BackendContractError, words, lambda: lower(good_partitioner(), backend(name, write)))
    others = {"weight", "kept", "np", "constant"} - {name}
    check(not any(f"prefill:{other}" in str(error) for other in others), f"names another tensor: {error}")


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("backend", [Writes, WritesAll], ids=["preprocess", "preprocess_all"])
def test_a_backend_that_writes_and_then_raises(backend: type[Writes]) -> None:
    cause = ValueError("too late")
    words = ("'good'", "wrote into prefill:kept", "ValueError: too late", "Restore")
    breaks = backend("kept", _in_place, cause)
    error = refused(BackendContractError, words, lambda: lower(good_partitioner(), breaks))
    check(isinstance(error.__cause__, BackendFailure), "the failure is the cause")


@pytest.mark.usefixtures("_restored")
def test_the_check_of_the_weights_can_be_left_out() -> None:
    options = LoweringOptions(check_weights=False)
    lowered = lower(good_partitioner(), Writes("kept", _in_place), options=options)
    check(len(lowered) == 2, "lowers both methods")


# -- emission --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lowered() -> exir_lowering.LoweredMethods:
    return exir_lowering.to_backend({"decode": EDGE["decode"]}, good_partitioner(), backends={"good": Good})


@pytest.fixture(scope="module")
def artifact(lowered: exir_lowering.LoweredMethods) -> exir_lowering.Artifact:
    return lowered.emit(constant_methods={"version": 3})


CONSTANTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "clash": ({"decode": 1}, ("constant_methods", "'decode'", "choose other names")),
    "type": ([1, 2], ("constant_methods", "expected a mapping", "list")),
    "key": ({1: 2}, ("constant_methods", "expected a mapping", "1")),
}


@pytest.mark.parametrize("case", CONSTANTS)
def test_constant_methods_that_cannot_be_emitted(case: str, lowered: exir_lowering.LoweredMethods) -> None:
    given, words = CONSTANTS[case]
    refused(InputError, words, lambda: lowered.emit(constant_methods=given))
    check(lowered.emit().buffer, "it can still be emitted")


def test_a_configuration_of_the_wrong_type(lowered: exir_lowering.LoweredMethods) -> None:
    refused(InputError, ("config", "got dict", "ExecutorchBackendConfig"), lambda: lowered.emit({"a": 1}))
    check(lowered.emit().buffer, "it can still be emitted")


def _directory_in_the_way(folder: Path) -> Path:
    (folder / "model.pte").mkdir()
    return folder / "model.pte"


def _file_in_the_way(folder: Path) -> Path:
    (folder / "file").write_text("old")
    return folder / "file" / "model.pte"


PATHS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "no-folder": (lambda folder: folder / "none" / "model.pte", ("none/model.pte", "there is no directory")),
    "no-suffix": (lambda folder: folder / "model", ("model'", "ends in .pte")),
    "other-suffix": (lambda folder: folder / "model.pt2", ("model.pt2", "ends in .pte")),
    "null": (lambda folder: str(folder / "a\0b.pte"), ("b.pte", "without a null character")),
    "folder": (_directory_in_the_way, ("model.pte", "Cannot save", "irectory")),
    "below-a-file": (_file_in_the_way, ("file/model.pte", "Cannot save")),
    "number": (lambda folder: 5, ("Cannot save", "5", "path")),
}


@pytest.mark.parametrize("case", PATHS)
def test_a_path_that_cannot_be_written(case: str, artifact: exir_lowering.Artifact, tmp_path: Path) -> None:
    make, words = PATHS[case]
    path = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    refused(InputError, words, lambda: artifact.save(path))
    check(sorted(tmp_path.rglob("*")) == before, "a file was left behind")
    check(artifact.save(tmp_path / "good.pte").read_bytes() == artifact.buffer, "a good path still works")


# -- plug-ins --------------------------------------------------------------------------------------


def _distribution(site: Path, name: str, entries: str, code: dict[str, str]) -> None:
    """Install a tiny distribution: its modules and the metadata that entry points are found by."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(textwrap.dedent(entries))
    for module, text in code.items():
        (site / f"{module}.py").write_text(textwrap.dedent(text))


PLUGIN = """
from exir_lowering import Backend, PreprocessResult


class Works(Backend):
    backend_id = "works"

    def preprocess(self, program, compile_specs):
        return PreprocessResult(b"works")


class Raises(Works):
    def __init__(self):
        raise OSError("no licence")


def make_none():
    return None


"""

PLUGIN_RUN = """
import json

import torch
from executorch.exir import to_edge
from folders import ROOT, SUPPORT
from lowering_support import TagPartitioner, delegates

import exir_lowering


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.sin(x)


program = to_edge(torch.export.export(Model(), (torch.zeros(3),))).exported_program()
before = str(program.graph)


def attempt(call):
    try:
        lowered = call()["forward"]
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["lowered", delegates(lowered)[0].processed_bytes.decode()]


def to(backend):
    return attempt(lambda: exir_lowering.to_backend(program, TagPartitioner(lambda node: "t", backend)))


found = {name: to(name) for name in (
    "works", "wroks", "twice", "gone", "raises"
)}
found |= {name: attempt(lambda: exir_lowering.to_backend(program, name)) for name in (
    "makes-none", "twice-partitioner",
)}
found["given"] = attempt(lambda: exir_lowering.to_backend(
    program, TagPartitioner(lambda node: "t", "twice"), backends={"twice": __import__("plugin_a").Works}
))
found["again"] = to("works")
found["unchanged"] = [str(program.graph) == before, ""]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    site = tmp_path_factory.mktemp("site")
    _distribution(
        site,
        "vendor_a",
        """
        [exir_lowering.backends]
        works = plugin_a:Works
        twice = plugin_a:Works
        gone = plugin_missing:Works
        raises = plugin_a:Raises

        [exir_lowering.partitioners]
        makes-none = plugin_a:make_none
        twice-partitioner = plugin_a:make_none
        """,
        {"plugin_a": PLUGIN},
    )
    _distribution(
        site,
        "vendor_b",
        """
        [exir_lowering.backends]
        twice = plugin_b:Works

        [exir_lowering.partitioners]
        twice-partitioner = plugin_b:make_none
        """,
        {"plugin_b": PLUGIN},
    )
    environment = {"PYTHONPATH": os.pathsep.join([str(site), str(SUPPORT), os.environ.get("PYTHONPATH", "")])}
    run = forked.run(PLUGIN_RUN, env=environment)
    check(run.returncode == 0, run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


PLUGINS: dict[str, tuple[str, tuple[str, ...]]] = {
    "wroks": ("UnknownPluginError", ("'wroks'", "was not found", "'works'", "install the package")),
    "twice": ("PluginLoadError", ("'twice'", "vendor_a 1.0", "vendor_b 1.0", "provided twice", "Uninstall")),
    "gone": ("PluginLoadError", ("'gone'", "vendor_a 1.0", "plugin_missing", "ModuleNotFoundError")),
    "raises": ("PluginLoadError", ("'raises'", "plugin_a.Raises", "OSError: no licence")),
    "makes-none": ("PluginLoadError", ("'makes-none'", "got NoneType", "expected an ExecuTorch Partitioner")),
    "twice-partitioner": ("PluginLoadError", ("'twice-partitioner'", "vendor_a 1.0", "vendor_b 1.0")),
}


@pytest.mark.parametrize("case", PLUGINS)
def test_a_missing_duplicate_or_broken_plugin(case: str, plugins: dict[str, list[str]]) -> None:
    kind, words = PLUGINS[case]
    got, message = plugins[case]
    check(got == kind, f"expected {kind}, got {got}: {message}")
    for word in words:
        check(word in message, f"expected {word!r} in: {message}")


@pytest.mark.parametrize("case", ["works", "again", "given"])
def test_a_good_plugin_works_beside_broken_ones(case: str, plugins: dict[str, list[str]]) -> None:
    check(plugins[case] == ["lowered", "works"], str(plugins[case]))
    check(plugins["unchanged"] == [True, ""], "the program changed")
