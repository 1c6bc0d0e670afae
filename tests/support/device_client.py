"""A C++ program of the kind that runs on a device: ExecuTorch's own Module over the libraries of the wheel."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import executorch
import pytest
import torch

SOURCE = r"""
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <cstdio>
#include <cstdlib>
using namespace executorch::extension;

// client FILE SIZE (METHOD NUMBER)...: loads all methods, then calls each with a tensor of that number, "-" for none.
int main(int count, char** words) {
  Module module(words[1], Module::LoadMode::File, nullptr, nullptr, nullptr, /*share_memory_arenas=*/true);
  for (int i = 3; i < count; i += 2)
    if (module.load_method(words[i]) != executorch::runtime::Error::Ok) return 2;
  for (int i = 3; i < count; i += 2) {
    std::vector<executorch::runtime::EValue> inputs;
    const int size = std::atoi(words[2]);
    auto tensor = make_tensor_ptr({size}, std::vector<float>(size, std::atof(words[i + 1])));
    if (*words[i + 1] != '-') inputs.emplace_back(tensor);
    auto outputs = module.execute(words[i], inputs);
    if (!outputs.ok()) return 3;
    for (auto& output : *outputs) {
      if (output.isInt()) std::printf("%lld ", static_cast<long long>(output.toInt()));
      else for (int j = 0; j < output.toTensor().numel(); ++j)
        std::printf("%.9g ", output.toTensor().const_data_ptr<float>()[j]);
    }
    std::printf("\n");
  }
}
"""


LIBRARIES = ("", "_backend_xnnpack", "_kernels_optimized", "_threadpool")


def build(folder: Path, code: str = SOURCE, libraries: Sequence[str] = LIBRARIES) -> Path:
    """Compile a program with libraries of the wheel, and return its path."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    root, source, program = Path(executorch.__path__[0]), folder / "client.cpp", folder / "client"
    source.write_text(code)
    include = (root / "include", root / "include/executorch/runtime/core/portable_type/c10")
    subprocess.run(
        [
            *(compiler, "-w", "-std=c++17", "-DC10_USING_CUSTOM_GENERATED_MACROS", *(f"-I{path}" for path in include)),
            *(str(source), "-o", str(program), "-Wl,--no-as-needed", f"-L{root / 'lib'}"),
            *(*(f"-lexecutorch{name}" for name in libraries), f"-Wl,-rpath,{root / 'lib'}"),
        ],
        check=True,
    )
    return program


def run(program: Path, file: Path, size: int, calls: Sequence[tuple[str, float | None]]) -> list[torch.Tensor]:
    """Call methods of a file one after the other; return what each returned, flat."""
    words = [word for method, number in calls for word in (method, "-" if number is None else str(number))]
    done = subprocess.run([program, file, str(size), *words], check=True, capture_output=True, text=True)
    return [torch.tensor([float(word) for word in line.split()]) for line in done.stdout.splitlines()]


def output(program: Path, *words: object) -> str:
    """Return what a program prints."""
    return subprocess.run([program, *map(str, words)], check=True, capture_output=True, text=True).stdout
