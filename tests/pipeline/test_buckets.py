"""Shape buckets: methods of fixed sizes from one dynamic program, whatever runs them."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, export

from exir_lowering import InputError, buckets, inspect, load, lower, verify
from exir_lowering.pte.manifest import BUCKET

SEQ = Dim("seq", min=1, max=32)
SIZES = [4, 16]
PAD = {"ids": 0, "mask": 0}


class Bert(nn.Module):
    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        config = BertConfig(vocab_size=1000, max_position_embeddings=64, attn_implementation="sdpa", **sizes)
        self.bert = BertModel(config).eval()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        found = self.bert(input_ids=ids, attention_mask=mask)
        return found.last_hidden_state, found.pooler_output


@pytest.fixture(scope="module")
def bert() -> Any:
    inputs = (torch.zeros(1, 7, dtype=torch.long), torch.ones(1, 7, dtype=torch.long))
    model = Bert().eval()
    program = export(model, inputs, dynamic_shapes={"ids": {1: SEQ}, "mask": {1: SEQ}}, strict=False)
    made = buckets(program, {"seq": SIZES}, pad=PAD)
    return model, program, made, lower(made, "xnnpack").emit()


def test_bert_is_equal_at_every_size(bert: Any) -> None:
    model, _, _, artifact = bert
    loaded = load(artifact.buffer)
    for size in range(1, 17):
        torch.manual_seed(size)
        ids = torch.randint(0, 1000, (1, size))
        masks = (torch.ones(1, size), torch.randint(0, 2, (1, size)), torch.zeros(1, size))
        for mask in masks:
            found = loaded.run("forward", ids, mask.long())
            for one, expected in zip(found, model(ids, mask.long()), strict=True):
                torch.testing.assert_close(one, expected, atol=1e-5, rtol=1e-4)
        fits = next(one for one in SIZES if one >= size)
        assert loaded.choose("forward", ids, mask.long()).method == f"forward@seq={fits}"


def test_what_does_not_fit_is_refused(bert: Any) -> None:
    loaded = load(bert[3].buffer)
    for sizes, why in (
        ((17, 17), "is 17, not 1 to 4"),
        ((0, 0), "is 0, not 1 to"),
        ((3, 4), "which has to be the same"),
    ):
        for method in ("forward", "forward@seq=4"):
            with pytest.raises(InputError, match=why):
                loaded.run(method, *(torch.ones(1, size, dtype=torch.long) for size in sizes))


def test_a_bucket_is_the_program_with_numbers(bert: Any) -> None:
    model, program, made, _ = bert
    assert list(made) == ["forward@seq=4", "forward@seq=16"]
    for name, one in made.items():
        size = int(name.split("=")[1])
        one.validate()
        assert "Sym(" not in str(one.graph_module.print_readable(print_output=False)) and not one.range_constraints
        assert all(one.state_dict[key] is tensor for key, tensor in program.state_dict.items())
        inputs = (torch.ones(1, size, dtype=torch.long),) * 2
        torch.testing.assert_close(one.module()(*inputs), model(*inputs))
        traces = {node.meta.get("stack_trace") for node in program.graph.nodes}
        assert {node.meta.get("stack_trace") for node in one.graph.nodes} <= traces
        file = io.BytesIO()
        torch.export.save(one, file)
        file.seek(0)
        torch.testing.assert_close(torch.export.load(file).module()(*inputs), model(*inputs))


def test_the_program_stays_as_it_is(bert: Any) -> None:
    _, program, _, _ = bert
    before = program.graph_module.print_readable(print_output=False), str(program.graph_signature)
    metas = [dict(node.meta) for node in program.graph.nodes]
    buckets(program, {"ids.1": [5]})
    buckets(program, {"seq": [5]}, pad=PAD)
    assert before == (program.graph_module.print_readable(print_output=False), str(program.graph_signature))
    assert metas == [dict(node.meta) for node in program.graph.nodes] and BUCKET not in program.graph_module.meta


def test_memory_and_weights(bert: Any) -> None:
    _, program, _, artifact = bert
    one = lower(buckets(program, {"seq": [16]}, pad=PAD), "xnnpack").emit()
    arenas = {
        method.name: sum(arena.bytes for arena in method.memory.arenas) for method in inspect(artifact.buffer).methods
    }
    assert arenas["forward@seq=4"] < 0.35 * arenas["forward@seq=16"]
    weights = sum(tensor.nbytes for tensor in program.state_dict.values())
    several, alone = (
        sum(row.bytes for row in inspect(each.buffer).stored if row.kind != "payload") for each in (artifact, one)
    )
    assert several < alone + 0.05 * weights


def test_verify_variants_and_other_methods(bert: Any) -> None:
    model, _, made, _ = bert
    other = export(nn.Linear(4, 4), (torch.zeros(1, 4),))
    artifact = lower({**made, "other": other}, variants={"fast": "xnnpack", "plain": None}).emit()
    loaded = load(artifact.buffer, choose="plain")
    inputs = (torch.ones(1, 5, dtype=torch.long),) * 2
    assert loaded.choose("forward", *inputs).method == "forward@seq=16@plain"
    torch.testing.assert_close(loaded.run("forward", *inputs)[0], model(*inputs)[0], atol=1e-5, rtol=1e-4)
    assert verify(artifact, {"forward@seq=4@fast": made["forward@seq=4"]}).ok


@pytest.mark.parametrize("fill", [-1.5, 7, float("-inf"), float("nan")])
def test_what_is_behind_the_end(fill: float) -> None:
    program = export(Relu(), (torch.ones(1, 5),), dynamic_shapes=({1: SEQ},))
    artifact = lower(buckets(program, {"seq": [8]}, pad={"tokens": fill})).emit()
    loaded = load(artifact.buffer)
    (line,) = inspect(artifact.buffer).families
    assert str(line.bucket.sizes[0]) == f"0.1=8~{fill!r}"
    (output,) = loaded.run("forward", torch.ones(1, 3))
    assert torch.equal(output, torch.ones(1, 3))


class Total(nn.Module):
    def forward(self, x: torch.Tensor, where: torch.Tensor) -> Any:
        return torch.where(where, x, 100.0).amax(1), where[:, :, None] + x[:, :, None]


@pytest.mark.parametrize("fill", [True, False])
def test_padding_that_counts_is_found_by_verify(fill: bool) -> None:
    """What the model makes of padding is up to the caller; the dynamic program says whether it counts."""
    inputs = torch.rand(1, 5), torch.ones(1, 5, dtype=torch.bool)
    program = export(Total(), inputs, dynamic_shapes=({1: SEQ}, {1: SEQ}))
    artifact = lower(buckets(program, {"seq": [8]}, pad={"x": -1, "where": fill})).emit()
    found = verify(artifact, program, [inputs])
    assert found.ok is fill
    (most, _), expected = load(artifact.buffer).run("forward", *inputs), inputs[0].amax(1)
    assert torch.equal(most, expected) is fill


# -- state -------------------------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.qkv, self.head = nn.Embedding(32, 16), nn.Linear(16, 48), nn.Linear(16, 32)
        self.register_buffer("keys", torch.zeros(1, 24, 16))
        self.register_buffer("values", torch.zeros(1, 24, 16))

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.embedding(ids)).chunk(3, -1)
        self.keys.index_copy_(1, places, k)
        self.values.index_copy_(1, places, v)
        mask = torch.arange(24) <= places.unsqueeze(1)
        return self.head(F.scaled_dot_product_attention(q, self.keys, self.values, mask))


def test_buckets_share_state() -> None:
    model = Decoder().eval()
    inputs = (torch.zeros(1, 5, dtype=torch.long), torch.arange(5))
    program = export(model, inputs, dynamic_shapes=({1: SEQ}, {0: SEQ}))
    artifact = lower(buckets(program, {"seq": [1, 4]}), "xnnpack").emit()
    loaded, eager, at = load(artifact.buffer), copy.deepcopy(model), 0
    for size in (4, 1, 1, 4, 1):
        ids, places = torch.randint(0, 32, (1, size)), torch.arange(at, at + size)
        torch.testing.assert_close(loaded.run("forward", ids, places)[0], eager(ids, places), atol=1e-5, rtol=1e-4)
        at += size
    with pytest.raises(InputError, match="dimension 1 of argument 'ids' is 3, not 4"):
        loaded.run("forward", torch.zeros(1, 3, dtype=torch.long), torch.arange(3))


# -- images, and more dimensions ---------------------------------------------------------------------------------------


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, stride=2), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.two(self.one(x).relu()).relu()
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def test_images_of_several_sizes() -> None:
    model = Cnn().eval()
    dims = {0: Dim("batch", max=8), 2: Dim("h", min=8, max=64), 3: Dim("w", min=8, max=64)}
    program = export(model, (torch.zeros(2, 3, 16, 24),), dynamic_shapes=(dims,))
    sizes = {"batch": [1], "h": [12, 16], "w": [12, 16]}
    artifact = lower(buckets(program, sizes), "xnnpack").emit()
    loaded = load(artifact.buffer)
    for shape in ((12, 12), (12, 16), (16, 12), (16, 16)):
        x = torch.randn(1, 3, *shape)
        torch.testing.assert_close(loaded.run("forward", x)[0], model(x), atol=1e-5, rtol=1e-4)


class Two(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        y.mul_(2)
        with torch.no_grad():
            z = x * 2
        w = torch.cond(y[0, 0] > 0, lambda a: a + 1, lambda a: a - 1, (z,))
        return w + y[:, ::2], y.relu()


def test_derived_sizes_branches_and_written_inputs() -> None:
    batch = Dim("batch", max=8)
    shapes = ({0: batch, 1: SEQ}, {0: batch, 1: 2 * SEQ})
    program = export(Two(), (torch.ones(2, 5), torch.ones(2, 10)), dynamic_shapes=shapes, strict=False)
    sizes = {"batch": [1, 2], "seq": [4, 8]}
    made = buckets(program, sizes)
    assert list(made) == [f"forward@batch={b},seq={s}" for b, s in ((1, 4), (1, 8), (2, 4), (2, 8))]
    lowered = lower({name: one for name, one in made.items() if "batch=2" in name})
    loaded = load(lowered.emit().buffer)
    x, y = torch.randn(2, 4), torch.randn(2, 8)
    expected = Two()(x, doubled := y.clone())
    for found, one in zip(loaded.run("forward", x, y), (doubled, *expected), strict=True):
        torch.testing.assert_close(found, one)


class Returned(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x * x.shape[1], x.shape[1]


def test_sizes_as_numbers() -> None:
    program = export(Returned(), (torch.ones(1, 5),), dynamic_shapes=({1: SEQ},))
    with pytest.raises(InputError, match=r"pad: output 1 is s\d+, .*cannot be cut"):
        buckets(program, {"seq": [4]}, pad={"x": 0})
    (made,) = buckets(program, {"seq": [4]}).values()
    assert made.module()(torch.ones(1, 4))[1] == 4
    assert load(lower({"f@x": made}).emit().buffer).run("f@x", torch.ones(1, 4))[1] == 4


# -- what is wrong -----------------------------------------------------------------------------------------------------


class Relu(nn.Module):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.relu()


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"sqe": [4]}, r"no dynamic dimension 'sqe'. The dynamic dimensions are 'seq', 'tokens.1' \(1 to 32\)"),
        ({"seq": [64]}, "got the size 64, expected an int in its range"),
        ({"seq": []}, "expected a sequence of sizes"),
        ({"seq": [4, 4]}, "a size occurs twice"),
        ({"seq": [4.0]}, "got the size 4.0, expected an int"),
        ({"seq": [4], "tokens.1": [8]}, "given by another name"),
        ({}, "expected sizes by dimension"),
    ],
)
def test_wrong_sizes(sizes: Any, why: str) -> None:
    program = export(Relu(), (torch.ones(1, 5),), dynamic_shapes=({1: SEQ},))
    with pytest.raises(InputError, match=why):
        buckets(program, sizes)


class Doubled(nn.Module):
    def forward(self, tokens: torch.Tensor, other: torch.Tensor) -> Any:
        return tokens + other[:, ::2], torch.cat([tokens, tokens], 1)


@pytest.mark.parametrize(
    ("pad", "why"),
    [
        ({"token": 0}, "'token' is no input with a dynamic dimension; these are 'tokens', 'other'"),
        ({"tokens": "0"}, "tokens: got '0', expected a number that torch.int64 can hold"),
        ({"tokens": 1 << 64}, "expected a number that torch.int64 can hold"),
        ({"tokens": 0}, "dimension 1 of 'other' grows with a padded one, but pad has no number for 'other'"),
        ({"tokens": 0, "other": 0.1}, r"dimension 1 of 'other' grows .*its size 2\*s\d+ follows from that"),
        (["tokens"], "expected numbers by input"),
    ],
)
def test_wrong_padding(pad: Any, why: str) -> None:
    inputs = torch.ones(1, 5).long(), torch.ones(1, 10)
    program = export(Doubled(), inputs, dynamic_shapes=({1: SEQ}, {1: 2 * SEQ}))
    assert list(buckets(program, {"seq": [4]}, pad={})) == ["forward@seq=4"]
    with pytest.raises(InputError, match=f"buckets: pad: .*{why}|{why}"):
        buckets(program, {"seq": [4]}, pad=pad)


class Joined(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], 1)


def test_an_output_that_cannot_be_cut() -> None:
    program = export(Joined(), (torch.ones(1, 5),), dynamic_shapes=({1: SEQ},))
    with pytest.raises(InputError, match=r"pad: the size of dimension 1 of output 0 is 2\*s\d+"):
        buckets(program, {"seq": [4]}, pad={"x": 0})
    (output,) = load(lower(buckets(program, {"seq": [4]})).emit().buffer).run("forward", torch.ones(1, 4))
    assert output.shape == (1, 8)


def test_dimensions_that_are_left_or_not_dynamic() -> None:
    program = export(Relu(), (torch.ones(2, 5),), dynamic_shapes=({0: Dim("batch"), 1: SEQ},))
    with pytest.raises(InputError, match=r"no sizes are given for .batch., which stays dynamic"):
        buckets(program, {"seq": [4]})
    with pytest.raises(InputError, match="No dimension of it is dynamic"):
        buckets(export(Relu(), (torch.ones(2, 5),)), {"seq": [4]})
    with pytest.raises(InputError, match=r"expected a torch\.export\.ExportedProgram"):
        buckets(Relu(), {"seq": [4]})  # type: ignore[arg-type]
    file = io.BytesIO()
    torch.export.save(export(Relu(), (torch.ones(1, 5),), dynamic_shapes=({1: SEQ},)), file)
    file.seek(0)  # a file has no names of dimensions
    assert list(buckets(torch.export.load(file), {"seq": [4]})) == ["forward@seq=4"]
    file = io.BytesIO()
    torch.export.save(export(Returned(), (torch.ones(1, 5),), dynamic_shapes=({1: SEQ},)), file)
    file.seek(0)
    with pytest.raises(InputError, match="pad: output 1 is"):
        buckets(torch.export.load(file), {"seq": [4]}, pad={"x": 0})
