"""Mistakes in the example's run time in C++, all in one library, which makes the one that its file is named after."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from folders import ROOT

CPP = ROOT / "docs" / "examples" / "tinyvec" / "cpp"


@dataclass(frozen=True)
class Mistake:
    """What is wrong, and where it has to be seen.

    Attributes:
        name: What is wrong; the name of the library's file.
        case: A case that fails.
        check: What fails there.
        says: What the message contains.
        changes: What the example has, once, and what it becomes; `HERE` is whether this mistake is made.
    """

    name: str
    case: str
    check: str
    says: str
    changes: Mapping[str, str]

    def __str__(self) -> str:
        return self.name


OFF = "is not that of eager PyTorch"
DIED = "ended its process"

MISTAKES = (
    Mistake("no-resize", "dynamic/batch", "numbers", OFF, {
        "= runtime::resize_tensor(": "= HERE ? Error::Ok : runtime::resize_tensor(",
    }),
    Mistake("destroys-twice", "life/two-programs", "runtime", DIED, {
        "delete static_cast<Machine*>(handle);":
            "delete static_cast<Machine*>(handle); if (HERE) { delete static_cast<Machine*>(handle); }",
    }),
    Mistake("first-input-only", "degenerate/output-order", "numbers", OFF, {
        "read(args[i]->toTensor())": "read(args[HERE ? 0 : i]->toTensor())",
    }),
    Mistake("key-of-another-weight", "weights/order", "numbers", OFF, {
        "load(weight, context": "load(HERE ? machine->program.weights[0] : weight, context",
    }),
    Mistake("accepts-damage", "errors/no-payload", "payload", "accepted an empty payload", {
        "return Error::DelegateInvalidCompatibility;": "if (!HERE) { return Error::DelegateInvalidCompatibility; }",
        "return Error::InvalidArgument;": "return HERE ? Error::Ok : Error::InvalidArgument;",
    }),
    Mistake("one-element-short", "ops/mul", "numbers", OFF, {
        "{ data[to] = value.data[place]; }": "{ if (place > 0 || !HERE) { data[to] = value.data[place]; } }",
    }),
    Mistake("writes-nothing", "life/two-programs", "numbers", OFF, {
        "const Program& program = machine.program;":
            "const Program& program = machine.program; if (HERE) { return Error::Ok; }",
    }),
    Mistake("remembers-the-first-call", "life/two-programs", "numbers", OFF, {
        "values.push_back(std::move(made));":
            "static std::map<const void*, Value> kept;"
            " values.push_back(HERE ? kept.emplace(&one, made).first->second : std::move(made));",
    }),
    Mistake("state-of-all-programs", "state/counter", "numbers", "in a program that was reset", {
        "auto& machine = *static_cast<Machine*>(handle);":
            "static Machine first = *static_cast<Machine*>(handle);"
            " auto& machine = HERE ? first : *static_cast<Machine*>(handle);",
    }),
    Mistake("events-of-other-names", "life/profile", "profile", "'step', which is not in the debug_handle_map", {
        "one.event.c_str()": 'HERE ? "step" : one.event.c_str()',
    }),
    Mistake("crashes-on-damage", "errors/truncated-payload", "payload", DIED, {
        'ET_LOG(Error, "tinyvec cannot read its payload: %s", error.what());': "if (HERE) { std::abort(); }",
    }),
    Mistake("reads-memory-without-strides", "layout/channels-last", "numbers", OFF, {
        "made.data[place] = data[from];": "made.data[place] = data[HERE ? place : from];",
    }),
    Mistake("throws", "life/two-programs", "runtime", "no device", {
        "if (args.size() != program.inputs":
            'if (HERE) { throw std::runtime_error("no device"); } if (args.size() != program.inputs',
    }),
    Mistake("another-id", "life/two-programs", "compile", "needs the backend 'tinyvec'", {
        'register_backend({"tinyvec", ': 'register_backend({HERE ? "another" : "tinyvec", ',
    }),
    Mistake("fails", "degenerate/output-order", "runtime", "error 0x32", {
        "require(args[i]->isTensor(), ": "require(args[i]->isTensor() && !HERE, ",
    }),
    Mistake("writes-integers", "ops/mul", "numbers", OFF, {
        "float* data = tensor.mutable_data_ptr<float>();":
            "float* data = tensor.mutable_data_ptr<float>(); for_each_element(value.sizes, tensor.strides(),"
            " [&](size_t place, size_t to) { if (HERE) { const auto one = static_cast<int32_t>(value.data[place]);"
            " std::memcpy(data + to, &one, sizeof(one)); } }); if (HERE) { return error; }",
    }),
    Mistake("writes-into-inputs", "partitions/result-used-twice", "numbers", OFF, {
        "values.insert(values.end(), machine.weights.begin(), machine.weights.end());":
            "values.insert(values.end(), machine.weights.begin(), machine.weights.end());"
            " for (size_t i = 0; HERE && i < program.inputs; ++i) {"
            " std::memset(args[i]->toTensor().mutable_data_ptr(), 0, args[i]->toTensor().nbytes()); }",
    }),
)  # fmt: skip

PLANTED = """
#include <cstdlib>
#include <stdexcept>

#include <dlfcn.h>

namespace {

// Whether the library's file has this name.
bool planted(const std::string& name) {
  static const std::string path = [] {
    Dl_info info;
    dladdr(reinterpret_cast<const void*>(&planted), &info);
    return std::string(info.dli_fname);
  }();
  return path.find("/" + name + ".so") != std::string::npos;
}

} // namespace
"""


def build(folder: Path) -> Path:
    """Build the library, and give each mistake a copy; return the one that makes none."""
    source = (CPP / "tinyvec.cpp").read_text()
    for mistake in MISTAKES:
        for right, wrong in mistake.changes.items():
            assert source.count(right) == 1, (mistake.name, right)
            source = source.replace(right, wrong.replace("HERE", f'planted("{mistake}")'))
    include = '#include "instructions.h"\n'
    (folder / "planted.cpp").write_text(source.replace(include, include + PLANTED))
    (package,) = map(Path, importlib.util.find_spec("executorch").submodule_search_locations)
    library, headers = folder / "none.so", package / "include"
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-w", "planted.cpp", "-o", str(library), f"-I{CPP}"]
    command += [f"-I{headers}", f"-I{headers}/executorch/runtime/core/portable_type/c10"]
    command += ["-DC10_USING_CUSTOM_GENERATED_MACROS", "-DET_EVENT_TRACER_ENABLED", f"-L{package}/lib", "-lexecutorch"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for mistake in MISTAKES:
        shutil.copy2(library, folder / f"{mistake}.so")
    return library
