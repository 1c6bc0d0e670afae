"""Buckets whose sizes are chosen: the rule on numbers, and families that were measured."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from lowering_support import TagPartitioner
from torch import nn
from torch.export import Dim, ExportedProgram, export

from exir_lowering import BackendUnavailableError, InputError, Partitioner, buckets, inspect, load, lower
from exir_lowering.backends.xnnpack import xnnpack
from exir_lowering.shape_buckets import choose, list_candidates

SEQ = Dim("seq", min=1, max=64)
PAD = {"tokens": 0, "mask": 0}
GIVEN = [6, 6, 20, 48]

# -- the rule ----------------------------------------------------------------------------------------------------------


def least_total(counts: list[int], latencies: list[int], number: int) -> float:
    """Return what all calls take with the best family of so many buckets, from the largest bucket down."""

    def upto(last: int, left: int) -> float:
        taken = (sum(counts[first : last + 1]) * latencies[last] for first in range(last + 1))
        if left == 1:
            return next(taken)
        return min(
            (one + upto(first - 1, left - 1) for first, one in enumerate(taken) if first >= left - 1), default=math.inf
        )

    return upto(len(counts) - 1, number)


MEASURED = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 1000)), min_size=1, max_size=7)


@given(MEASURED, st.integers(1, 8))
def test_each_number_of_buckets_has_its_best_family_and_the_last_one_still_saves_a_tenth(
    measured: list[tuple[int, int]], most: int
) -> None:
    counts, latencies = [count for count, _ in measured], [latency for _, latency in measured]
    chosen, means = choose(counts, latencies, most)
    slow = list(itertools.accumulate(latencies, max))  # a larger bucket is not faster
    numbers = range(1, min(most, len(counts)) + 1)
    assert means == tuple(least_total(counts, slow, number) / sum(counts) for number in numbers)
    assert chosen[-1] == len(counts) - 1 and list(chosen) == sorted(set(chosen))
    found = sum(count * slow[min(one for one in chosen if one >= index)] for index, count in enumerate(counts))
    assert found / sum(counts) == means[len(chosen) - 1]
    saves = [more <= (1 - 0.1) * fewer for fewer, more in itertools.pairwise(means)]
    assert all(saves[: len(chosen) - 1]) and not any(saves[len(chosen) - 1 : len(chosen)])


def test_one_more_bucket_for_a_tenth_and_not_for_less() -> None:
    assert choose([1, 1], [80, 100], 4) == ((0, 1), (100, 90))
    assert choose([1, 1], [81, 100], 4) == ((1,), (100, 90.5))
    assert choose([1, 1], [10, 100], 1) == ((1,), (100,))
    assert choose([8, 1, 1], [100, 10, 20], 4)[0] == (2,), "a smaller bucket that was measured to be slower"


@given(st.dictionaries(st.integers(1, 500), st.integers(1, 50), min_size=1, max_size=60))
def test_candidates_stand_for_equal_parts_of_the_work(sizes: dict[int, int]) -> None:
    found = list_candidates(sizes)
    assert found == sorted(set(found) & set(sizes)) and found[-1] == max(sizes) and len(found) <= 12
    assert len(found) == len(sizes) or len(sizes) > 12
    work = sum(size * count for size, count in sizes.items())
    for before, last in itertools.pairwise([0, *found]):
        assert 12 * sum(size * count for size, count in sizes.items() if before < size < last) < work


# -- families ----------------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.out = nn.Embedding(100, 64), nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.embed(tokens)).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, mask.bool()[:, None, :]))


def sizes(of: list[int], dim: str = "seq") -> list[dict[str, int]]:
    return [{dim: size} for size in of]


@pytest.fixture(scope="module")
def encoder() -> tuple[nn.Module, ExportedProgram]:
    model, inputs = Encoder().eval(), (torch.arange(7)[None], torch.ones(1, 7, dtype=torch.long))
    return model, export(model, inputs, dynamic_shapes={"tokens": {1: SEQ}, "mask": {1: SEQ}})


@pytest.fixture(scope="module")
def chosen(encoder: Any) -> Any:
    _, program = encoder
    return buckets(program, {"seq": "auto"}, sizes=sizes(GIVEN), pad=PAD, most=3)


def test_the_family_is_right_at_every_given_size_and_has_weights_once(encoder: Any, chosen: Any) -> None:
    model, program = encoder
    artifact = lower(chosen, "xnnpack").emit()
    loaded = load(artifact.buffer)
    for size in GIVEN:
        tokens, mask = torch.randint(0, 100, (1, size)), torch.randint(0, 2, (1, size))
        mask[0, 0] = 1
        (output,) = loaded.run("forward", tokens, mask)
        torch.testing.assert_close(output, model(tokens, mask), atol=1e-5, rtol=1e-4)
    alone = lower(buckets(program, {"seq": [48]}, pad=PAD), "xnnpack").emit()
    several, one = (
        sum(row.bytes for row in inspect(each.buffer).stored if row.kind != "payload") for each in (artifact, alone)
    )
    assert several == one > sum(tensor.nbytes for tensor in program.state_dict.values())
    added = len(artifact.buffer) - len(alone.buffer)
    assert added == pytest.approx((len(chosen) - 1) * chosen.choice.bytes_per_bucket, abs=1000)
    planned = {method.name: method.memory.bytes for method in inspect(artifact.buffer).methods}
    for size, share, arenas in zip(chosen.choice.sizes, chosen.choice.shares, chosen.choice.planned_bytes, strict=True):
        assert not share or planned[f"forward@seq={size}"] == arenas > 0


def test_what_it_costs_is_what_was_measured(chosen: Any) -> None:
    choice, counts = chosen.choice, [2, 1, 1]
    assert choice.sizes == (6, 20, 48) and min(choice.milliseconds + choice.dynamic_milliseconds) > 0
    kept, means = choose(counts, choice.milliseconds, 3)
    assert list(chosen) == [f"forward@seq={choice.sizes[index]}" for index in kept] and choice.best_means == means
    taken = Counter(next(one for one in kept if choice.sizes[one] >= size) for size in GIVEN)
    assert choice.shares == tuple(taken[index] / len(GIVEN) for index in range(3))
    spent = [count * ms for count, ms in zip(counts, choice.dynamic_milliseconds, strict=True)]
    assert choice.dynamic_mean == pytest.approx(sum(spent) / len(GIVEN))
    lines = [line.split() for line in str(choice).splitlines()]
    assert lines[0] == ["bucket", "share", "ms", "planned", "bytes", "dynamic", "ms"]
    assert [line[0] for line in lines[2:5]] == ["seq=6", "seq=20", "seq=48"]
    assert f"The dynamic program plans {choice.dynamic_planned_bytes:,} bytes." in str(choice)


class Pair(nn.Module):
    def forward(self, x: torch.Tensor, scale: float, *, y: torch.Tensor) -> Any:
        return (x * y[:, : x.shape[1]]).relu() * scale, y.sin()


def test_one_dimension_beside_a_list_and_inputs_by_name() -> None:
    batch, dims = Dim("batch", max=4), Dim("seq", min=2, max=64)
    inputs, named = (torch.randn(2, 5), 3.0), {"y": torch.randn(2, 5)}
    shapes = {"x": {0: batch, 1: dims}, "scale": None, "y": {0: batch, 1: dims}}
    program = export(Pair(), inputs, named, dynamic_shapes=shapes)
    made = buckets(
        program,
        {"batch": [1, 3], "x.1": "auto"},
        sizes=sizes([9, 4], "seq"),
        pad={"x": 0, "y": 0},
        method="pair",
        most=1,
    )
    assert list(made) == ["pair@batch=1,x.1=9", "pair@batch=3,x.1=9"] and made.choice.sizes == (4, 9)
    x, y = torch.randn(2, 2, 7)
    found = load(lower(made, "xnnpack").emit().buffer).run("pair", x, 3.0, y)
    for output, expected in zip(found, Pair()(x, 3.0, y=y), strict=True):
        torch.testing.assert_close(output, expected)


class StaticOnly(Partitioner):
    """XNNPACK's partitioner, of a backend that takes no dynamic sizes."""

    def partition(self, exported_program: ExportedProgram) -> Any:
        if exported_program.range_constraints:
            raise ValueError("sizes have to be numbers")
        return xnnpack().partition(exported_program)


def test_a_dynamic_program_that_cannot_be_lowered_is_not_measured(encoder: Any) -> None:
    made = buckets(encoder[1], {"seq": "auto"}, sizes=sizes([9]), pad=PAD, partitioners=StaticOnly())
    assert list(made) == ["forward@seq=9"] and math.isnan(made.choice.dynamic_mean)
    assert "nan" in str(made.choice) and made.choice.milliseconds[0] > 0 == made.choice.bytes_per_bucket


def test_what_does_not_run_here_cannot_be_chosen(encoder: Any) -> None:
    with pytest.raises(
        BackendUnavailableError,
        match=r"buckets: .auto. runs the methods; give a list of sizes: .* needs the backend 'echo'",
    ):
        buckets(encoder[1], {"seq": "auto"}, sizes=sizes([9]), pad=PAD, partitioners=TagPartitioner())


@pytest.mark.nightly
def test_the_family_of_a_bert_is_as_good_as_any_and_plans_less_than_the_dynamic_program() -> None:
    """The times of all families are taken again; on XNNPACK the dynamic program is about as fast as they are."""
    from transformers import BertConfig, BertModel

    layers = {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 768}
    torch.manual_seed(0)
    bert = BertModel(BertConfig(vocab_size=2000, attn_implementation="sdpa", **layers)).eval()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.bert(input_ids=tokens, attention_mask=mask).last_hidden_state

    inputs = (torch.arange(7)[None], torch.ones(1, 7, dtype=torch.long))
    dims = {1: Dim("seq", min=1, max=128)}
    program = export(Whole().eval(), inputs, dynamic_shapes={"tokens": dims, "mask": dims}, strict=False)
    counts = {8: 6, 16: 4, 48: 3, 128: 1}
    traffic = [size for size, count in counts.items() for _ in range(count)]
    made = buckets(program, {"seq": "auto"}, sizes=sizes(traffic), pad=PAD, most=3)
    kept = tuple(size for size, share in zip(made.choice.sizes, made.choice.shares, strict=True) if share)

    loaded = load(lower(buckets(program, {"seq": list(counts)}, pad=PAD), "xnnpack").emit().buffer)
    least = dict.fromkeys(counts, math.inf)
    for size in 50 * list(counts):
        begun = time.perf_counter()
        loaded.run(f"forward@seq={size}", *(torch.ones(1, size, dtype=torch.long),) * 2)
        least[size] = min(least[size], time.perf_counter() - begun)

    def mean(family: tuple[int, ...]) -> float:
        return sum(least[min(one for one in family if one >= size)] for size in traffic) / len(traffic)

    every = (some for number in range(len(kept)) for some in itertools.combinations(list(counts)[:-1], number))
    assert mean(kept) <= 1.15 * min(mean((*some, 128)) for some in every) and len(kept) > 1
    assert 1.5 * max(made.choice.planned_bytes) < made.choice.dynamic_planned_bytes
    assert made.choice.dynamic_mean > 0


# -- what is wrong -----------------------------------------------------------------------------------------------------

AUTO = {"seq": "auto"}


@pytest.mark.parametrize(
    ("dimensions", "options", "why"),
    [
        (AUTO, {}, r"got auto=\['seq'\], sizes=None; expected one .auto. and sizes=\[{.n.: 9}\]"),
        ({"seq": [4]}, {"sizes": sizes([4])}, r"got auto=\[\], sizes=\[{'seq': 4}\]; expected one .auto. and sizes"),
        ({**AUTO, "mask.1": "auto"}, {"sizes": sizes([4])}, r"got auto=\['seq', 'mask.1'\], sizes=.*; expected one"),
        ({"sqe": "auto"}, {"sizes": sizes([4])}, r"no dynamic dimension 'sqe'. The dynamic dimensions are 'seq'"),
        (AUTO, {"sizes": sizes([4, 99])}, "seq: got the size 99, expected an int in its range"),
        (AUTO, {"sizes": sizes([4], "sqe")}, "no dynamic dimension 'sqe'"),
        (AUTO, {"sizes": [{"seq": 4, "tokens.1": 4}]}, r"sizes\[0\]: got .*, expected 'seq' alone"),
        (AUTO, {"sizes": [{}]}, r"sizes\[0\]: got {}, expected 'seq' alone"),
        (AUTO, {"sizes": sizes([4]), "pad": None}, r"needs inputs that are padded, such as by pad={'tokens': 0, 'mask"),
        (AUTO, {"sizes": {"seq": 4}}, "buckets: sizes: got {'seq': 4}, expected sets of sizes"),
        (AUTO, {"sizes": []}, r"buckets: sizes: got \[\], expected sets of sizes"),
        (AUTO, {"sizes": [4]}, r"buckets: sizes\[0\]: got 4, expected numbers by dimension"),
        (AUTO, {"sizes": [{"seq": "4"}]}, r"buckets: sizes\[0\]: got 'seq': '4', expected a dimension and an int"),
        (AUTO, {"sizes": sizes([4]), "most": 0}, "most: got 0, expected a number of buckets"),
        (AUTO, {"sizes": sizes([4]), "partitioners": 3}, "partitioners: got 3, expected an ExecuTorch Partitioner"),
        ({"seq": "all"}, {}, "seq: got 'all', expected a sequence of sizes"),
        ("auto", {}, "got 'auto', expected sizes by dimension"),
    ],
)
def test_wrong_arguments(encoder: Any, dimensions: Any, options: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        buckets(encoder[1], dimensions, **{"pad": PAD, **options})


def test_a_program_without_example_inputs(encoder: Any) -> None:
    inputs = (torch.arange(7)[None], torch.ones(1, 7, dtype=torch.long))
    program = export(encoder[0], inputs, dynamic_shapes={"tokens": {1: SEQ}, "mask": {1: SEQ}})
    program.example_inputs = None
    with pytest.raises(InputError, match="needs the program's example inputs, which it lacks; give a list of sizes"):
        buckets(program, {"seq": "auto"}, sizes=sizes([4]), pad=PAD)
