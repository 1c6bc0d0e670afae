"""The interpreter gives what ExecuTorch's runtime gives, side by side; the runtime's own tests run in both."""

from __future__ import annotations

import copy
import gc
import re
import tempfile
from pathlib import Path

import pytest
import runtime_children
import runtime_models
import torch
from executorch.exir import ExecutorchBackendConfig
from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary
from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
from lowering_support import TagPartitioner, by_operator
from models import build
from random_programs import random_program
from scripted import ScriptDelegate, scripted
from torch import nn
from torch.export import Dim, export

import exir_lowering
from exir_lowering import BackendUnavailableError, InputError, LoweringError, LoweringOptions, lower
from exir_lowering.pte.program_writer import write_call
from exir_lowering.runtime.interpreter import hosted

BOTH = ("runtime", "interpreter")
load = exir_lowering.load


def test_a_value_that_a_kernel_refuses():
    content = lower(export(runtime_models.Lookup(), (torch.tensor([1, 2]),))).emit().buffer
    program = load(content, engine="interpreter")
    (before,) = program.run("forward", torch.tensor([1, 2]))
    with pytest.raises(InputError, match=r"failed in the interpreter, at aten::embedding.out: index out of range"):
        program.run("forward", torch.tensor([7, 8]))
    assert torch.equal(program.run("forward", torch.tensor([1, 2]))[0], before)


def test_a_built_in_id(adds, xy):
    """Nothing is registered in the runtime, so that nothing stands in the way of another delegate of an id."""
    program = exir_lowering.load(
        adds, delegates={"XnnpackBackend": ScriptDelegate, "script": ScriptDelegate}, engine="interpreter"
    )
    torch.testing.assert_close(program.run("forward", *xy)[0], torch.sin(xy[0] + xy[1]))


def same(results, others, tolerance=1e-4):
    assert len(results) == len(others)
    for result, other in zip(results, others, strict=True):
        assert type(result) is type(other)
        if isinstance(result, torch.Tensor):
            torch.testing.assert_close(result, other, atol=tolerance, rtol=tolerance)
        else:
            assert result == other


@pytest.mark.parametrize(("name", "partitioner"), [("mobilenet_v2", None), ("llama", "xnnpack")])
def test_models(name, partitioner):
    model, inputs = build(name)
    model.requires_grad_(False)
    content = lower(export(model, inputs), partitioner).emit().buffer
    expected = [model(*inputs)]
    for engine in BOTH:
        same(load(content, engine=engine).run("forward", *inputs), expected)


@pytest.mark.parametrize("seed", [3, 7, 8, 9, 21])
def test_random_programs(seed):
    """Several methods, state, lists, higher-order operators, numbers: those that ExecuTorch can emit."""
    random = random_program(seed)
    state = InitializedMutableBufferPass(["f0", "f1", "f2", "count"])
    content = lower(random.methods, "xnnpack").emit(ExecutorchBackendConfig(passes=[state])).buffer
    programs = [load(content, engine=engine) for engine in BOTH]
    ran = 0
    for method, calls in random.inputs.items():
        for inputs, expected in zip(calls, random.expected[method], strict=True):
            try:
                results = [program.run(method, *copy.deepcopy(inputs)) for program in programs]
            except InputError as error:
                assert "input 2" in str(error)  # a number that ExecuTorch's files have no room for
                break
            same(results[1], results[0])
            same(results[1], [plain(value) for value in expected[: len(results[1])]])
            ran += 1
    assert ran


def plain(value):
    return value.detach().as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value


CASES = {
    "views": (runtime_models.Viewed(), (torch.randn(2, 3), torch.randn(3, 2)), None, "xnnpack"),
    "xnnpack": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (torch.randn(2, 3, 8, 8),), 8, "xnnpack"),
    "reference": (runtime_models.Net(), (torch.randn(2, 3, 8, 8),), 6, "reference"),
    "reference with state": (runtime_models.Count(), (torch.ones(3),), None, "reference"),
    "compiler_demo": (
        runtime_models.AddSin(),
        (torch.randn(2, 3), torch.randn(2, 3)),
        8,
        TagPartitioner(by_operator("aten.add.Tensor"), "compiler_demo"),
    ),
}


def run_in_files_of_executorch(content, given):
    """Run it in the interpreter, each payload in a program that ExecuTorch's serializer wrote; return these too."""
    files = []

    def write(*args):
        file = deserialize_pte_binary(write_call(*args))
        files.append(file)
        return bytes(serialize_pte_binary(file, extract_delegate_segments=True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosted, "write_call", write)
        return load(content, engine="interpreter").run("forward", *given), files


@pytest.mark.parametrize("case", CASES)
def test_side_by_side(case):
    torch.manual_seed(0)
    module, inputs, largest, partitioner = CASES[case]
    module = module.eval().requires_grad_(False)
    batch = Dim("batch", min=1, max=largest) if largest else None
    shapes = tuple({0: batch} if batch else None for _ in inputs)
    program = export(copy.deepcopy(module), inputs, dynamic_shapes=shapes)
    config = ExecutorchBackendConfig(passes=[InitializedMutableBufferPass(["total"])])
    content = lower(program, partitioner).emit(config).buffer
    programs = [load(content, engine=engine) for engine in BOTH]
    for size in (1, largest, 2) if largest else (None,) * 3:
        given = tuple(torch.randn(size or each.shape[0], *each.shape[1:]) for each in inputs)
        with torch.no_grad():
            expected = module(*given)
        results = [loaded.run("forward", *given) for loaded in programs]
        same(results[1], results[0])
        same(results[1], list(expected) if isinstance(expected, tuple) else [expected])
        if partitioner != "xnnpack":
            continue
        again, files = run_in_files_of_executorch(content, given)
        same(results[1], again, 0)
        assert files
        assert case != "xnnpack" or files[0].named_data.pte_data  # the weights


class Raises(ScriptDelegate):
    def execute(self, handle, inputs):
        raise ValueError("boo")


class Refuses(ScriptDelegate):
    def compile(self, processed, compile_specs, context):
        raise ValueError("boo")


class Away(ScriptDelegate):
    def is_available(self):
        return False


class Returns(ScriptDelegate):
    change = staticmethod(lambda outputs: outputs)

    def execute(self, handle, inputs):
        return type(self).change(super().execute(handle, inputs))


def returns(change):
    return type("Returns", (Returns,), {"change": staticmethod(change)})


ERRORS = {
    "raises": Raises,
    "refuses to compile": Refuses,
    "not available": Away,
    "nobody": None,
    "no list": returns(lambda outputs: 3),
    "count": returns(lambda outputs: outputs * 2),
    "dtype": returns(lambda outputs: [outputs[0].int()]),
    "shape": returns(lambda outputs: [outputs[0].repeat(9, 1)]),
    "rank": returns(lambda outputs: [outputs[0][0]]),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_of_delegates_are_the_same(adds, xy, case):
    delegates = [] if ERRORS[case] is None else [ERRORS[case]()]
    caught = []
    for engine in BOTH:
        with pytest.raises(LoweringError) as error:
            load(adds, delegates=delegates, engine=engine).run("forward", *xy)
        caught.append((type(error.value), type(error.value.__cause__), str(error.value)))
    assert caught[0] == caught[1]


def test_a_kernel_that_the_runtime_lacks_is_refused_in_the_same_words():
    content = (
        lower(export(runtime_models.Next(), (torch.ones(3),)), options=LoweringOptions(unsupported="allow"))
        .emit()
        .buffer
    )
    said = []
    for engine in BOTH:
        with pytest.raises(InputError) as error:
            load(content, engine=engine).run("forward", torch.ones(3))
        said.append(str(error.value))
    assert said[1].replace(" The interpreter refuses what would not run on a device.", "") == said[0] != said[1]


def test_an_operator_that_torch_does_not_have(fixed):
    content = re.sub(rb"aten::convolution\0", b"aten::convolutiom\0", fixed)
    code = (
        "import sys, torch\nfrom exir_lowering import InputError, load\n"
        "for name in ('executorch.runtime', 'executorch.extension.pybindings._C'):\n    sys.modules[name] = None\n"
        "try:\n    load(sys.argv[1], engine='interpreter', verify=False).run('forward', torch.ones(2, 3, 8, 8))\n"
        "except InputError as error:\n    print(error)"
    )
    assert "PyTorch has no operator aten::convolutiom.out here" in output(code, content)


def output(code, content, **environment):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pte"
        path.write_bytes(content)
        done = runtime_children.run(code, path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_without_a_compiler(adds, tmp_path):
    code = (
        "import sys, torch\nfrom scripted import ScriptDelegate\n"
        "from exir_lowering import BackendUnavailableError, load\n"
        "x = torch.ones(2, 3)\n"
        "try:\n    load(sys.argv[1], delegates=[ScriptDelegate])\n"
        "except BackendUnavailableError as error:\n    print(error)\n"
        "program = load(sys.argv[1], delegates=[ScriptDelegate], engine='interpreter')\n"
        "print(torch.equal(program.run('forward', x, x)[0], torch.sin(x + x)))"
    )
    said = output(code, adds, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert "need a C++ compiler once" in said
    assert 'engine="interpreter"' in said
    assert said.split()[-1] == "True"
    assert not (tmp_path / "cache").exists() or not [*(tmp_path / "cache").rglob("*.so")]


WITHOUT_THE_RUNTIME = """
import sys, torch
for name in ("executorch.runtime", "executorch.extension.pybindings._C"):
    sys.modules[name] = None
from exir_lowering import BackendUnavailableError, load
x = torch.ones(2, 3, 8, 8)
for engine in ("runtime", "interpreter"):
    try:
        program = load(sys.argv[1], engine=engine)
        print(engine, "ran", program.run("forward", x)[0].shape)
    except BackendUnavailableError as error:
        print(engine, "refused", error)
"""


def test_without_the_runtime(two_methods, fixed):
    runtime, hint, ours = output(WITHOUT_THE_RUNTIME, fixed).splitlines()
    assert "runtime refused" in runtime
    assert "the ExecuTorch runtime cannot be imported here" in runtime
    assert 'engine="interpreter"' in hint
    assert ours == "interpreter ran torch.Size([2, 5])"
    said = output(WITHOUT_THE_RUNTIME, two_methods.buffer).splitlines()[-1]
    assert said.startswith("interpreter refused")
    assert "needs the backend 'XnnpackBackend', and the ExecuTorch runtime cannot be imported here" in said


def test_damage_ends_in_an_error_of_ours(two_methods):
    code = runtime_children.DAMAGE.replace("verify=False", 'verify=False, engine="interpreter"')
    results = dict(line.split(":") for line in output(code, two_methods.buffer).split() if ":" in line)
    for what, least in runtime_children.LEAST_REFUSED.items():
        refused, total = map(int, results[what].split("/"))
        assert least * total <= refused <= total, what


@pytest.mark.parametrize("ending", ["sys.exit(0)", "thread()"])
def test_the_process_ends_with_programs_alive(adds, tmp_path, ending):
    (tmp_path / "model.pte").write_bytes(adds)
    code = runtime_children.EXIT.replace("ENDING", ending).replace("[Loud])", '[Loud], engine="interpreter")')
    done = runtime_children.run(code, cwd=tmp_path)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    assert done.stdout.split()[-2:] == ["destroyed", "destroyed"]


def test_handles_are_destroyed_once():
    names = iter(range(99))
    partitioner = TagPartitioner(lambda node: f"t{next(names)}" if "add" in node.name else None, "script")
    x = torch.ones(3)
    program = export(runtime_models.Apart(), (x, x))
    delegate = ScriptDelegate()
    loaded = load(scripted(program, partitioner).buffer, delegates=[delegate], engine="interpreter")
    for _ in range(3):
        loaded.run("forward", x, x)
    assert (len(delegate.methods), delegate.executed, delegate.destroyed) == (2, 6, 0)
    del loaded
    gc.collect()
    assert delegate.destroyed == 2


def test_which_engine(fixed):
    programs = {engine: load(fixed, engine=engine) for engine in BOTH}
    assert {engine: program.engine for engine, program in programs.items()} == {engine: engine for engine in BOTH}
    assert "interpreter, not ExecuTorch's runtime" in repr(programs["interpreter"])
    assert "interpreter" not in repr(programs["runtime"])
    for wrong in ("interpeter", None, 3, []):
        with pytest.raises(InputError, match="expected 'runtime' or 'interpreter'"):
            load(fixed, engine=wrong)


def test_a_backend_that_nobody_has(adds):
    with pytest.raises(BackendUnavailableError, match="It has OpenvinoBackend"):
        load(adds, engine="interpreter")
