"""Shape buckets: methods of fixed sizes from one dynamic program, whatever runs them."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lowering_support import TagPartitioner
from torch import nn
from torch.export import Dim, export

from exir_lowering import InputError, buckets, inspect, load, lower, plan, verify
from exir_lowering.pte.manifest import BUCKET

SEQ = Dim("seq", min=1, max=32)
SIZES = [4, 16]


class Bert(nn.Module):
    def __init__(self, attention: str, layers: int) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2, "intermediate_size": 64}
        config = BertConfig(vocab_size=1000, max_position_embeddings=64, attn_implementation=attention, **sizes)
        self.bert = BertModel(config).eval()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        found = self.bert(input_ids=ids, attention_mask=mask)
        return found.last_hidden_state, found.pooler_output


def export_bert(attention: str, layers: int) -> Any:
    inputs = (torch.zeros(1, 7, dtype=torch.long), torch.ones(1, 7, dtype=torch.long))
    model = Bert(attention, layers).eval()
    return model, export(model, inputs, dynamic_shapes={"ids": {1: SEQ}, "mask": {1: SEQ}}, strict=False)


@pytest.fixture(scope="module")
def bert() -> Any:
    model, program = export_bert("sdpa", 2)
    made = buckets(program, {"seq": SIZES})
    return model, program, made, lower(made, "xnnpack").emit()


@pytest.fixture(scope="module")
def masked_bert() -> Any:
    """One that masks with finite numbers."""
    model, program = export_bert("eager", 1)
    return model, program, buckets(program, {"seq": [4, 8, 16]}, assume={"mask": "finite_rows"})


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
    buckets(program, {"ids.1": [5]}, exact=True)
    buckets(program, {"seq": [5]})
    assert before == (program.graph_module.print_readable(print_output=False), str(program.graph_signature))
    assert metas == [dict(node.meta) for node in program.graph.nodes] and BUCKET not in program.graph_module.meta


def test_memory_and_weights(bert: Any) -> None:
    _, program, _, artifact = bert
    one = lower(buckets(program, {"seq": [16]}), "xnnpack").emit()
    arenas = {
        method.name: sum(arena.bytes for arena in method.memory.arenas) for method in inspect(artifact.buffer).methods
    }
    assert arenas["forward@seq=4"] < 0.35 * arenas["forward@seq=16"]
    weights = sum(tensor.nbytes for tensor in program.state_dict.values())
    several, alone = (sum(row.bytes for row in each.stored if row.kind != "payload") for each in (artifact, one))
    assert several < alone + 0.05 * weights


class Sized(TagPartitioner):
    """Takes what has fixed sizes only, as many backends do."""

    def __init__(self) -> None:
        def fixed(node: torch.fx.Node) -> str | None:
            values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
            sizes = [size for each in values if isinstance(each, torch.Tensor) for size in (*each.shape, 1)]
            return None if any(isinstance(size, torch.SymInt) for size in (*values, *sizes)) else "t"

        super().__init__(fixed)


def test_a_backend_that_refuses_symbols_takes_everything(masked_bert: Any) -> None:
    _, program, made = masked_bert
    (dynamic,), fixed = plan(program, Sized()).methods, plan(made, Sized()).methods
    assert len(dynamic.host) > 0.5 * len(dynamic.nodes)
    assert [method.name for method in fixed if not method.host] == list(made)


def test_verify_variants_and_other_methods(bert: Any) -> None:
    model, _, made, _ = bert
    other = export(nn.Linear(4, 4), (torch.zeros(1, 4),))
    artifact = lower({**made, "other": other}, variants={"fast": "xnnpack", "plain": None}).emit()
    loaded = load(artifact.buffer, choose="plain")
    inputs = (torch.ones(1, 5, dtype=torch.long),) * 2
    assert loaded.choose("forward", *inputs).method == "forward@seq=16@plain"
    torch.testing.assert_close(loaded.run("forward", *inputs)[0], model(*inputs)[0], atol=1e-5, rtol=1e-4)
    assert verify(artifact, {"forward@seq=4@fast": made["forward@seq=4"]})


def test_a_mask_of_finite_numbers_needs_a_promise(masked_bert: Any) -> None:
    """Where everything is masked, such a mask weighs all positions alike, padded ones too."""
    model, program, made = masked_bert
    with pytest.raises(InputError, match=r"softmax.*goes over dimension 3, which is padded(.|\n)*finite_rows"):
        buckets(program, {"seq": [8]})
    artifact = lower(made, "xnnpack").emit()
    loaded = load(artifact.buffer)
    for size in range(1, 17):
        torch.manual_seed(size)
        ids, mask = torch.randint(0, 1000, (1, size)), torch.randint(0, 2, (1, size))
        mask[0, size // 2] = 1
        fits = next(one for one in (4, 8, 16) if one >= size)
        assert loaded.choose("forward", ids, mask).method == f"forward@seq={fits}"
        for found, expected in zip(loaded.run("forward", ids, mask), model(ids, mask), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


class Written(nn.Module):
    """Attention that is written out."""

    def __init__(self, hide: Any, dim: int = -1) -> None:
        super().__init__()
        self.hide, self.dim, self.embedding = hide, dim, nn.Embedding(10, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        return self.hide(x @ x.transpose(-1, -2) * 0.5, mask[:, None, :]).softmax(self.dim) @ x


WRITTEN = {
    "-inf": lambda scores, mask: scores.masked_fill(mask == 0, -torch.inf),
    "numbers": lambda scores, mask: scores.masked_fill(mask == 0, -1e9),
    "added": lambda scores, mask: scores + torch.where(mask.bool(), 0.0, torch.finfo(torch.float32).min),
}
NOT_HIDDEN = {
    "no mask": (lambda scores, mask: scores, -1),
    "-1": (lambda scores, mask: scores + torch.where(mask.bool(), 0.0, -1.0), -1),
    "the other way": (lambda scores, mask: scores + torch.where(mask.bool(), -1e9, 0.0), -1),
    "NaN": (lambda scores, mask: scores.masked_fill(mask == 0, torch.nan), -1),
    "queries": (lambda scores, mask: scores.masked_fill(mask == 0, -1e9), -2),
    "rows that may be hidden": (lambda scores, mask: scores.masked_fill(mask * mask == 0, -1e9), -1),
}


def export_written(hide: Any, dim: int = -1) -> Any:
    model, inputs = Written(hide, dim).eval(), (torch.ones(1, 7).long(), torch.ones(1, 7).long())
    return model, export(model, inputs, dynamic_shapes=({1: SEQ}, {1: SEQ}))


@pytest.mark.parametrize("how", WRITTEN)
def test_attention_that_is_written_out(how: str) -> None:
    model, program = export_written(WRITTEN[how])
    with pytest.raises(InputError, match=r"goes over dimension 2, which is padded|sums over a padded"):
        buckets(program, {"seq": [8]})
    made = buckets(program, {"seq": [8]}, assume={"mask": "finite_rows"})["forward@seq=8"].module()
    for size in (1, 3, 8):
        ids, mask = torch.randint(0, 10, (1, size)), torch.randint(0, 2, (1, size))
        mask[0, 0] = 1
        padded = made(*(F.pad(each, (0, 8 - size)) for each in (ids, mask)))
        torch.testing.assert_close(padded[:, :size], model(ids, mask))


@pytest.mark.parametrize("how", NOT_HIDDEN)
def test_attention_whose_padded_scores_count(how: str) -> None:
    with pytest.raises(InputError, match="which is padded"):
        buckets(export_written(*NOT_HIDDEN[how])[1], {"seq": [8]}, assume={"mask": "finite_rows"})


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
    with pytest.raises(InputError, match=r"index_put.*may mix positions(.|\n)*self.keys.index_copy_"):
        buckets(program, {"seq": [1, 4]})
    artifact = lower(buckets(program, {"seq": [1, 4]}, exact=True), "xnnpack").emit()
    loaded, eager, at = load(artifact.buffer), copy.deepcopy(model), 0
    for size in (4, 1, 1, 4, 1):
        ids, places = torch.randint(0, 32, (1, size)), torch.arange(at, at + size)
        torch.testing.assert_close(loaded.run("forward", ids, places)[0], eager(ids, places), atol=1e-5, rtol=1e-4)
        at += size
    with pytest.raises(InputError, match="dimension 1 of input 0 is 3, not 4"):
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
    with pytest.raises(InputError, match=r"convolution.*may mix positions(.|\n)*self.two\(self.one\(x\)"):
        buckets(program, sizes)
    artifact = lower(buckets(program, sizes, exact=True), "xnnpack").emit()
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
    with pytest.raises(InputError, match=r"select.int: it takes an element that is padded"):
        buckets(program, sizes)
    made = buckets(program, sizes, exact=True)
    assert list(made) == [f"forward@batch={b},seq={s}" for b, s in ((1, 4), (1, 8), (2, 4), (2, 8))]
    lowered = lower({name: one for name, one in made.items() if "batch=2" in name})
    loaded = load(lowered.emit().buffer)
    x, y = torch.randn(2, 4), torch.randn(2, 8)
    expected = Two()(x, doubled := y.clone())
    for found, one in zip(loaded.run("forward", x, y), (doubled, *expected), strict=True):
        torch.testing.assert_close(found, one)


class Broadcast(nn.Module):
    """What attends has fewer dimensions than what it attends to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x[None], x[0].clamp(-1, 1), x[0].clamp(-1, 1))


class Prefix(nn.Module):
    """One input has at least as many elements as the other."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y[:, : x.shape[1]] + x


class Shrinking(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x + torch.ones(64)[: 40 - x.shape[1]].sum()


class Bits(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return (x.isnan().float() + 1).view(torch.int32) - 1


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Broadcast(), "different numbers of dimensions"),
        (Prefix(), "which may have more"),
        (Shrinking(), "may shrink when inputs grow"),
        (Bits(), "bits as another type"),
    ],
)
def test_what_is_not_safe_is_refused(model: nn.Module, why: str) -> None:
    inputs = (torch.ones(1, 7, 4), torch.ones(1, 9, 4)) if isinstance(model, Prefix) else (torch.ones(1, 7, 4),)
    shapes = tuple({1: Dim(name, min=1, max=32)} for name, _ in zip(("seq", "other"), inputs, strict=False))
    program = export(model, inputs, dynamic_shapes=shapes, strict=False)
    with pytest.raises(InputError, match=why):
        buckets(program, {"seq": [8], "other": [8]} if len(inputs) > 1 else {"seq": [8]})


class Returned(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x * x.shape[1], x.shape[1]


def test_sizes_as_numbers() -> None:
    program = export(Returned(), (torch.ones(1, 5),), dynamic_shapes=({1: SEQ},))
    with pytest.raises(InputError, match="computes with the padded size itself"):
        buckets(program, {"seq": [4]})
    (made,) = buckets(program, {"seq": [4]}, exact=True).values()
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
        ({"tokens.0": [4]}, "no dynamic dimension 'tokens.0'"),
        ({"seq": [64]}, "got 64, outside the program's range"),
        ({"seq": [4, 4]}, "a size occurs twice"),
        ({"seq": []}, "expected a sequence of sizes"),
        ({"seq": 4}, "expected a sequence of sizes"),
        ({"seq": [4.0]}, "got the size 4.0, expected an int"),
        ({"seq": [True]}, "got the size True"),
        ({"seq": [0]}, "got the size 0, expected an int of at least 1"),
        ({"seq": [4], "tokens.1": [8]}, "given by another name"),
        ({}, "expected sizes by dimension"),
    ],
)
def test_wrong_sizes(sizes: Any, why: str) -> None:
    program = export(Relu(), (torch.ones(1, 5),), dynamic_shapes=({1: SEQ},))
    with pytest.raises(InputError, match=why):
        buckets(program, sizes)


def test_dimensions_that_are_left_or_not_dynamic() -> None:
    program = export(Relu(), (torch.ones(2, 5),), dynamic_shapes=({0: Dim("batch"), 1: SEQ},))
    with pytest.raises(InputError, match=r"no sizes are given for .tokens\.0., which stays dynamic"):
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
    with pytest.raises(InputError, match="computes with the padded size itself"):
        buckets(torch.export.load(file), {"seq": [4]})
