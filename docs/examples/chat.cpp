// chat FILE SAID...: chats with a model in C++. Each argument is what the person says next.
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::runtime::EValue;

std::vector<EValue> call(Module& module, const char* method, const std::vector<EValue>& inputs) {
  auto result = module.execute(method, inputs);
  if (!result.ok()) {
    std::fprintf(stderr, "%s failed with error %d\n", method, static_cast<int>(result.error()));
    std::exit(1);
  }
  return result.get();
}

class Chat {
 public:
  // The methods have one KV cache only if their memory is shared; loading a method writes its initial state.
  explicit Chat(const char* path)
      : module_(path, Module::LoadMode::Mmap, nullptr, nullptr, nullptr, /*share_memory_arenas=*/true) {
    for (const char* method : {"forward", "step"}) {
      if (module_.load_method(method) != executorch::runtime::Error::Ok) {
        std::fprintf(stderr, "cannot load %s\n", method);
        std::exit(1);
      }
    }
    for (const EValue& end : call(module_, "get_eos_ids", {})) {
      ends_.push_back(end.toInt());
    }
  }

  // Returns what the model answers. The end of its last turn was not processed yet: the prompt begins with it.
  std::string answer(const std::string& said) {
    std::string prompt = "\n> " + said + "\n< ", text;
    int64_t token = next_token("forward", {prompt.begin(), prompt.end()});
    while (std::find(ends_.begin(), ends_.end(), token) == ends_.end()) {
      text.push_back(static_cast<char>(token));
      token = next_token("step", {token});
    }
    return text;
  }

 private:
  // Runs a method on the tokens that come next, and returns the most likely token after them.
  int64_t next_token(const char* method, std::vector<int64_t> tokens) {
    auto input = from_blob(tokens.data(), {1, static_cast<int>(tokens.size())}, ScalarType::Long);
    auto start = from_blob(&position_, {1}, ScalarType::Long);
    const Tensor logits = call(module_, method, {input, start})[0].toTensor();
    position_ += static_cast<int64_t>(tokens.size());
    const float* end = logits.const_data_ptr<float>() + logits.numel();
    const float* last = end - logits.size(2);
    return std::max_element(last, end) - last;
  }

  Module module_;
  std::vector<int64_t> ends_;
  int64_t position_ = 0;
};

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: chat FILE SAID...\n");
    return 2;
  }
  Chat chat(argv[1]);
  for (int i = 2; i < argc; ++i) {
    std::printf("< %s\n", chat.answer(argv[i]).c_str());
  }
}
