"""Where weights go, what the files hold, and one copy of each across methods, partitions and backends."""

import pytest
import torch
from executorch.exir import ExecutorchBackendConfig
from lowering_support import TagPartitioner, by_operator
from torch import nn
from torch.export import export

from exir_lowering import (
    Backend,
    BackendContext,
    InputError,
    LoweringError,
    PreprocessResult,
    inspect,
    load,
    lower,
)
from exir_lowering.errors import BackendContractError
from exir_lowering.graphs import operator_name

WEIGHT = 64 * 64 * 4


class Net(nn.Module):
    """A linear layer, a bias and an embedding, of which a partitioner may take parts."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("scale", torch.rand(64) + 1)

    def forward(self, x):
        return torch.sin(self.second(torch.softmax(self.first(x), -1))) * self.scale


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def x():
    return torch.rand(2, 64)


@pytest.fixture(scope="module")
def programs(net, x):
    program = export(net, (x,))
    return {"one": program, "two": program}


@pytest.fixture(scope="module")
def lowered(programs):
    return lower(programs, [TagPartitioner(by_operator("aten.sin.default"), "reference"), "xnnpack"])


def some_weights(key, size):
    return "large" if size > 1000 else None


@pytest.mark.parametrize("partitioners", [None, "xnnpack", "reference"])
def test_all_weights_in_a_data_file(net, x, programs, partitioners, tmp_path):
    artifact = lower(programs, partitioners).emit(external_weights="weights")
    assert list(artifact.data_files) == ["weights.ptd"]
    assert len(artifact.buffer) < 2 * WEIGHT < len(artifact.data_files["weights.ptd"]) < 2.2 * WEIGHT
    path = artifact.save(tmp_path / "net.pte")
    for method in ("one", "two"):
        (result,) = load(path, data=tmp_path / "weights.ptd").run(method, x)
        assert torch.allclose(result, net(x), atol=1e-5)
    with pytest.raises(LoweringError, match=r"data file"):
        load(path).run("one", x)


def test_a_policy_by_size(net, x, lowered, tmp_path):
    artifact = lowered.emit(external_weights=some_weights)
    path = artifact.save(tmp_path / "net.pte")
    outside = {row.name for row in inspect(path).stored if row.start is None}
    assert list(artifact.data_files) == ["large.ptd"] and outside == {"first.weight", "second.weight"}
    (result,) = load(path, data=tmp_path / "large.ptd").run("two", x)
    assert torch.allclose(result, net(x), atol=1e-5)


def test_the_lowered_programs_stay_as_they_are(lowered):
    before = lowered.emit().buffer
    lowered.emit(external_weights="weights", keep_originals=True)
    assert lowered.emit().buffer == before


def test_the_file_has_every_byte_once(lowered):
    content = lowered.emit().buffer
    stored = inspect(content).stored
    assert [row.bytes for row in stored if row.kind == "named data"] == [WEIGHT, WEIGHT, 256, 256]
    assert all({user.partition("/")[0] for user in row.users} == {"one", "two"} for row in stored)
    assert [(row.name, row.bytes) for row in stored if row.kind == "constant"] == [("scale", 256)]
    total = sum(row.bytes for row in stored)
    assert total < len(content) < total + 8000


class Storing(Backend):
    """Refers to its weights by the context's store, and to one that it makes itself."""

    def preprocess(self, program, compile_specs, context: BackendContext | None = None):
        weights = [*program.state_dict.values(), *program.constants.values()]
        refs = [context.weights.ref(weight) for weight in weights]
        refs += [context.weights.ref(weight.detach().t().contiguous()) for weight in weights if weight.dim() == 2]
        lines = "\n".join(str(ref.to_json()) for ref in refs)
        return PreprocessResult(lines.encode(), data_store_output=context.weights.named_data(refs))


class OneCall(Storing):
    """The same, for all partitions in one call."""

    def preprocess_all(self, edge_programs, compile_specs, context: BackendContext | None = None):
        return {
            method: [self.preprocess(program, [], context) for program in programs]
            for method, programs in edge_programs.items()
        }


class NotHandedOn(Backend):
    """Forgets to hand on what `preprocess` needs."""

    def preprocess(self, program, compile_specs, context: BackendContext):
        return PreprocessResult(b"")

    def preprocess_all(self, edge_programs, compile_specs):
        return super().preprocess_all(edge_programs, compile_specs)


def test_a_context_that_is_not_handed_on(programs):
    assert not NotHandedOn().one_by_one
    with pytest.raises(LoweringError, match=r"NotHandedOn.preprocess takes a context.*pass it on: .*context=context"):
        lower(programs, TagPartitioner(backend="storing"), backends={"storing": NotHandedOn})


class Renamed(Backend):
    backend_id = "storing"

    def preprocess(self, program, compile_specs, ctx):
        raise NotImplementedError


def test_a_context_of_another_name(programs):
    with pytest.raises(BackendContractError, match=r"Renamed.preprocess has the parameter 'ctx'.*passed as 'context'"):
        lower(programs, TagPartitioner(backend="storing"), backends={"storing": Renamed})


@pytest.mark.parametrize("backend", [Storing, OneCall])
def test_backends_share_one_store(programs, backend):
    """Two methods, a partition for each layer, two backends of which one is ExecuTorch's: each content once."""

    def each_apart(node):
        return node.name if operator_name(node) in ("aten.addmm.default", "aten.permute_copy.default") else None

    lowered = lower(
        programs,
        {
            "one": TagPartitioner(each_apart, "storing"),
            "two": TagPartitioner(by_operator("aten.sin.default"), "reference"),
        },
        backends={"storing": backend},
    )
    assert 4 * WEIGHT < len(lowered.emit().buffer) < 4 * WEIGHT + 16000  # as they are, and transposed
    shared = lower(
        programs, {"one": TagPartitioner(each_apart, "storing"), "two": "reference"}, backends={"storing": backend}
    )
    assert 4 * WEIGHT < len(shared.emit().buffer) < 4 * WEIGHT + 16000


def test_a_policy_is_asked_once_for_each_weight(lowered):
    asked = []

    def changes(key, size):
        asked.append((key, size))
        return f"file{len(asked)}"

    artifact = lowered.emit(external_weights=changes)
    assert len(asked) == len(set(asked)) == 5
    assert sorted(artifact.data_files) == [f"file{number}.ptd" for number in range(1, 6)]


@pytest.mark.parametrize(
    ("policy", "parts"),
    [
        (3, ("external_weights", "got 3", "name of a data file")),
        (".ptd", ("external_weights", "got '.ptd'")),
        ("a/b", ("external_weights", "'a/b'", "next to the .pte file")),
        (lambda key, size: 7, ("external_weights", "got 7")),
        (lambda key: "x", ("external_weights", "raised TypeError")),
    ],
)
def test_what_is_no_policy(lowered, policy, parts):
    with pytest.raises(InputError) as caught:
        lowered.emit(external_weights=policy)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_two_policies(lowered):
    with pytest.raises(InputError, match="also sets external_constants"):
        lowered.emit(ExecutorchBackendConfig(external_constants=True), external_weights="weights")
