// run MODEL.pte [SIZE]: calls "forward" with ones, whose first size is SIZE if given, and prints its outputs.

#include <cstdio>
#include <cstdlib>
#include <vector>

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

using namespace executorch::extension;

int main(int count, char** words) {
  if (count < 2) {
    std::fprintf(stderr, "usage: run MODEL.pte [SIZE]\n");
    return 2;
  }
  Module module(words[1], Module::LoadMode::Mmap);
  const auto meta = module.method_meta("forward");
  if (!meta.ok()) {
    std::fprintf(stderr, "cannot be read: error 0x%x\n", static_cast<unsigned>(meta.error()));
    return 1;
  }
  std::vector<TensorPtr> inputs; // which own the memory
  std::vector<executorch::runtime::EValue> values;
  for (size_t i = 0; i < meta->num_inputs(); ++i) {
    const auto declared = meta->input_tensor_meta(i)->sizes();
    std::vector<executorch::aten::SizesType> sizes(declared.begin(), declared.end());
    if (count > 2 && !sizes.empty()) {
      sizes[0] = std::atoi(words[2]);
    }
    inputs.push_back(ones(sizes));
    values.emplace_back(inputs.back());
  }
  const auto results = module.execute("forward", values);
  if (!results.ok()) {
    std::fprintf(stderr, "error 0x%x\n", static_cast<unsigned>(results.error()));
    return 1;
  }
  for (const auto& result : *results) {
    const auto& tensor = result.toTensor();
    for (const auto size : tensor.sizes()) {
      std::printf("[%d]", static_cast<int>(size));
    }
    for (ssize_t i = 0; i < tensor.numel(); ++i) {
      std::printf(" %.9g", tensor.const_data_ptr<float>()[i]);
    }
    std::printf("\n");
  }
}
