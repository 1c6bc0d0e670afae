// The backend tinyvec in ExecuTorch's runtime: it executes what tinyvec/backend.py compiled, on the CPU, in float32.
//
// `COMPUTE` is what to change: one function for each opcode. Nothing here throws into the runtime.

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/event_tracer_hooks_delegate.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/platform/log.h>

#include "instructions.h"

namespace runtime = ::executorch::runtime;
using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::aten::Tensor;
using instructions::Argument;
using instructions::Program;
using instructions::Weight;
using runtime::Error;

namespace {

constexpr char MAGIC[] = "TINYVEC";
constexpr uint32_t VERSION = 1;

// A value in the machine's memory: contiguous.
struct Value {
  std::vector<SizesType> sizes;
  std::vector<float> data;
};

void require(bool holds, const char* what) {
  if (!holds) {
    throw instructions::Error(what);
  }
}

size_t elements(const std::vector<SizesType>& sizes) {
  size_t count = 1;
  for (const SizesType size : sizes) {
    count *= static_cast<size_t>(size);
    require(count <= size_t{1} << 40, "a value is too large");
  }
  return count;
}

// Call `visit(contiguous, strided)` with the place of each element in two orders.
template <typename Strides, typename Visit>
void for_each_element(const std::vector<SizesType>& sizes, const Strides& strides, Visit visit) {
  std::vector<SizesType> index(sizes.size(), 0);
  const size_t count = elements(sizes);
  for (size_t place = 0; place < count; ++place) {
    size_t strided = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      strided += static_cast<size_t>(index[i]) * static_cast<size_t>(strides[i]);
    }
    visit(place, strided);
    for (size_t i = sizes.size(); i-- > 0 && ++index[i] == sizes[i];) {
      index[i] = 0;
    }
  }
}

using Arguments = std::vector<const Value*>; // nullptr for what is no value

template <typename Compute>
Value elementwise(const Value& one, const Value& other, Compute compute) {
  Value made;
  const size_t rank = std::max(one.sizes.size(), other.sizes.size());
  made.sizes.resize(rank);
  std::vector<size_t> first(rank), second(rank); // strides, 0 where a size of 1 is repeated
  size_t stride[2] = {1, 1};
  for (size_t back = 1; back <= rank; ++back) {
    const size_t i = rank - back;
    const SizesType a = back <= one.sizes.size() ? one.sizes[one.sizes.size() - back] : 1;
    const SizesType b = back <= other.sizes.size() ? other.sizes[other.sizes.size() - back] : 1;
    require(a == b || a == 1 || b == 1, "shapes do not broadcast");
    made.sizes[i] = a == 1 ? b : a;
    first[i] = a == 1 ? 0 : stride[0];
    second[i] = b == 1 ? 0 : stride[1];
    stride[0] *= static_cast<size_t>(a);
    stride[1] *= static_cast<size_t>(b);
  }
  made.data.resize(elements(made.sizes));
  for_each_element(made.sizes, first, [&](size_t place, size_t from) { made.data[place] = one.data[from]; });
  for_each_element(made.sizes, second, [&](size_t place, size_t from) {
    made.data[place] = compute(made.data[place], other.data[from]);
  });
  return made;
}

// [..., k] times [k, n], or its transpose as a linear layer has it, plus a bias.
Value product(const Value& one, const Value& other, bool transposed, const Value* bias) {
  require(!one.sizes.empty() && other.sizes.size() == 2, "a product of other ranks");
  const size_t inner = static_cast<size_t>(one.sizes.back());
  const size_t columns = static_cast<size_t>(other.sizes[transposed ? 0 : 1]);
  require(inner == static_cast<size_t>(other.sizes[transposed ? 1 : 0]), "a product of other sizes");
  require(bias == nullptr || bias->data.size() == columns, "a bias of another size");
  Value made{one.sizes, {}};
  made.sizes.back() = static_cast<SizesType>(columns);
  made.data.resize(elements(made.sizes));
  for (size_t row = 0; columns != 0 && row < made.data.size() / columns; ++row) {
    for (size_t column = 0; column < columns; ++column) {
      float sum = bias == nullptr ? 0.f : bias->data[column];
      for (size_t k = 0; k < inner; ++k) {
        const size_t place = transposed ? column * inner + k : k * columns + column;
        sum += one.data[row * inner + k] * other.data[place];
      }
      made.data[row * columns + column] = sum;
    }
  }
  return made;
}

using Compute = std::function<Value(const Arguments& values, const std::vector<Argument>& arguments)>;

Value sum(const Arguments& values, double factor) {
  const auto alpha = static_cast<float>(factor);
  return elementwise(*values[0], *values[1], [alpha](float a, float b) { return a + alpha * b; });
}

struct Operator {
  size_t arguments; // how many
  size_t operands; // how many of them, from the first one on, have to be values
  size_t values; // how many of them may be
  Compute compute;
};

// Arguments are those of the operator's schema, in order.
const std::map<std::string, Operator> COMPUTE = {
    {"ADD", {3, 2, 2, [](const Arguments& v, const std::vector<Argument>& a) { return sum(v, a[2].real); }}},
    {"SUB", {3, 2, 2, [](const Arguments& v, const std::vector<Argument>& a) { return sum(v, -a[2].real); }}},
    {"MUL", {2, 2, 2, [](const Arguments& v, const std::vector<Argument>&) {
       return elementwise(*v[0], *v[1], [](float a, float b) { return a * b; });
     }}},
    {"RELU", {1, 1, 1, [](const Arguments& v, const std::vector<Argument>&) {
       Value made = *v[0];
       for (float& one : made.data) {
         one = one < 0.f ? 0.f : one; // NaN stays NaN
       }
       return made;
     }}},
    {"MM", {2, 2, 2, [](const Arguments& v, const std::vector<Argument>&) { return product(*v[0], *v[1], false, nullptr); }}},
    {"LINEAR", {3, 2, 3, [](const Arguments& v, const std::vector<Argument>&) { return product(*v[0], *v[1], true, v[2]); }}},
};

// What `init` makes, `execute` gets, and `destroy` deletes.
struct Machine {
  Program program;
  std::vector<Value> weights; // buffers, too, with their current values
};

Value load(const Weight& weight, const runtime::NamedDataMap* named_data) {
  require(weight.dtype == "float32", "a weight is not float32");
  Value made;
  made.sizes.assign(weight.sizes.begin(), weight.sizes.end());
  const size_t extent = weight.extent();
  made.data.resize(elements(made.sizes));
  if (weight.key.empty() || extent == 0) {
    return made; // zeros, which are not stored
  }
  require(named_data != nullptr, "the file has no named data");
  auto found = named_data->get_data(weight.key);
  require(found.ok(), "named data of the file is missing: load it with its data files");
  auto& buffer = found.get();
  const bool fits = weight.offset <= buffer.size() && extent <= (buffer.size() - weight.offset) / sizeof(float);
  if (fits) {
    const char* first = static_cast<const char*>(buffer.data()) + weight.offset;
    for_each_element(made.sizes, weight.strides, [&](size_t place, size_t strided) {
      std::memcpy(&made.data[place], first + strided * sizeof(float), sizeof(float)); // it may be unaligned
    });
  }
  buffer.Free(); // copied
  require(fits, "named data of the file is too short");
  return made;
}

Value read(const Tensor& tensor) {
  require(tensor.scalar_type() == ScalarType::Float, "an input is not float32");
  Value made{{tensor.sizes().begin(), tensor.sizes().end()}, std::vector<float>(tensor.numel())};
  const float* data = tensor.const_data_ptr<float>();
  for_each_element(made.sizes, tensor.strides(), [&](size_t place, size_t from) { made.data[place] = data[from]; });
  return made;
}

// The memory of an output is there for its largest shape; it says by its sizes what it has now.
Error write(const Value& value, Tensor& tensor) {
  require(tensor.scalar_type() == ScalarType::Float, "an output is not float32");
  const Error error = runtime::resize_tensor(tensor, {value.sizes.data(), value.sizes.size()});
  if (error == Error::Ok) {
    float* data = tensor.mutable_data_ptr<float>();
    for_each_element(value.sizes, tensor.strides(), [&](size_t place, size_t to) { data[to] = value.data[place]; });
  }
  return error;
}

class TinyvecBackend final : public runtime::BackendInterface {
 public:
  bool is_available() const override {
    return true; // say here whether the device is present
  }

  runtime::Result<runtime::DelegateHandle*> init(
      runtime::BackendInitContext& context,
      runtime::FreeableBuffer* processed,
      runtime::ArrayRef<runtime::CompileSpec> compile_specs) const override {
    (void)compile_specs; // the options of the partitioner
    auto machine = std::make_unique<Machine>();
    try {
      machine->program = instructions::parse(processed->data(), processed->size(), MAGIC, VERSION);
      for (const auto& one : machine->program.code) {
        const auto found = COMPUTE.find(one.opcode);
        require(found != COMPUTE.end(), "an opcode is unknown: the file is newer");
        require(one.arguments.size() == found->second.arguments && one.results == 1, "an opcode has other arguments");
        for (size_t i = 0; i < one.arguments.size(); ++i) {
          const bool value = one.arguments[i].kind == Argument::VALUE;
          require(value ? i < found->second.values : i >= found->second.operands, "an operand is of another kind");
        }
      }
      for (const Weight& weight : machine->program.weights) {
        machine->weights.push_back(load(weight, context.get_named_data_map()));
      }
    } catch (const std::exception& error) {
      ET_LOG(Error, "tinyvec cannot read its payload: %s", error.what());
      return Error::DelegateInvalidCompatibility;
    }
    processed->Free(); // parsed
    return machine.release();
  }

  Error execute(
      runtime::BackendExecutionContext& context,
      runtime::DelegateHandle* handle,
      runtime::Span<runtime::EValue*> args) const override {
    auto& machine = *static_cast<Machine*>(handle);
    const Program& program = machine.program;
    if (args.size() != program.inputs + program.outputs.size()) {
      return Error::InvalidArgument; // inputs first, then outputs
    }
    try {
      std::vector<Value> values;
      for (size_t i = 0; i < program.inputs; ++i) {
        require(args[i]->isTensor(), "an input is no tensor");
        values.push_back(read(args[i]->toTensor()));
      }
      values.insert(values.end(), machine.weights.begin(), machine.weights.end());
      for (const auto& one : program.code) {
        Arguments operands;
        for (const Argument& argument : one.arguments) {
          operands.push_back(argument.kind == Argument::VALUE ? &values[argument.integer] : nullptr);
        }
        auto* tracer = context.event_tracer(); // null if nothing is profiled
        const auto event = runtime::event_tracer_start_profiling_delegate(
            tracer, one.event.c_str(), runtime::kUnsetDelegateDebugIntId);
        Value made = COMPUTE.at(one.opcode).compute(operands, one.arguments);
        runtime::event_tracer_end_profiling_delegate(tracer, event);
        values.push_back(std::move(made));
      }
      for (size_t i = 0; i < program.outputs.size(); ++i) {
        const Error error = write(values[program.outputs[i]], args[program.inputs + i]->toTensor());
        if (error != Error::Ok) {
          return error;
        }
      }
      for (const auto& state : program.states) {
        machine.weights[state.first - program.inputs] = values[state.second];
      }
    } catch (const std::exception& error) {
      ET_LOG(Error, "tinyvec: %s", error.what());
      return Error::DelegateInvalidHandle;
    }
    return Error::Ok;
  }

  void destroy(runtime::DelegateHandle* handle) const override {
    delete static_cast<Machine*>(handle);
  }
};

TinyvecBackend backend;
// When the library is loaded. The name is the id in the file.
[[maybe_unused]] const Error registered = runtime::register_backend({"tinyvec", &backend});

} // namespace
