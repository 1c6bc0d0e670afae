"""The weight store: one copy by memory and by content, however a tensor lies in it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from exir_lowering import InputError, WeightRef, WeightStore


def round_trip(*tensors: torch.Tensor) -> tuple[WeightStore, list[WeightRef]]:
    """Store tensors, load them again and compare; returns the store and the references."""
    store = WeightStore(tensors)
    refs = [store.ref(tensor) for tensor in tensors]
    output = store.named_data(refs)
    data = {key: output.buffers[entry.buffer_index] for key, entry in output.pte_data.items()}
    assert {key: len(content) for key, content in data.items()} == store.sizes
    for tensor, ref in zip(tensors, refs, strict=True):
        loaded = ref.load(data.get)
        assert loaded.dtype == tensor.dtype and loaded.shape == tensor.shape
        assert torch.equal(loaded.contiguous().view(-1).view(torch.uint8), _bytes(tensor))
    return store, refs


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def test_views_of_one_storage_are_one_piece() -> None:
    weight = torch.randn(8, 4)
    store, refs = round_trip(weight, weight.t(), weight[2:5], weight.view(torch.int32), weight[:, 1], weight.clone())
    assert list(store.sizes.values()) == [8 * 4 * 4]
    assert [ref.offset for ref in refs] == [0, 0, 32, 0, 4, 0]
    assert refs[1].strides == (1, 4) and len({ref.key for ref in refs}) == 1 and len(set(refs)) == 5


def test_only_what_is_used_of_a_storage_is_stored() -> None:
    large = torch.randn(1000, 10)
    store, _ = round_trip(large[10:12], large[500:501])
    assert sorted(store.sizes.values()) == [40, 80]
    store, (ref,) = round_trip(large[:, 3])  # with holes
    assert list(store.sizes.values()) == [4000] and ref.strides == (1,)
    store, (ref,) = round_trip(torch.randn(1, 5).expand(100, 5))
    assert list(store.sizes.values()) == [20] and ref.strides == (0, 1)
    store, (ref,) = round_trip(torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
    assert ref.strides == (60, 1, 15, 3)


def test_zeros_and_nothing_are_not_stored() -> None:
    store, refs = round_trip(torch.zeros(100, 3), torch.zeros(3, 0, 2), torch.zeros(()), torch.tensor([False]))
    assert not store.sizes and {ref.key for ref in refs} == {""}
    store, _ = round_trip(torch.tensor([-0.0]))
    assert list(store.sizes.values()) == [4]


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.complex64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_dtypes(dtype: torch.dtype) -> None:
    round_trip(torch.tensor([[1.0, 0.0], [3.0, 1.0]]).to(dtype), torch.tensor(1.0).to(dtype))


def test_lazy_bits_are_resolved() -> None:
    value = torch.tensor([1 + 2j, 3 - 1j])
    round_trip(value.conj(), value.conj().imag, value)


def test_loaded_tensors_are_apart() -> None:
    store = WeightStore([weight := torch.ones(4)])
    output = store.named_data([store.ref(weight)])
    first, second = (store.ref(weight).load(lambda key: output.buffers[0]) for _ in range(2))
    first.zero_()
    assert torch.equal(second, weight)


def test_the_named_data_has_what_is_referred_to_only() -> None:
    one, other = torch.ones(4), torch.ones(5)
    store = WeightStore([one, other])
    assert list(store.named_data([store.ref(other)] * 2).pte_data) == [store.ref(other).key]


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.eye(3).to_sparse(), r"shape \[3, 3\] cannot be stored: got layout torch.sparse_coo"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantised"),
        (torch.ones(2, device="meta"), "device meta"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_memory(tensor: torch.Tensor, said: str) -> None:
    store = WeightStore([tensor, weight := torch.ones(2)])
    assert store.ref(weight).key  # nobody asked for the other one
    with pytest.raises(InputError, match=said):
        store.ref(tensor)


def test_damaged_data() -> None:
    store = WeightStore([weight := torch.ones(4)])
    cases: list[tuple[Any, str]] = [
        (lambda key: None, "has no named data"),
        (lambda key: bytes(15), "has 15 bytes, expected at least 16"),
    ]
    for named_data, said in cases:
        with pytest.raises(InputError, match=said):
            store.ref(weight).load(named_data)


def test_a_tensor_that_was_not_announced() -> None:
    weight = torch.randn(6, 4)
    store = WeightStore([weight])
    assert store.ref(nn.Parameter(weight)[2:]).offset == 2 * 4 * 4  # another object on the same memory
    assert len(store.sizes) == 1
    packed = weight.t().contiguous()  # what a backend made of it
    assert store.ref(packed).key != store.ref(weight).key and len(store.sizes) == 2
    assert store.ref(packed.clone()).key == store.ref(packed).key and len(store.sizes) == 2


def test_a_tensor_that_was_written_to_meanwhile() -> None:
    """A backend that packs each weight in one scratch tensor."""
    store, scratch = WeightStore(), torch.ones(4)
    first = store.ref(scratch)
    scratch.copy_(torch.arange(4.0))
    second = store.ref(scratch)
    assert first.key != second.key and store.ref(scratch) == second
    output = store.named_data([first, second])
    data = {key: output.buffers[entry.buffer_index] for key, entry in output.pte_data.items()}
    assert first.load(data.get).tolist() == [1, 1, 1, 1] and second.load(data.get).tolist() == [0, 1, 2, 3]


def test_references_in_a_payload() -> None:
    store = WeightStore([weight := torch.randn(4, 3).t()])
    ref = store.ref(weight)
    assert WeightRef.from_json(json.loads(json.dumps(ref.to_json()))) == ref
    for damaged in (None, [], ["k", 0, "float32", [1], []], ["k", 0, "nn", [1], [1]], [3, 0, "float32", [1], [1]]):
        with pytest.raises(InputError, match="reference to a weight is damaged"):
            WeightRef.from_json(damaged)
    with pytest.raises(InputError, match="damaged"):
        WeightRef.from_json(["k", -4, "float32", [1], [1]])
