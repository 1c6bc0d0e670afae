// The payloads that `exir_lowering.plugins.Instructions` writes, for C++17 and nothing else.
//
// `parse` checks everything that it reads: the header, the checksum, every number of a value. Damage is an
// `instructions::Error`, which must not leave the backend: catch it there.

#pragma once

#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace instructions {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An argument: a value by its number, or an immediate.
struct Argument {
  enum Kind { NONE, VALUE, INT, REAL, BOOL, TEXT, LIST } kind = NONE;
  int64_t integer = 0; // of VALUE its number; of BOOL 0 or 1
  double real = 0; // of REAL and INT
  std::string text; // also the name of a dtype
  std::vector<Argument> list;
};

struct Weight {
  std::string key; // of the named data; "" if all elements are zero, and nothing is stored
  size_t offset = 0; // of the first element, in bytes
  std::string dtype; // such as "float32"
  std::vector<int64_t> sizes, strides; // strides in elements

  // How many elements lie between the first and the last one, both included.
  size_t extent() const {
    int64_t extent = 1;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] == 0) {
        return 0;
      }
      if (strides[i] != 0 && sizes[i] - 1 > (std::numeric_limits<int64_t>::max() / 16 - extent) / strides[i]) {
        throw Error("a weight is too large");
      }
      extent += (sizes[i] - 1) * strides[i];
    }
    return static_cast<size_t>(extent);
  }
};

struct Instruction {
  std::string opcode;
  std::vector<Argument> arguments;
  size_t results = 1;
  std::string event; // the name in profiles
};

// Values are numbered: the inputs, the weights, then what instructions return.
struct Program {
  size_t inputs = 0;
  std::vector<Weight> weights;
  std::vector<std::pair<size_t, size_t>> states; // a buffer's value, and its next one
  std::vector<Instruction> code;
  std::vector<size_t> outputs;
};

namespace detail {

// JSON, as far as Python's json module writes it here.
class Reader {
 public:
  Reader(const char* text, const char* end) : at_(text), end_(end) {}

  Argument read(int depth = 0) {
    if (depth > 16) {
      throw Error("lists are nested too deep");
    }
    Argument read_one;
    if (take("[")) {
      read_one.kind = Argument::LIST;
      while (!take("]")) {
        if (!read_one.list.empty()) {
          expect(",");
        }
        read_one.list.push_back(read(depth + 1));
      }
    } else if (take("{")) {
      read_one = tagged(depth);
      expect("}");
    } else if (take("\"")) {
      read_one.kind = Argument::TEXT;
      read_one.text = text();
    } else if (take("true")) {
      read_one.kind = Argument::BOOL;
      read_one.integer = 1;
    } else if (take("false")) {
      read_one.kind = Argument::BOOL;
    } else if (!take("null")) {
      number(read_one);
    }
    return read_one;
  }

  bool ended() const {
    return at_ == end_;
  }

 private:
  // {"value": 3}, and what JSON does not have: {"float": "-inf"}, {"dtype": "float32"}, {"tuple": [...]}.
  Argument tagged(int depth) {
    expect("\"");
    const std::string tag = text();
    expect(":");
    Argument content = read(depth + 1);
    if (tag == "value") {
      if (content.kind != Argument::INT || content.integer < 0) {
        throw Error("the number of a value is none");
      }
      content.kind = Argument::VALUE;
    } else if (tag == "float") {
      content.real = std::strtod(content.text.c_str(), nullptr);
      content.kind = Argument::REAL;
    }
    return content;
  }

  std::string text() {
    std::string found;
    while (!take("\"")) {
      if (at_ == end_ || *at_ == '\\') {
        throw Error("a text has no end, or is escaped"); // opcodes, keys and dtypes are plain
      }
      found += *at_++;
    }
    return found;
  }

  void number(Argument& read_one) {
    std::string text;
    while (at_ != end_ && (std::isalnum(static_cast<unsigned char>(*at_)) || *at_ == '-' || *at_ == '+' || *at_ == '.')) {
      text += *at_++;
    }
    char* rest = nullptr;
    read_one.real = std::strtod(text.c_str(), &rest);
    if (text.empty() || *rest != '\0') {
      throw Error("a number is damaged");
    }
    const bool whole = text.find_first_not_of("-0123456789") == std::string::npos;
    read_one.kind = whole ? Argument::INT : Argument::REAL;
    read_one.integer = whole ? std::strtoll(text.c_str(), nullptr, 10) : 0;
  }

  bool take(const char* word) {
    const size_t length = std::strlen(word);
    if (static_cast<size_t>(end_ - at_) < length || std::memcmp(at_, word, length) != 0) {
      return false;
    }
    at_ += length;
    return true;
  }

  void expect(const char* word) {
    if (!take(word)) {
      throw Error(std::string("expected ") + word);
    }
  }

  const char* at_;
  const char* const end_;
};

inline const std::vector<Argument>& list(const Argument& given, size_t least = 0) {
  if (given.kind != Argument::LIST || given.list.size() < least) {
    throw Error("a list is missing or too short");
  }
  return given.list;
}

inline int64_t natural(const Argument& given, int64_t most = std::numeric_limits<int64_t>::max()) {
  if (given.kind != Argument::INT || given.integer < 0 || given.integer > most) {
    throw Error("a number is missing or too large");
  }
  return given.integer;
}

inline std::vector<int64_t> naturals(const Argument& given) {
  std::vector<int64_t> found;
  for (const Argument& one : list(given)) {
    found.push_back(natural(one, int64_t{1} << 40));
  }
  return found;
}

inline void check_values(const Argument& given, size_t count) {
  if (given.kind == Argument::VALUE && static_cast<size_t>(given.integer) >= count) {
    throw Error("a value is used before it is there");
  }
  for (const Argument& one : given.list) {
    check_values(one, count);
  }
}

inline uint32_t crc32(const char* data, size_t size) {
  uint32_t crc = ~0u;
  for (size_t i = 0; i < size; ++i) {
    crc ^= static_cast<uint8_t>(data[i]);
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ (0xEDB88320u & (~(crc & 1) + 1));
    }
  }
  return ~crc;
}

} // namespace detail

inline Program parse(const void* payload, size_t size, const char* magic, uint32_t version) {
  constexpr size_t HEADER = 24; // of a little-endian machine, as those that run such files are
  const char* bytes = static_cast<const char*>(payload);
  uint32_t found[2]; // the version and the checksum
  uint64_t length;
  std::string start(magic);
  start.resize(8, ' ');
  if (size < HEADER || std::memcmp(bytes, start.data(), 8) != 0) {
    throw Error("it is a payload of another backend");
  }
  std::memcpy(found, bytes + 8, sizeof(found));
  std::memcpy(&length, bytes + 16, sizeof(length));
  if (found[0] != version) {
    throw Error("it has version " + std::to_string(found[0]) + ", expected " + std::to_string(version));
  }
  if (length != size - HEADER || found[1] != detail::crc32(bytes + HEADER, size - HEADER)) {
    throw Error("it is cut off or damaged");
  }
  detail::Reader reader(bytes + HEADER, bytes + size);
  const Argument read = reader.read();
  if (!reader.ended()) {
    throw Error("it has more than it should");
  }
  const std::vector<Argument>& fields = detail::list(read, 5);
  Program program;
  program.inputs = static_cast<size_t>(detail::natural(fields[0], 1 << 16));
  for (const Argument& one : detail::list(fields[1])) {
    const std::vector<Argument>& parts = detail::list(one, 5);
    const auto offset = static_cast<size_t>(detail::natural(parts[1], int64_t{1} << 48));
    program.weights.push_back(
        {parts[0].text, offset, parts[2].text, detail::naturals(parts[3]), detail::naturals(parts[4])});
    if (program.weights.back().sizes.size() != program.weights.back().strides.size()) {
      throw Error("a weight has another number of strides than of sizes");
    }
  }
  const size_t held = program.inputs + program.weights.size();
  size_t count = held;
  for (const Argument& one : detail::list(fields[3])) {
    const std::vector<Argument>& parts = detail::list(one, 4);
    detail::check_values(parts[1], count);
    const std::string event = parts[0].text + " #" + std::to_string(program.code.size());
    const auto results = static_cast<size_t>(detail::natural(parts[2], 1 << 16));
    program.code.push_back({parts[0].text, detail::list(parts[1]), results, event});
    count += results;
  }
  const auto most = static_cast<int64_t>(count) - 1;
  for (const Argument& one : detail::list(fields[2])) {
    const std::vector<Argument>& parts = detail::list(one, 2);
    const auto buffer = static_cast<size_t>(detail::natural(parts[0], static_cast<int64_t>(held) - 1));
    if (buffer < program.inputs) {
      throw Error("an input is no buffer");
    }
    program.states.emplace_back(buffer, static_cast<size_t>(detail::natural(parts[1], most)));
  }
  for (const Argument& one : detail::list(fields[4])) {
    program.outputs.push_back(static_cast<size_t>(detail::natural(one, most)));
  }
  return program;
}

} // namespace instructions
