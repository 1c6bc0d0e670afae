// client FILE.pte METHOD INPUTS OUTPUTS TRACE [DATA.ptd]...: calls a method twice, and prints the instructions of each.
//
// INPUTS and OUTPUTS: for each tensor its scalar type, rank, sizes and order of dimensions as int32, then its values as
// they lie in memory; for an input that is a number the rank is -1, as an output it is a tensor. TRACE, if it is not "",
// gets an ETDump of the second call; counts are then a little larger, by what recording takes.
#include "clock.h"
#include <executorch/devtools/etdump/etdump_flatcc.h>
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

using executorch::aten::DimOrderType;
using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::etdump::ETDumpGen;
using executorch::extension::Module;
using executorch::extension::TensorPtr;
using executorch::runtime::EValue;

static bool read_number(std::ifstream& file, int32_t& number) {
  return static_cast<bool>(file.read(reinterpret_cast<char*>(&number), sizeof number));
}

static void write_number(std::ofstream& file, int32_t number) {
  file.write(reinterpret_cast<const char*>(&number), sizeof number);
}

template <typename Number>
static EValue read_plain(std::ifstream& file) {
  Number number;
  file.read(reinterpret_cast<char*>(&number), sizeof number);
  return EValue(number);
}

static std::vector<EValue> read_values(const char* path, std::vector<TensorPtr>& kept) {
  std::ifstream file(path, std::ios::binary);
  std::vector<EValue> values;
  for (int32_t code, rank, number; read_number(file, code) && read_number(file, rank);) {
    const auto type = static_cast<ScalarType>(code);
    if (rank < 0) {
      values.push_back(type == ScalarType::Long       ? read_plain<int64_t>(file)
                       : type == ScalarType::Double ? read_plain<double>(file)
                                                    : read_plain<bool>(file));
      continue;
    }
    std::vector<SizesType> sizes;
    std::vector<DimOrderType> order;
    size_t bytes = executorch::runtime::elementSize(type);
    for (int32_t dim = 0; dim < rank && read_number(file, number); ++dim) {
      sizes.push_back(number);
      bytes *= number;
    }
    for (int32_t dim = 0; dim < rank && read_number(file, number); ++dim) order.push_back(number);
    std::vector<uint8_t> elements(bytes);
    file.read(reinterpret_cast<char*>(elements.data()), bytes);
    kept.push_back(executorch::extension::make_tensor_ptr(sizes, std::move(elements), order, {}, type));
    values.emplace_back(kept.back());
  }
  return values;
}

template <typename Number>
static void write_plain(std::ofstream& file, ScalarType type, Number number) {
  write_number(file, static_cast<int32_t>(type));
  write_number(file, 0);
  file.write(reinterpret_cast<const char*>(&number), sizeof number);
}

static void write_value(std::ofstream& file, const EValue& value) {
  if (value.isInt()) return write_plain(file, ScalarType::Long, value.toInt());
  if (value.isDouble()) return write_plain(file, ScalarType::Double, value.toDouble());
  if (value.isBool()) return write_plain(file, ScalarType::Bool, value.toBool());
  if (!value.isTensor()) return;
  const auto& tensor = value.toTensor();
  write_number(file, static_cast<int32_t>(tensor.scalar_type()));
  write_number(file, tensor.dim());
  for (auto size : tensor.sizes()) write_number(file, size);
  for (auto dim : tensor.dim_order()) write_number(file, dim);
  file.write(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
}

int main(int count, char** words) {
  if (count < 6) return 2;
  auto tracer = *words[5] ? std::make_unique<ETDumpGen>() : nullptr;
  auto* trace = tracer.get();
  const std::vector<std::string> data(words + 6, words + count);
  Module module(words[1], data, Module::LoadMode::File, std::move(tracer));
  std::vector<TensorPtr> kept;
  const std::vector<EValue> inputs = read_values(words[3], kept);
  if (auto loaded = module.load_method(words[2]); loaded != executorch::runtime::Error::Ok) {
    std::printf("error %d\n", static_cast<int>(loaded));
    return 1;
  }
  for (int call = 0; call < 2; ++call) {
    if (trace) trace->reset();
    const uint64_t start = instructions();
    auto outputs = module.execute(words[2], inputs);
    const uint64_t end = instructions();
    if (!outputs.ok()) {
      std::printf("error %d\n", static_cast<int>(outputs.error()));
      return 1;
    }
    std::printf("call %" PRIu64 "\n", end - start);
    std::ofstream file(words[4], std::ios::binary);
    for (auto& value : *outputs) write_value(file, value);
  }
  if (trace) {
    auto result = trace->get_etdump_data();
    std::ofstream(words[5], std::ios::binary).write(static_cast<const char*>(result.buf), result.size);
  }
}
