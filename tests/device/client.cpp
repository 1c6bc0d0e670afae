// client FILE.pte INPUTS OUTPUTS [TRACE]: calls "forward" twice and prints the instructions of each call.
//
// INPUTS and OUTPUTS: for each tensor its scalar type, rank and sizes as int32, then its values. TRACE gets an ETDump of
// the second call; counts are then a little larger, by what recording takes.
#include "clock.h"
#include <executorch/devtools/etdump/etdump_flatcc.h>
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <memory>
#include <vector>

using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::etdump::ETDumpGen;
using executorch::extension::Module;
using executorch::extension::TensorPtr;

static bool read_number(std::ifstream& file, int32_t& number) {
  return static_cast<bool>(file.read(reinterpret_cast<char*>(&number), sizeof number));
}

static void write_number(std::ofstream& file, int32_t number) {
  file.write(reinterpret_cast<const char*>(&number), sizeof number);
}

static std::vector<TensorPtr> read_tensors(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<TensorPtr> tensors;
  for (int32_t type, rank, size; read_number(file, type) && read_number(file, rank);) {
    std::vector<SizesType> sizes;
    size_t bytes = executorch::runtime::elementSize(static_cast<ScalarType>(type));
    for (; rank > 0 && read_number(file, size); --rank) {
      sizes.push_back(size);
      bytes *= size;
    }
    std::vector<uint8_t> values(bytes);
    file.read(reinterpret_cast<char*>(values.data()), bytes);
    tensors.push_back(executorch::extension::make_tensor_ptr(sizes, std::move(values), static_cast<ScalarType>(type)));
  }
  return tensors;
}

int main(int count, char** words) {
  if (count < 4) return 2;
  auto tracer = count > 4 ? std::make_unique<ETDumpGen>() : nullptr;
  auto* trace = tracer.get();
  Module module(words[1], Module::LoadMode::File, std::move(tracer));
  std::vector<TensorPtr> tensors = read_tensors(words[2]);
  std::vector<executorch::runtime::EValue> inputs(tensors.begin(), tensors.end());
  if (auto loaded = module.load_forward(); loaded != executorch::runtime::Error::Ok) {
    std::printf("error %d\n", static_cast<int>(loaded));
    return 1;
  }
  for (int call = 0; call < 2; ++call) {
    if (trace) trace->reset();
    const uint64_t start = instructions();
    auto outputs = module.forward(inputs);
    const uint64_t end = instructions();
    if (!outputs.ok()) {
      std::printf("error %d\n", static_cast<int>(outputs.error()));
      return 1;
    }
    std::printf("call %" PRIu64 "\n", end - start);
    std::ofstream file(words[3], std::ios::binary);
    for (auto& value : *outputs) {
      if (!value.isTensor()) continue;
      auto tensor = value.toTensor();
      write_number(file, static_cast<int32_t>(tensor.scalar_type()));
      write_number(file, tensor.dim());
      for (auto size : tensor.sizes()) write_number(file, size);
      file.write(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
    }
  }
  if (trace) {
    auto result = trace->get_etdump_data();
    std::ofstream(words[4], std::ios::binary).write(static_cast<const char*>(result.buf), result.size);
  }
}
