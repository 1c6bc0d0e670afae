// Backends of the ExecuTorch runtime that call back through C functions, so that Python can implement them.
//
// Compiled at first use by shim.py against the headers of the installed executorch wheel; bridge.py is the other side.
// Only plain C types cross the border, and no exception does. A callback that fails to return gives 0, so 0 is failure,
// as is the negative of one of the runtime's errors.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/event_tracer.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/platform/clock.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace runtime = ::executorch::runtime;
using runtime::Error;
using runtime::EValue;

extern "C" {

struct exir_spec {
  const char* key;
  const void* value;
  size_t size;
};

struct exir_argument {
  int32_t kind; // a Kind
  int32_t dtype;
  int32_t rank;
  const int32_t* sizes;
  const int32_t* strides;
  void* data;
  size_t bytes;
  int64_t integer;
  double real;
  void* value; // the EValue
};

struct exir_data {
  const void* data;
  size_t size;
  void* buffer;
};

struct exir_callbacks {
  int32_t (*available)(int32_t slot);
  int64_t (*compile)(int32_t slot, void* context, const char* method, const void* processed, size_t size,
                     const exir_spec* specs, size_t spec_count);
  int32_t (*execute)(int64_t handle, exir_argument* arguments, size_t count, void* tracer);
  void (*destroy)(int64_t handle);
};

} // extern "C"

namespace {

enum Kind : int32_t { NONE = 0, TENSOR = 1, INT = 2, DOUBLE = 3, BOOL = 4, OTHER = 5 };

exir_callbacks callbacks;
// Set when the interpreter ends: programs that are still alive call destroy after it is gone.
std::atomic<bool> closed{false};

void describe(EValue& value, exir_argument& argument) {
  argument = {};
  argument.value = &value;
  if (value.isTensor()) {
    auto& tensor = value.toTensor();
    argument.kind = TENSOR;
    argument.dtype = static_cast<int32_t>(tensor.scalar_type());
    argument.rank = static_cast<int32_t>(tensor.dim());
    argument.sizes = tensor.sizes().data();
    argument.strides = tensor.strides().data();
    argument.data = const_cast<void*>(tensor.const_data_ptr());
    argument.bytes = tensor.nbytes();
  } else if (value.isInt()) {
    argument.kind = INT;
    argument.integer = value.toInt();
  } else if (value.isDouble()) {
    argument.kind = DOUBLE;
    argument.real = value.toDouble();
  } else if (value.isBool()) {
    argument.kind = BOOL;
    argument.integer = value.toBool();
  } else {
    argument.kind = value.isNone() ? NONE : OTHER;
  }
}

Error error_of(int64_t result) {
  return result < 0 ? static_cast<Error>(-result) : Error::Internal;
}

class CallbackBackend final : public runtime::BackendInterface {
 public:
  explicit CallbackBackend(int32_t slot) : slot_(slot) {}

  bool is_available() const override {
    return !closed && callbacks.available(slot_) != 0;
  }

  runtime::Result<runtime::DelegateHandle*> init(
      runtime::BackendInitContext& context,
      runtime::FreeableBuffer* processed,
      runtime::ArrayRef<runtime::CompileSpec> compile_specs) const override {
    if (closed) {
      return Error::InvalidState;
    }
    std::unique_ptr<exir_spec[]> specs(new (std::nothrow) exir_spec[compile_specs.size() + 1]);
    if (specs == nullptr) {
      return Error::MemoryAllocationFailed;
    }
    for (size_t i = 0; i < compile_specs.size(); ++i) {
      specs[i] = {compile_specs[i].key, compile_specs[i].value.buffer, compile_specs[i].value.nbytes};
    }
    const int64_t handle = callbacks.compile(
        slot_, &context, context.get_method_name(), processed->data(), processed->size(), specs.get(),
        compile_specs.size());
    processed->Free();
    if (handle <= 0) {
      return error_of(handle);
    }
    return reinterpret_cast<runtime::DelegateHandle*>(static_cast<intptr_t>(handle));
  }

  Error execute(
      runtime::BackendExecutionContext& context,
      runtime::DelegateHandle* handle,
      runtime::Span<EValue*> args) const override {
    if (closed) {
      return Error::InvalidState;
    }
    std::unique_ptr<exir_argument[]> arguments(new (std::nothrow) exir_argument[args.size() + 1]);
    if (arguments == nullptr) {
      return Error::MemoryAllocationFailed;
    }
    for (size_t i = 0; i < args.size(); ++i) {
      describe(*args[i], arguments[i]);
    }
    const int64_t key = static_cast<int64_t>(reinterpret_cast<intptr_t>(handle));
    const int32_t result = callbacks.execute(key, arguments.get(), args.size(), context.event_tracer());
    return result == 1 ? Error::Ok : error_of(result);
  }

  void destroy(runtime::DelegateHandle* handle) const override {
    if (!closed) {
      callbacks.destroy(static_cast<int64_t>(reinterpret_cast<intptr_t>(handle)));
    }
  }

 private:
  const int32_t slot_;
};

} // namespace

EXPORT void exir_start(const exir_callbacks* given) {
  callbacks = *given;
}

EXPORT void exir_close() {
  closed = true;
}

// The runtime cannot forget a backend, so name and backend live as long as the process.
EXPORT int32_t exir_register(const char* name, int32_t slot) {
  const size_t length = std::strlen(name) + 1;
  char* kept = new (std::nothrow) char[length];
  auto* backend = new (std::nothrow) CallbackBackend(slot);
  if (kept == nullptr || backend == nullptr) {
    return static_cast<int32_t>(Error::MemoryAllocationFailed);
  }
  std::memcpy(kept, name, length);
  return static_cast<int32_t>(runtime::register_backend({kept, backend}));
}

// Give a tensor another shape, and say where its memory is then.
EXPORT int32_t exir_resize(exir_argument* argument, const int32_t* sizes, size_t rank) {
  auto& value = *static_cast<EValue*>(argument->value);
  const Error error = runtime::resize_tensor(value.toTensor(), {sizes, rank});
  if (error == Error::Ok) {
    describe(value, *argument);
  }
  return static_cast<int32_t>(error);
}

EXPORT void exir_set_int(exir_argument* argument, int64_t number) {
  *static_cast<EValue*>(argument->value) = EValue(number);
}

EXPORT void exir_set_double(exir_argument* argument, double number) {
  *static_cast<EValue*>(argument->value) = EValue(number);
}

EXPORT void exir_set_bool(exir_argument* argument, int32_t number) {
  *static_cast<EValue*>(argument->value) = EValue(number != 0);
}

// Find named data while a delegate is compiled; what was found has to be released.
EXPORT int32_t exir_named_data(void* context, const char* key, exir_data* found) {
  const auto* map = static_cast<runtime::BackendInitContext*>(context)->get_named_data_map();
  if (map == nullptr) {
    return static_cast<int32_t>(Error::NotFound);
  }
  auto result = map->get_data(key);
  if (!result.ok()) {
    return static_cast<int32_t>(result.error());
  }
  auto* buffer = new (std::nothrow) runtime::FreeableBuffer(std::move(result.get()));
  if (buffer == nullptr) {
    return static_cast<int32_t>(Error::MemoryAllocationFailed);
  }
  *found = {buffer->data(), buffer->size(), buffer};
  return 0;
}

EXPORT uint64_t exir_ticks() {
  return runtime::pal_current_ticks();
}

// Record a profile event of the delegate that is being executed. It has a name, or a number and no name.
EXPORT void exir_event(void* tracer, const char* name, int32_t number, uint64_t start, uint64_t end) {
  static_cast<runtime::EventTracer*>(tracer)->log_profiling_delegate(
      name, name == nullptr ? number : runtime::kUnsetDelegateDebugIntId, start, end);
}

EXPORT void exir_release(void* buffer) {
  delete static_cast<runtime::FreeableBuffer*>(buffer);
}
