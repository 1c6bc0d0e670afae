"""Families of methods: the one that runs, for all sets of backends and for sizes, in each way to load a file."""

from pathlib import Path

import device_client
import pytest
import torch
from lowering_support import TagPartitioner, by_operator
from scripted import ScriptBackend, ScriptDelegate
from torch.export import export

from exir_lowering import (
    BackendUnavailableError,
    BackendUnavailableWarning,
    InputError,
    Limits,
    load,
    lower,
)
from exir_lowering.pte.manifest import BUCKET, Bucket, Crop, Size

LIMITS = [None, Limits()]


class First(ScriptBackend):
    backend_id = "first"


class Second(ScriptBackend):
    backend_id = "second"


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        return torch.sigmoid(torch.relu(self.linear(x))) + self.calls


class Add(torch.nn.Module):
    def forward(self, x, y):
        return x + y


RELU, SIGMOID = (by_operator(f"aten.{name}.default") for name in ("relu", "sigmoid"))
VARIANTS = {
    "both": [TagPartitioner(RELU, "first"), TagPartitioner(SIGMOID, "second")],
    "second": [TagPartitioner(RELU, "second"), "xnnpack"],
    "cpu": "xnnpack",
}
BACKENDS = {"first": First, "second": Second}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module")
def lowered(model):
    with pytest.warns(BackendUnavailableWarning):
        return lower(export(model, (torch.ones(2, 8),)), variants=VARIANTS, backends=BACKENDS)


@pytest.fixture(scope="module")
def file(lowered):
    return lowered.emit().buffer


@pytest.fixture(scope="module")
def buckets():
    """Two sizes that are padded, and one that is not."""
    programs = {}
    for size, exact in ((2, False), (4, False), (6, True)):
        program = export(torch.nn.ReLU(), (torch.ones(size, 8),))
        program.graph_module.meta[BUCKET] = Bucket((Size(0, 0, size, exact),), (Crop(0, 0, 0, 0),) * (not exact))
        programs[f"forward@n={size}"] = program
    with pytest.warns(BackendUnavailableWarning):
        return lower(programs, variants={"npu": TagPartitioner(backend="first"), "cpu": "xnnpack"}, backends=BACKENDS)


def first_line(text, available):
    """Return what the manifest says, read as a client reads it."""
    lines = [line.split("\t") for line in text.splitlines()[1:]]
    return next(method for method, backends, *_ in lines if available.issuperset(backends.split()))


@pytest.mark.parametrize("limits", LIMITS, ids=["here", "apart"])
@pytest.mark.parametrize("ids", [(), ("first",), ("second",), ("first", "second")])
def test_what_the_manifest_says_runs(lowered, file, model, limits, ids):
    program = load(file, limits=limits, delegates=dict.fromkeys(ids, ScriptDelegate))
    expected = first_line(lowered.constant_methods["get_manifest"], {*ids, "XnnpackBackend"})
    x = torch.randn(2, 8)
    choice = program.choose("forward", x)
    assert choice.method == expected
    assert all("is missing" in why for why in choice.others.values())
    calls = model.calls.clone()
    torch.testing.assert_close(program.run("forward", x)[0], model(x) - calls)
    model.calls.copy_(calls)
    for method in set(program.method_names) - {*program.runnable}:
        with pytest.raises(BackendUnavailableError, match=f"'{method}' of .* cannot run: it needs the backend"):
            program.run(method, x)
    # State goes on from variant to variant, also after one that cannot run.
    runs = [method for method in (*program.runnable, "forward") if method != "get_manifest"]
    found = [program.run(method, x)[0] - model(x) + model.calls for method in runs]
    model.calls.copy_(calls)
    assert [round(float(one.mean())) for one in found] == list(range(2, len(runs) + 2))


CHOOSER = r"""
#include <dlfcn.h>
#include <executorch/extension/tensor/tensor.h>
#include <cstdio>
#include "choose.cpp"
namespace et = executorch::runtime;

struct Stub final : et::BackendInterface {
  bool is_available() const override { return true; }
  et::Result<et::DelegateHandle*> init(et::BackendInitContext&, et::FreeableBuffer*, et::ArrayRef<et::CompileSpec>)
      const override { return et::Error::NotSupported; }
  et::Error execute(et::BackendExecutionContext&, et::DelegateHandle*, et::Span<EValue*>) const override {
    return et::Error::NotSupported;
  }
} stub;

// chooser FILE SIZE,... BACKEND...: prints what is chosen for tensors of SIZE x 8, where only these backends are there.
int main(int count, char** words) {
  for (int i = 3; i < count; ++i) {
    if (std::string(words[i]) == "XnnpackBackend") dlopen("libexecutorch_backend_xnnpack.so", RTLD_NOW | RTLD_GLOBAL);
    else (void)et::register_backend({words[i], &stub});
  }
  executorch::extension::Module module(words[1]);
  std::vector<executorch::extension::TensorPtr> tensors;
  std::istringstream sizes(words[2]);
  for (std::string word; std::getline(sizes, word, ',');) {
    const int size = std::atoi(word.c_str());
    tensors.push_back(executorch::extension::make_tensor_ptr({size, 8}, std::vector<float>(size * 8, 1)));
  }
  std::printf("%s", choose(module, "forward", std::vector<EValue>(tensors.begin(), tensors.end())).c_str());
}
"""


@pytest.fixture(scope="module")
def chooser(tmp_path_factory):
    """The function of the guide, in a program that has the backends that it is told to have."""
    folder = tmp_path_factory.mktemp("chooser")
    page = (Path(__file__).parents[2] / "docs/guides/variants.md").read_text()
    function = page.partition("`choose.cpp`:\n\n```cpp\n")[2].partition("```")[0]
    assert 20 < len(function.splitlines()) <= 40
    (folder / "choose.cpp").write_text(function)
    return device_client.build(folder, CHOOSER, ("", "_kernels_optimized", "_threadpool"))


def test_a_device_chooses_what_the_manifest_says(lowered, chooser, buckets, tmp_path):
    path, text = lowered.emit().save(tmp_path / "m.pte"), lowered.constant_methods["get_manifest"]
    for number in range(8):
        ids = [name for bit, name in enumerate(("first", "second", "XnnpackBackend")) if number >> bit & 1]
        expected = first_line(text, set(ids)) if number >= 3 else ""
        assert device_client.output(chooser, path, 2, *ids) == expected, ids
    path = buckets.emit().save(tmp_path / "b.pte")
    sizes = {1: "n=2", 2: "n=2", 3: "n=4", 4: "n=4", 5: None, 6: "n=6", 7: None}
    for size, name in sizes.items():
        found = device_client.output(chooser, path, size, "XnnpackBackend", *["first"] * (size > 2))
        assert found == ("" if name is None else f"forward@{name}@{'npu' if size > 2 else 'cpu'}")
    program = export(Add(), (torch.ones(4, 8), torch.ones(4, 8)))
    program.graph_module.meta[BUCKET] = Bucket((Size(0, 0, 4, least=2), Size(1, 0, 4, least=2, like=(0, 0))))
    path = lower({"forward@n=4": program}).emit().save(tmp_path / "two.pte")
    for sizes in ((3, 3), (2, 2), (4, 4), (3, 4), (4, 3), (1, 1), (5, 5)):
        fits = sizes[0] == sizes[1] and 2 <= sizes[0] <= 4
        assert device_client.output(chooser, path, ",".join(map(str, sizes))) == "forward@n=4" * fits, sizes


@pytest.mark.parametrize("limits", LIMITS, ids=["here", "apart"])
def test_the_smallest_size_that_fits_runs_padded(buckets, limits):
    program = load(buckets.emit().buffer, limits=limits)
    for size, name in {1: "n=2", 2: "n=2", 3: "n=4", 4: "n=4", 6: "n=6"}.items():
        x = torch.randn(8, size).t().requires_grad_()
        assert program.choose("forward", x).method == f"forward@{name}@cpu"
        (output,) = program.run("forward", x)
        torch.testing.assert_close(output, torch.relu(x.detach()))
        assert output.is_contiguous()
        assert program.profile("forward", x).rows[0].calls == 1
    (output,) = program.run("forward@n=4@cpu", torch.ones(1, 8))
    assert output.shape == (1, 8)
    for size in (5, 7):
        with pytest.raises(
            InputError, match=rf"(?s)'forward' that can run .*@cpu: dimension 0 of argument 'input' is {size}, "
        ):
            program.run("forward", torch.ones(size, 8))
    for wrong in (torch.ones(2), torch.ones(2, 8, dtype=torch.int64), None):
        with pytest.raises(InputError, match=r"forward@n=2@cpu.*argument 'input' is"):
            program.run("forward", wrong)
    with pytest.raises(InputError, match="got 0 inputs, expected 1"):
        program.run("forward")


def test_the_caller_chooses(file):
    x = torch.ones(2, 8)
    delegates = dict.fromkeys(("first", "second"), ScriptDelegate)
    for choose, expected in (
        ("cpu", "forward@cpu"),
        (["cpu", "both"], "forward@cpu"),
        (["second", "cpu"], "forward@second"),
    ):
        assert load(file, delegates=delegates, choose=choose).choose("forward", x).method == expected
    program = load(file, choose=["second", "cpu"])
    choice = program.choose("forward", x)
    assert str(choice).startswith("forward@cpu: the first whose backends are available, of those that choose= names\n")
    assert "not forward@second: the backend 'second' is missing: the ExecuTorch runtime here does not have it" in str(
        choice
    )
    assert program.choose("forward@cpu").reason == "it is named itself"
    with pytest.raises(BackendUnavailableError, match=r"no method of the family 'forward' that can run .*\n.*@second"):
        load(file, choose="second").run("forward", x)


@pytest.mark.parametrize(
    ("choose", "why"),
    [
        ("gpu", "got 'gpu', expected a variant, .* are 'both', 'second', 'cpu'"),
        (["cpu", 1], "expected a variant"),
        (3, "got 3, expected a variant"),
    ],
)
def test_wrong_choices(file, choose, why):
    with pytest.raises(InputError, match=why):
        load(file, choose=choose)


def test_a_file_of_which_nothing_runs_is_refused():
    program = export(torch.nn.ReLU(), (torch.ones(2, 8),))
    variants = {"a": TagPartitioner(backend="first"), "b": TagPartitioner(backend="second")}
    with pytest.warns(BackendUnavailableWarning):
        artifact = lower(program, variants=variants, backends=BACKENDS).emit(keep_originals=True)
    with pytest.raises(BackendUnavailableError, match="method 'forward@a' needs the backend 'first'"):
        load(artifact.buffer)
    with pytest.warns(BackendUnavailableWarning, match="executed by PyTorch"):
        program = load(artifact.buffer, unavailable="fallback")
    assert program.choose("forward", torch.ones(2, 8)).method == "forward@a"
    for _ in range(2):
        assert torch.equal(program.run("forward", -torch.ones(2, 8))[0], torch.zeros(2, 8))
        program.reset()


def test_a_delegate_that_cannot_say_whether_it_is_available_is_missing(file):
    class Broken(ScriptDelegate):
        def is_available(self):
            raise OSError("no driver")

    program = load(file, delegates={"second": Broken})
    choice = program.choose("forward", torch.ones(2, 8))
    assert choice.method == "forward@cpu"
    assert "no driver" in choice.others["forward@second"]
    with pytest.raises(BackendUnavailableError, match="no driver"):
        program.run("forward@second", torch.ones(2, 8))
