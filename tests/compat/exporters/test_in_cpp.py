"""Files of classes of ten kinds run in a C++ program that has ExecuTorch's Module, and return what eager mode does."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import device_client
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers.exporters.exporter_executorch", reason="the extra 'exporters' is not installed")

import class_table
import exported_classes

CLASSES = (
    ("BertModel", "static", "plain"),
    ("LlamaForCausalLM", "dynamic", "patched"),
    ("T5ForConditionalGeneration", "static", "plain"),
    ("ViTModel", "static", "patched"),
    ("SwinModel", "static", "plain"),
    ("Wav2Vec2Model", "static", "plain"),
    ("WhisperForConditionalGeneration", "static", "patched"),
    ("CLIPModel", "static", "plain"),
    ("MambaForCausalLM", "static", "plain"),
    ("MixtralForCausalLM", "static", "plain"),
)
"""Text, vision, audio, both of two, a state space, a mixture of experts."""

SOURCE = r"""
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <fstream>
#include <iostream>
using namespace executorch::extension;
using executorch::runtime::EValue;

template <class T> T read(std::istream& from) {
  T value;
  from.read(reinterpret_cast<char*>(&value), sizeof value);
  return value;
}
template <class T> void write(std::ostream& to, T value) { to.write(reinterpret_cast<char*>(&value), sizeof value); }

// client FILE INPUTS RESULTS: calls forward with each call's inputs, as `written` below writes them, and writes the
// tensors that it returns in the same form.
int main(int, char** words) {
  Module module(words[1]);
  std::ifstream from(words[2], std::ios::binary);
  std::ofstream to(words[3], std::ios::binary);
  for (int calls = read<int>(from); calls > 0; --calls) {
    std::vector<TensorPtr> tensors;
    std::vector<EValue> inputs;
    for (int left = read<int>(from); left > 0; --left) {
      const int type = read<int>(from);
      if (type == -1) inputs.emplace_back();
      else if (type == -2) inputs.emplace_back(read<int64_t>(from));
      else if (type == -3) inputs.emplace_back(read<double>(from));
      else {
        std::vector<executorch::aten::SizesType> sizes(read<int>(from));
        for (auto& size : sizes) size = read<int>(from);
        std::vector<uint8_t> data(read<int64_t>(from));
        from.read(reinterpret_cast<char*>(data.data()), data.size());
        tensors.push_back(make_tensor_ptr(sizes, std::move(data), static_cast<executorch::aten::ScalarType>(type)));
        inputs.emplace_back(tensors.back());
      }
    }
    const auto results = module.forward(inputs);
    if (!results.ok()) {
      std::cerr << "forward: error " << static_cast<int>(results.error());
      return 1;
    }
    int count = 0;
    for (const auto& result : *results) count += result.isTensor();
    write(to, count);
    for (const auto& result : *results) {
      if (!result.isTensor()) continue;
      const auto tensor = result.toTensor();
      write(to, static_cast<int>(tensor.scalar_type()));
      write(to, static_cast<int>(tensor.dim()));
      for (const auto size : tensor.sizes()) write(to, static_cast<int>(size));
      write(to, static_cast<int64_t>(tensor.nbytes()));
      to.write(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
    }
  }
}
"""

DTYPES = {torch.uint8: 0, torch.int32: 3, torch.int64: 4, torch.float32: 6, torch.float64: 7, torch.bool: 11}
"""How ExecuTorch numbers types of elements."""


def written(value: Any) -> bytes:
    """An input as the program reads it."""
    if isinstance(value, Tensor):
        data = value.contiguous().numpy().tobytes()
        head = (DTYPES[value.dtype], value.dim(), *value.shape)
        return struct.pack(f"<{len(head)}iq", *head, len(data)) + data
    if value is None:
        return struct.pack("<i", -1)
    return struct.pack("<id", -3, value) if isinstance(value, float) else struct.pack("<iq", -2, value)


def tensors(data: bytes) -> Iterator[list[Tensor]]:
    """What each call returned."""
    dtypes, at = {number: dtype for dtype, number in DTYPES.items()}, 0

    def taken(form: str) -> tuple[Any, ...]:
        nonlocal at
        at += struct.calcsize("<" + form)
        return struct.unpack_from("<" + form, data, at - struct.calcsize("<" + form))

    while at < len(data):
        call = []
        for _ in range(*taken("i")):
            dtype, dimensions = taken("ii")
            *sizes, count = taken(f"{dimensions}iq")
            (content,) = taken(f"{count}s")
            flat = torch.frombuffer(bytearray(content), dtype=dtypes[dtype]) if content else torch.empty(0)
            call.append(flat.reshape(sizes))
        yield call


def results(client: Path, buffer: bytes, feeds: Sequence[list[Any]], folder: Path) -> list[list[Tensor]]:
    """What a file returns in the program, for each call's inputs."""
    file, inputs, output = (folder / name for name in ("model.pte", "inputs", "results"))
    file.write_bytes(buffer)
    calls = (struct.pack("<i", len(feed)) + b"".join(map(written, feed)) for feed in feeds)
    inputs.write_bytes(struct.pack("<i", len(feeds)) + b"".join(calls))
    subprocess.run([client, file, inputs, output], check=True, timeout=60)
    return list(tensors(output.read_bytes()))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return device_client.build(tmp_path_factory.mktemp("client"), SOURCE)


@pytest.mark.parametrize(("name", "shapes", "way"), CLASSES)
def test_a_file_is_right_in_a_module(name: str, shapes: str, way: str, client: Path, tmp_path: Path) -> None:
    entry, dynamic = exported_classes.entries()[name], shapes == "dynamic"
    with ExitStack() as patches:
        model, program = class_table.export(entry, dynamic, patches, way == "plain")
        calls = list(class_table.calls(entry, model, program, dynamic))
        buffer = class_table.lower(program, way)
    assert len({sizes for *_, sizes in calls}) == 1 + dynamic
    for got, (_, expected, _) in zip(
        results(client, buffer, [feed for feed, *_ in calls], tmp_path), calls, strict=True
    ):
        assert class_table.difference(got, expected) <= class_table.RIGHT
