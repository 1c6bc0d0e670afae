"""Python delegates in ExecuTorch's own runtime: what they are given and return, and what can go wrong."""

import contextlib
import ctypes
import gc
import os
import re
import signal
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from executorch.exir import ExecutorchBackendConfig
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
from lowering_support import TagPartitioner
from runtime_children import EXIT, run
from runtime_models import BATCH, AddSin, Apart, program_of, sums
from scripted import ScriptDelegate, scripted
from torch import nn
from torch.export import export

from exir_lowering import (
    BackendContractError,
    BackendFailure,
    BackendUnavailableError,
    CompileSpec,
    Delegate,
    InputError,
    LoweringError,
    load,
    lower,
)
from exir_lowering.graphs import operator_name
from exir_lowering.runtime.native import shim

ADD, MUL = "aten.add.Tensor", "aten.mul.Tensor"


class Count(nn.Module):
    """State on the host, read and written around a delegate."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        self.total.copy_(self.total + x)
        return self.total * 2


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("shift", torch.randn(3))

    def forward(self, x):
        return torch.sin(torch.mm(x, self.weight) * 2.0 + self.shift)


def failing(error, where="execute"):
    """Return a delegate that raises while it is switched on."""

    class Failing(ScriptDelegate):
        on = True

        def compile(self, processed, compile_specs, context):
            if self.on and where == "compile":
                raise error
            return super().compile(processed, compile_specs, context)

        def execute(self, handle, inputs):
            if self.on and where == "execute":
                raise error
            return super().execute(handle, inputs)

    return Failing()


def returning(change):
    """Return a delegate whose outputs are changed."""

    class Returning(ScriptDelegate):
        def execute(self, handle, inputs):
            return change(super().execute(handle, inputs))

    return Returning()


def message_of(call, error):
    with pytest.raises(error) as caught:
        call()
    assert isinstance(caught.value, LoweringError)
    return str(caught.value)


class TestRun:
    def test_values_and_the_life_of_a_handle(self, adds, xy):
        delegate = ScriptDelegate()
        program = load(adds, delegates=[delegate])
        assert delegate.methods == ["forward"]  # compiled when loaded
        torch.testing.assert_close(program.run("forward", *xy)[0], torch.sin(xy[0] + xy[1]))
        assert (delegate.executed, delegate.destroyed) == (1, 0)
        del program
        gc.collect()
        assert (delegate.methods, delegate.destroyed) == (["forward"], 1)

    @pytest.mark.parametrize("form", ["object", "class", "mapping", "class in a mapping", "tuple"])
    def test_forms_of_the_argument(self, adds, xy, form):
        class Unused(ScriptDelegate):
            delegate_id = "unused"

        forms = {
            "object": [ScriptDelegate()],
            "class": [ScriptDelegate],
            "mapping": {
                "script": ScriptDelegate(),
                "unused": type("Unused", (ScriptDelegate,), {"delegate_id": "unused"}),
            },
            "class in a mapping": {"script": ScriptDelegate},
            "tuple": (ScriptDelegate,),
        }
        result = load(adds, delegates=forms[form]).run("forward", *xy)[0]
        torch.testing.assert_close(result, torch.sin(xy[0] + xy[1]))

    def test_names_that_fit_nothing(self, adds):
        said = message_of(lambda: load(adds, delegates={"scripted": ScriptDelegate}), InputError)
        assert "has no backend 'scripted'. Did you mean 'script'?" in said

    @pytest.mark.parametrize("where", ["compile", "execute"])
    def test_a_failure_ends_in_the_delegates_line(self, adds, xy, where):
        delegate = failing(OSError("no device"), where)
        said = message_of(lambda: load(adds, delegates=[delegate]).run("forward", *xy), BackendFailure)
        assert f'. Raised at File "{__file__}", line ' in said and f", in {where}: raise error" in said

    @pytest.mark.parametrize("initial", [False, True])
    @pytest.mark.parametrize("inputs", [True, False])
    def test_state_on_the_host(self, initial, inputs):
        """A buffer that the file gives no initial value looks like an output of a delegate."""

        class Alone(Count):
            def forward(self):
                self.total.copy_(self.total + 1.0)
                return torch.sin(self.total)

        exported = program_of(Count(), torch.ones(3)) if inputs else program_of(Alone())
        passes = [InitializedMutableBufferPass(["total"])] if initial else []
        config = ExecutorchBackendConfig(passes=passes)
        program = load(scripted(exported, sums(state=False), config=config).buffer, delegates=[ScriptDelegate])
        for number in range(1, 4):
            (result,) = program.run("forward", *([torch.ones(3)] if inputs else []))
            expected = torch.full((3,), float(number))
            torch.testing.assert_close(result, expected * 2 if inputs else torch.sin(expected))

    def test_named_data_and_compile_specs(self):
        model = Weights()
        specs = [CompileSpec("mode", b"fast"), CompileSpec("empty", b"")]
        partitioner = sums("aten.mm.default", MUL, ADD, compile_specs=specs)
        x = torch.randn(2, 3)
        seen = []

        class Seeing(ScriptDelegate):
            def compile(self, processed, compile_specs, context):
                seen.extend([compile_specs, context.named_data("none of that name"), context])
                return super().compile(processed, compile_specs, context)

        program = load(scripted({"step": program_of(model, x)}, partitioner).buffer, delegates=[Seeing])
        torch.testing.assert_close(program.run("step", x)[0], model(x))
        assert [(spec.key, bytes(spec.value)) for spec in seen[0]] == [("mode", b"fast"), ("empty", b"")]
        assert seen[1] is None
        assert seen[2].method == "step"
        with pytest.raises(RuntimeError, match="until compile returns"):
            seen[2].named_data("script/weight")

    def test_several_methods_and_delegates_in_each(self):
        x, y = torch.randn(2, 3), torch.randn(2, 3)
        names = iter(range(99))
        apart = TagPartitioner(lambda node: f"t{next(names)}" if operator_name(node) == ADD else None, "script")
        programs = {"one": program_of(AddSin(), x, y), "two": program_of(Apart(), x, y)}
        delegate = ScriptDelegate()
        program = load(scripted(programs, apart).buffer, delegates=[delegate])
        assert sorted(delegate.methods) == ["one", "two", "two"]
        for _ in range(2):
            torch.testing.assert_close(program.run("two", x, y)[0], Apart()(x, y))
            torch.testing.assert_close(program.run("one", x, y)[0], AddSin()(x, y))
        del program
        gc.collect()
        assert delegate.destroyed == 3

    @pytest.mark.parametrize("outputs", [True, False])
    def test_memory_that_is_not_planned(self, outputs):
        class Add(nn.Module):
            def forward(self, x, y):
                return x + y

        planning = MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=outputs)
        exported = program_of(Add(), torch.ones(2, 3), torch.ones(2, 3), batch=True)
        artifact = scripted(exported, sums(), config=ExecutorchBackendConfig(memory_planning_pass=planning))
        program = load(artifact.buffer, delegates=[ScriptDelegate])
        for batch in (2, 8, 1):
            x, y = torch.randn(batch, 3), torch.randn(batch, 3)
            assert torch.equal(program.run("forward", x, y)[0], x + y)

    def test_control_flow(self):
        class Either(nn.Module):
            def forward(self, x, y):
                return torch.cond(x.sum() > 0, lambda x, y: torch.sin(x + y), lambda x, y: torch.cos(x + y), [x, y])

        program = load(
            scripted(program_of(Either(), torch.ones(3), torch.ones(3)), sums()).buffer, delegates=[ScriptDelegate]
        )
        for sign in (1.0, -1.0, 1.0):
            x, y = torch.full((3,), sign), torch.randn(3)
            torch.testing.assert_close(program.run("forward", x, y)[0], Either()(x, y))

    def test_a_number_as_output(self):
        class Rows(nn.Module):
            def forward(self, x):
                return x * 2.0, x.shape[0] * 3

        class Numbers(Delegate):
            delegate_id = "script"

            def execute(self, handle, inputs):
                return inputs[0] * 2.0, inputs[0].shape[0] * 3

        content = scripted(program_of(Rows(), torch.ones(4, 3), batch=True), TagPartitioner(backend="script")).buffer
        program = load(content, delegates=[Numbers])
        for batch in (5, 2):
            rows, number = program.run("forward", torch.ones(batch, 3))
            assert rows.shape == (batch, 3)
            assert number == batch * 3

    def test_outputs_that_are_inputs_or_need_gradients(self, adds, xy):
        program = load(adds, delegates=[returning(lambda outputs: [outputs[0].clone().requires_grad_()])])
        torch.testing.assert_close(program.run("forward", *xy)[0], torch.sin(xy[0] + xy[1]))

        class First(ScriptDelegate):
            def execute(self, handle, inputs):
                return (inputs[0],)

        torch.testing.assert_close(load(adds, delegates=[First]).run("forward", *xy)[0], torch.sin(xy[0]))


class TestFailures:
    @pytest.mark.parametrize("error", [ValueError("boo"), RuntimeError("0x1"), InputError("nested"), ArithmeticError()])
    def test_execute(self, adds, xy, error):
        delegate = failing(error)
        program = load(adds, delegates=[delegate])
        with pytest.raises(BackendFailure) as caught:
            program.run("forward", *xy)
        assert caught.value.__cause__ is error
        for part in ("'forward'", "'script'", "Failing", "execute", type(error).__name__, "shape [2, 3]"):
            assert part in str(caught.value)
        delegate.on = False
        torch.testing.assert_close(program.run("forward", *xy)[0], torch.sin(xy[0] + xy[1]))

    def test_compile(self, adds, xy):
        error = KeyError("boo")
        with pytest.raises(BackendFailure, match="failed to compile a payload of") as caught:
            load(adds, delegates=[failing(error, "compile")])
        assert caught.value.__cause__ is error
        torch.testing.assert_close(
            load(adds, delegates=[ScriptDelegate]).run("forward", *xy)[0], torch.sin(xy[0] + xy[1])
        )

    def test_compile_returns_no_handle(self, adds):
        class Forgetful(ScriptDelegate):
            def compile(self, processed, compile_specs, context):
                super().compile(processed, compile_specs, context)

        with pytest.raises(
            BackendContractError, match=r"'script' .*Forgetful.*: compile returned None, expected the h"
        ):
            load(adds, delegates=[Forgetful])

    def test_compile_of_the_second_destroys_the_first(self):
        names = iter(range(99))
        apart = TagPartitioner(lambda node: f"t{next(names)}" if operator_name(node) == ADD else None, "script")
        content = scripted(program_of(Apart(), torch.ones(3), torch.ones(3)), apart).buffer

        class Second(ScriptDelegate):
            def compile(self, processed, compile_specs, context):
                if self.methods:
                    raise ValueError("second")
                return super().compile(processed, compile_specs, context)

        delegate = Second()
        with pytest.raises(BackendFailure, match="second"):
            load(content, delegates=[delegate])
        gc.collect()
        assert (len(delegate.methods), delegate.destroyed) == (1, 1)

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
    @pytest.mark.parametrize("where", ["compile", "execute"])
    def test_interrupts_stay_what_they_are(self, adds, xy, kind, where):
        delegate = failing(kind(3), where)
        with pytest.raises(kind) as caught:
            load(adds, delegates=[delegate]).run("forward", *xy)
        assert caught.value.args == (3,)
        delegate.on = False
        torch.testing.assert_close(load(adds, delegates=[delegate]).run("forward", *xy)[0], torch.sin(xy[0] + xy[1]))

    def test_destroy(self, adds, monkeypatch):
        class Failing(ScriptDelegate):
            def destroy(self, handle):
                raise ValueError("boo")

        seen = []
        monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(repr(unraisable.exc_value)))
        monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(repr(error)))
        program = load(adds, delegates=[Failing])
        del program
        gc.collect()
        assert seen == ["ValueError('boo')"]

    @pytest.mark.parametrize(
        ("change", "parts"),
        [
            (lambda outputs: [], ["returned 0 outputs, expected 1", "float32 of shape at most [8, 3]"]),
            (lambda outputs: None, ["returned None, expected a list or tuple of 1"]),
            (lambda outputs: outputs[0], ["returned a tensor", "expected a list or tuple"]),
            (lambda outputs: [outputs[0].double()], ["output 0", "float64", ".to(torch.float32)"]),
            (lambda outputs: [outputs[0][0]], ["output 0", "shape [3]", "has 1 dimensions, not 2"]),
            (lambda outputs: [outputs[0].repeat(5, 1)], ["output 0", "dimension 0 is 10, at most 8"]),
            (lambda outputs: [outputs[0].to("meta")], ["output 0", "on meta", "on the CPU"]),
            (lambda outputs: [outputs[0].to_sparse()], ["output 0", "sparse", "dense"]),
            (lambda outputs: [1.5], ["output 0", "the float 1.5", "Return a tensor"]),
        ],
    )
    def test_wrong_outputs(self, adds, xy, change, parts):
        delegate = returning(change)
        program = load(adds, delegates=[delegate])
        message = message_of(lambda: program.run("forward", *xy), BackendContractError)
        for part in ("'forward'", "'script'", "Returning", *parts):
            assert part in message
        good = load(adds, delegates=[ScriptDelegate])
        torch.testing.assert_close(good.run("forward", *xy)[0], torch.sin(xy[0] + xy[1]))


class TestLookUp:
    def test_nobody_has_it(self, adds):
        message = message_of(lambda: load(adds), BackendUnavailableError)
        for part in ("'forward'", "'script'", "XnnpackBackend", "exir_lowering.delegates", "delegates={'script'"):
            assert part in message

    def test_not_available(self, adds):
        class Away(ScriptDelegate):
            def is_available(self):
                return False

            def compile(self, processed, compile_specs, context):
                raise AssertionError("compile of a delegate that is not available")

        message = message_of(lambda: load(adds, delegates=[Away]), BackendUnavailableError)
        assert "'script'" in message
        assert "Away says that it is not available" in message

    def test_is_available_raises(self, adds):
        class Away(ScriptDelegate):
            def is_available(self):
                raise OSError("no device")

        assert "OSError: no device" in message_of(lambda: load(adds, delegates=[Away]), BackendFailure)

    def test_a_built_in_id(self, adds):
        named = type("Named", (ScriptDelegate,), {"delegate_id": "XnnpackBackend"})
        message = message_of(lambda: load(adds, delegates=[named]), InputError)
        assert "has 'XnnpackBackend' itself" in message

    @pytest.mark.parametrize(
        "delegates", [3, "script", [3], [Delegate], [ScriptDelegate, ScriptDelegate()], {3: ScriptDelegate}, [int]]
    )
    def test_wrong_arguments(self, adds, delegates):
        assert "delegates" in message_of(lambda: load(adds, delegates=delegates), InputError)

    def test_a_no_op_compilation(self, adds, xy):
        class Plain(Delegate):
            delegate_id = "script"

            def execute(self, handle, inputs):
                assert handle.startswith(b'{"inputs"')
                return [inputs[0] + inputs[1]]

        program = load(adds, delegates=[Plain])
        torch.testing.assert_close(program.run("forward", *xy)[0], torch.sin(xy[0] + xy[1]))

    def test_another_delegate_of_the_same_id(self, adds, xy):
        """Each program keeps the one that it was loaded with."""
        first, second = ScriptDelegate(), returning(lambda outputs: [outputs[0] * 2])
        programs = [load(adds, delegates=[delegate]) for delegate in (first, second)]
        total = xy[0] + xy[1]
        for _ in range(2):
            torch.testing.assert_close(programs[0].run("forward", *xy)[0], torch.sin(total))
            torch.testing.assert_close(programs[1].run("forward", *xy)[0], torch.sin(total * 2))
        assert (first.executed, second.executed) == (2, 2)

    def test_a_file_without_delegates_asks_for_no_compiler(self, tmp_path):
        path = lower(program_of(AddSin(), torch.ones(3), torch.ones(3))).emit().save(tmp_path / "plain.pte")
        code = (
            "import sys, torch\nfrom exir_lowering import load\n"
            "load(sys.argv[1]).run('forward', torch.ones(3), torch.ones(3))\n"
            "print('platformdirs' in sys.modules)"
        )
        done = run(code, path, env={"CXX": "/nowhere/c++", "XDG_CACHE_HOME": str(tmp_path / "cache")}, fresh=True)
        assert (done.returncode, done.stdout.split()[-1:]) == (0, ["False"]), done.stderr[-2000:]
        assert not (tmp_path / "cache").exists()


class TestNested:
    def test_programs_in_compile_and_execute(self, adds, xy):
        class Outer(ScriptDelegate):
            def compile(self, processed, compile_specs, context):
                self.inner = load(adds, delegates=[ScriptDelegate])
                return super().compile(processed, compile_specs, context)

            def execute(self, handle, inputs):
                (inner,) = self.inner.run("forward", *inputs)
                fresh = load(adds, delegates=[ScriptDelegate]).run("forward", *inputs)[0]
                assert torch.equal(inner, fresh)
                (outer,) = super().execute(handle, inputs)
                return [outer + inner]

        program = load(adds, delegates=[Outer])
        total = xy[0] + xy[1]
        for _ in range(3):
            torch.testing.assert_close(program.run("forward", *xy)[0], torch.sin(total + torch.sin(total)))

    def test_a_failure_inside_that_is_caught(self, adds, xy):
        class Outer(ScriptDelegate):
            def execute(self, handle, inputs):
                inner = load(adds, delegates=[failing(ValueError("inner"))])
                with pytest.raises(BackendFailure, match="inner"):
                    inner.run("forward", *inputs)
                return super().execute(handle, inputs)

        program = load(adds, delegates=[Outer])
        torch.testing.assert_close(program.run("forward", *xy)[0], torch.sin(xy[0] + xy[1]))


class TestResources:
    def test_threads(self, adds):
        program = load(adds, delegates=[ScriptDelegate])
        wrong = []

        def work(seed):
            generator = torch.Generator().manual_seed(seed)
            for call in range(100):
                x, y = (torch.randn(1 + (call + seed) % 8, 3, generator=generator) for _ in range(2))
                if not torch.allclose(program.run("forward", x, y)[0], torch.sin(x + y), atol=1e-5):
                    wrong.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    @pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the size of the process is read from /proc")
    def test_ten_thousand_calls_leak_nothing(self):
        exported = export(AddSin(), (torch.ones(2, 4096), torch.ones(2, 4096)), dynamic_shapes=({0: BATCH}, {0: BATCH}))
        program = load(scripted(exported, sums()).buffer, delegates=[ScriptDelegate])
        inputs = [(torch.ones(batch, 4096), torch.ones(batch, 4096)) for batch in (1, 8, 3)]

        def calls(count):
            for number in range(count):
                program.run("forward", *inputs[number % 3])
            gc.collect()
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        calls(500)
        before = calls(500)
        assert calls(10_000) - before < 4 << 20  # one input of each call would be 640 MB

    def test_nothing_is_kept(self, adds, xy):
        delegate = ScriptDelegate()
        alive = weakref.ref(delegate)
        program = load(adds, delegates=[delegate])
        program.run("forward", *xy)
        with contextlib.suppress(BackendFailure):
            load(adds, delegates=[failing(ValueError("boo"))]).run("forward", *xy)
        del program, delegate
        gc.collect()
        assert alive() is None

    def test_too_many_ids(self, tmp_path):
        done = run(TOO_MANY, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "has room for 16 backends" in done.stdout
        assert done.stdout.split()[-1] == "usable"

    @pytest.mark.parametrize("ending", ["", "thread()", "raise_in_atexit()"])
    def test_the_process_ends_with_programs_alive(self, adds, tmp_path, ending):
        (tmp_path / "model.pte").write_bytes(adds)
        done = run(EXIT.replace("ENDING", ending), cwd=tmp_path)
        assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
        assert done.stdout.split()[-2:] == ["destroyed", "destroyed"]


TOO_MANY = """
import torch
from torch import nn
from torch.export import export
from lowering_support import TagPartitioner
from scripted import ScriptBackend, ScriptDelegate
from exir_lowering import BackendUnavailableError, load, lower

class Sums(nn.Module):
    def forward(self, x):
        for _ in range(14):
            x = x + x
        return x

def file(ids):
    names = {f"aten_add_tensor{f'_{number}' * bool(number)}": f"id{number}" for number in range(ids)}
    partitioner = TagPartitioner(lambda node: names.get(node.name), lambda tag: tag)
    backends = {f"id{number}": ScriptBackend() for number in range(ids)}
    return lower(export(Sums(), (torch.ones(3),)), partitioner, backends=backends).emit().buffer

delegates = [type("Named", (ScriptDelegate,), {"delegate_id": f"id{number}"})() for number in range(14)]
program = load(file(3), delegates=delegates)
try:
    load(file(14), delegates=delegates)
except BackendUnavailableError as error:
    print(error)
for ids in (3, 13):
    assert torch.equal(load(file(ids), delegates=delegates).run("forward", torch.ones(3))[0], torch.full((3,), 2.0**14))
assert torch.equal(program.run("forward", torch.ones(3))[0], torch.full((3,), 2.0**14))
print("usable")
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    for name in ("XDG_CACHE_HOME", "HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache"


def kept(cache):
    return [path for path in cache.rglob("*") if path.is_file()]


class TestShim:
    def test_compiled_once(self, cache, monkeypatch):
        shim.library()
        (path,) = kept(cache)
        assert re.fullmatch(r"shim-1\.5\.\d+-\w+-[0-9a-f]{16}\.so", path.name)
        monkeypatch.setenv("CXX", "false")  # would fail
        assert isinstance(shim.library(), ctypes.CDLL)

    def test_a_damaged_one_in_the_cache(self, cache):
        run("from exir_lowering.runtime.native import shim; shim.library()")
        (path,) = kept(cache)
        path.write_bytes(b"damaged")
        shim.library()
        assert path.stat().st_size > 1000

    def test_two_processes_at_once(self, cache):
        code = "from exir_lowering.runtime.native import shim; shim.library(); print('done')"
        done = []
        threads = [threading.Thread(target=lambda: done.append(run(code))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [each.returncode for each in done] == [0, 0], done[0].stderr[-1000:]
        assert len(kept(cache)) == 1

    def test_a_cache_that_cannot_be_written(self, cache):
        cache.write_text("a file where the folder should be")
        assert isinstance(shim.library(), ctypes.CDLL)

    def test_no_compiler(self, cache, monkeypatch):
        monkeypatch.setenv("PATH", str(cache))
        message = message_of(shim.library, BackendUnavailableError)
        for part in ("c++, g++, clang++", "apt-get install g++", "CXX"):
            assert part in message
        assert not kept(cache)

    def test_a_wrong_compiler(self, cache, monkeypatch):
        monkeypatch.setenv("CXX", "/nowhere/c++ -O3")
        assert "'/nowhere/c++ -O3', which does not exist" in message_of(shim.library, BackendUnavailableError)

    def test_a_failing_compiler(self, cache, tmp_path, monkeypatch):
        compiler = tmp_path / "compiler"
        compiler.write_text("#!/bin/sh\necho 'an error of mine' >&2\nexit 3\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        message = message_of(shim.library, BackendUnavailableError)
        for part in ("exit code 3", "an error of mine", str(compiler), "-std=c++17"):
            assert part in message
        assert not kept(cache)

    def test_another_executorch(self, cache, monkeypatch):
        monkeypatch.setattr(shim, "version", lambda name: "9.1.0")
        message = message_of(shim.library, BackendUnavailableError)
        assert "executorch 9.1.0" in message
        assert "1.5.x" in message


def forked(work):
    """Do something in a forked child; return how it ended: 0 when it did not raise, -N by a signal."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_runs_what_another_thread_runs(adds, xy):
    parent, running, over = os.getpid(), threading.Event(), threading.Event()

    class Waiting(ScriptDelegate):
        def execute(self, handle, inputs):
            if os.getpid() == parent:
                running.set()
                over.wait(60)
            return super().execute(handle, inputs)

    program = load(adds, delegates=[Waiting])
    thread = threading.Thread(target=program.run, args=("forward", *xy))
    thread.start()
    try:
        assert running.wait(60) and forked(lambda: program.run("forward", *xy)) == 0
    finally:
        over.set()
        thread.join()
