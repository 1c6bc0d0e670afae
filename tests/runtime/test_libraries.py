"""Libraries in C++ that register a backend: Python's runtime executes them, here or with limits in another process."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import runtime_children
import torch
from limited_delegates import Thrice

from exir_lowering import (
    Backend,
    InputError,
    Limits,
    PreprocessResult,
    load,
    lower,
)
from exir_lowering.partitioners import SupportPartitioner, everything

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the library is built as on Linux")

SOURCE = """
#include <cstdlib>
#include <executorch/runtime/backend/interface.h>

using namespace executorch::runtime;

struct Twice final : BackendInterface {
  bool is_available() const override { return true; }
  Result<DelegateHandle*> init(BackendInitContext&, FreeableBuffer* payload, ArrayRef<CompileSpec>) const override {
    return const_cast<void*>(payload->data());
  }
  Error execute(BackendExecutionContext&, DelegateHandle*, Span<EValue*> args) const override {
    const auto& from = args[0]->toTensor();
    for (ssize_t i = 0; i < from.numel(); ++i) {
      const float one = from.const_data_ptr<float>()[i];
      if (one == 13) { std::abort(); }
      args[1]->toTensor().mutable_data_ptr<float>()[i] = 2 * one;
    }
    return Error::Ok;
  }
  void destroy(DelegateHandle*) const override {}
};

Twice twice;
[[maybe_unused]] const Error registered = register_backend({"twice", &twice});
"""


class TwiceBackend(Backend):
    backend_id = "twice"

    def preprocess(self, program, compile_specs):
        return PreprocessResult(b"twice")


class Double(torch.nn.Module):
    def forward(self, x):
        return x * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where `twice.so` is, a library of the same id, one without any, what is no library, and a file."""
    folder = tmp_path_factory.mktemp("libraries")
    (package,) = map(Path, importlib.util.find_spec("executorch").submodule_search_locations)
    headers = package / "include"
    include = [f"-I{headers}", f"-I{headers}/executorch/runtime/core/portable_type/c10"]
    defines = ["-DC10_USING_CUSTOM_GENERATED_MACROS", "-DET_EVENT_TRACER_ENABLED"]
    for name, source in (("twice", SOURCE), ("idle", "int nothing;")):
        (folder / f"{name}.cpp").write_text(source)
        command = ["g++", "-std=c++17", "-fPIC", "-shared", "-w", f"{name}.cpp", "-o", f"{name}.so"]
        command += [*include, *defines, f"-L{package}/lib", "-lexecutorch"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    (folder / "again.so").write_bytes((folder / "twice.so").read_bytes())
    (folder / "text.so").write_text("no library")
    program = torch.export.export(Double(), (torch.ones(2, 3),))
    torch.export.save(program, folder / "model.pt2")
    partitioner = SupportPartitioner({"twice": everything()})
    lower(program, partitioner, backends={"twice": TwiceBackend}).emit().save(folder / "model.pte")
    return folder


HERE = f"""
import sys

sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from exir_lowering import InputError, cli, load, verify
from limited_delegates import Thrice

def run(**options):
    return load("model.pte", **options)(torch.ones(2, 3))[0][0, 0].item()

def refused(**options):
    try:
        run(**options)
    except InputError as error:
        return str(error)

"""


def here(folder, code):
    done = runtime_children.run(HERE + code, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_in_this_process_for_all_its_programs(folder):
    code = """
    program = torch.export.load("model.pt2")
    for options in ({"libraries": ["twice.so"]}, {"libraries": ["./twice.so", "twice.so"]}, {}):
        print(run(**options), verify("model.pte", program, **options).ok)
    print(refused(delegates=[Thrice]))
    print(refused(libraries=["again.so"]))
    print(refused(libraries=["idle.so"]))
    """
    *ran, replaced, again, idle = here(folder, "if True:" + code)
    assert ran == ["2.0 True"] * 3
    assert "the ExecuTorch runtime has 'twice' itself, which a delegate cannot replace" in replaced
    assert "again.so' has registered nothing in the ExecuTorch runtime." in again
    assert "idle.so' has registered nothing in the ExecuTorch runtime. Link it with the wheel's" in idle


def test_an_id_that_a_delegate_in_python_has_stays_with_it(folder):
    code = "print(run(delegates=[Thrice]))\nfor _ in range(2): print(refused(libraries=['twice.so']))\n"
    ran, *said = here(folder, code)
    assert ran == "3.0" and len(said) == 2
    for text in said:
        assert "twice.so' has registered nothing in the ExecuTorch runtime." in text
        assert "load it before a Python delegate or another library has its id in this process" in text


def test_with_limits_in_another_process(folder):
    """There it has the id, though here a delegate in Python has it; and it may die."""
    x, path = torch.ones(2, 3), folder / "model.pte"
    assert torch.equal(load(path, delegates=[Thrice])(x)[0], 3 * x)
    loaded = load(path, libraries=[folder / "twice.so"], limits=Limits())
    assert torch.equal(loaded(x)[0], 2 * x)
    assert [row.kind for row in loaded.profile("forward", x).rows] == ["method", "delegate"]
    with pytest.raises(InputError, match=r"ended by SIGABRT.* or .*twice\.so, a kernel or a delegate has a defect"):
        loaded(13 * x)
    assert torch.equal(loaded(x)[0], 2 * x)
    assert torch.equal(load(path, delegates=[Thrice])(x)[0], 3 * x)


@pytest.mark.parametrize(
    ("libraries", "text"),
    [
        (["none.so"], r"load: libraries: got 'none\.so', expected a list of paths of files, such as 'libnpu\.so'\."),
        ([3], "load: libraries: got 3, expected a list of paths of files"),
        (3, "load: libraries: got 3, expected a list of paths of files"),
        (["text.so"], r"load: libraries: '.*text\.so' cannot be loaded: .*text\.so: file too short\."),
    ],
)
def test_what_is_no_library(folder, libraries, text, monkeypatch):
    monkeypatch.chdir(folder)
    for limits in (None, Limits()) if libraries != ["text.so"] else (None,):
        with pytest.raises(InputError, match=text):
            load("model.pte", libraries=libraries, limits=limits)


def test_on_the_command_line(folder):
    code = """
    print(cli.main(["run", "model.pte", "--library", "none.so"]))
    print(cli.main(["run", "model.pte", "--library", "twice.so", "--save", "outputs.pt"]))
    print(cli.main(["verify", "model.pte", "model.pt2", "--library", "twice.so"]))
    """
    said = here(folder, "if True:" + code)
    assert said[0] == "2" and said[-1] == "0"
    assert torch.load(folder / "outputs.pt")[0].shape == (2, 3)
