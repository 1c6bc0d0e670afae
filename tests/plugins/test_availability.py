"""Where a backend can be compiled for and executed: the tables of the backend contract, row by row; registration."""

import json
import textwrap
import warnings

import forked
import pytest
import torch
from lowering_support import NoopBackend, TagPartitioner, edge_program
from scripted import ScriptBackend, ScriptDelegate
from torch import nn
from torch.export import Dim, export

from exir_lowering import (
    Backend,
    BackendFailure,
    BackendUnavailableError,
    BackendUnavailableWarning,
    CompileSpec,
    Delegate,
    InputError,
    PluginLoadError,
    PreprocessResult,
    UnknownPluginError,
    load,
    lower,
    lower_whole_program,
    register_backend,
    register_delegate,
    register_partitioner,
    to_backend,
)
from exir_lowering._upstream import installed
from exir_lowering.graphs import operator_name
from exir_lowering.plugins import registry

STILL_POSSIBLE = "execution is still possible by saving and loading where the backend is available"


class Add(nn.Module):
    def forward(self, x, y):
        return x + y


XY = (torch.rand(3), torch.rand(3))


def notes(caught):
    """The warnings that are about availability."""
    return [found for found in caught if issubclass(found.category, BackendUnavailableWarning)]


@pytest.fixture
def programs():
    program = export(Add(), XY)
    return {"one": program, "two": program}


@pytest.fixture
def own_registry(monkeypatch):
    """What a test registers is forgotten afterwards."""
    monkeypatch.setattr(registry, "_registered", {group: {} for group in registry.GROUPS})


class Absent(ScriptDelegate):
    """Its machine is somewhere else."""

    delegate_id = "script"

    def is_available(self):
        return False

    def compile(self, processed, compile_specs, context):
        raise AssertionError("compile is called on a delegate that is not available")

    def execute(self, handle, inputs):
        raise AssertionError("execute is called on a delegate that is not available")


class NothingToCompile(Delegate):
    """Its payload is ready to be executed: compile is the one of the base class, which does nothing."""

    delegate_id = "script"

    def execute(self, handle, inputs):
        return ScriptDelegate().execute({**json.loads(handle), "values": {}}, inputs)


class HalfWritten(NothingToCompile):
    """Finds out when it compiles that the payload was not finished ahead of time."""

    def compile(self, processed, compile_specs, context):
        raise ValueError("the payload needs a compiler, which is not on this machine")


@pytest.mark.usefixtures("own_registry")
class TestOnTheHost:
    """Rows (compile, execute) on the machine that lowers."""

    def test_no_no(self, programs):
        """Lowering works and warns once for all methods; loading where it is not available is an error."""
        register_delegate(Absent)
        with pytest.warns(BackendUnavailableWarning, match=STILL_POSSIBLE) as caught:
            lowered = lower(programs, TagPartitioner(backend="script"), backends={"script": ScriptBackend})
        (only,) = notes(caught)
        text = str(only.message)
        assert "'script'" in text and "test_availability.Absent says that it is not available" in text
        assert only.filename == __file__
        buffer = lowered.emit().buffer
        with pytest.raises(BackendUnavailableError, match="not available on this machine"):
            load(buffer)
        # It was saved, and is loaded where it is available.
        (result,) = load(buffer, delegates=[ScriptDelegate]).run("one", *XY)
        assert torch.equal(result, XY[0] + XY[1])

    def test_no_yes(self, programs):
        """Cannot be: what preprocess left unfinished is found when the payload is compiled, never by execute."""
        register_delegate(HalfWritten)
        lowered = lower(programs, TagPartitioner(backend="script"), backends={"script": ScriptBackend})
        with pytest.raises(BackendFailure, match="needs a compiler"):
            load(lowered.emit().buffer)

    def test_yes_no(self, programs):
        """A delegate that compiles and cannot execute says that it is not available: as the first row."""
        with pytest.warns(BackendUnavailableWarning, match=STILL_POSSIBLE):
            lowered = lower(programs, TagPartitioner(backend="script"), backends={"script": ScriptBackend})
        with pytest.raises(BackendUnavailableError):
            load(lowered.emit().buffer, delegates={"script": Absent})

    def test_yes_yes(self, programs):
        """The one case in which nothing is said."""
        register_delegate(ScriptDelegate)
        with warnings.catch_warnings():
            warnings.simplefilter("error", BackendUnavailableWarning)
            lowered = lower(programs, TagPartitioner(backend="script"), backends={"script": ScriptBackend})
        (result,) = load(lowered.emit().buffer).run("two", *XY)
        assert torch.equal(result, XY[0] + XY[1])


@pytest.mark.usefixtures("own_registry")
class TestOnTheTarget:
    """Rows (compile, execute) on the machine that loads."""

    @pytest.fixture
    def file(self, programs):
        return lower(programs, TagPartitioner(backend="script"), backends={"script": ScriptBackend}).emit().buffer

    def test_no_no(self, file):
        with pytest.raises(BackendUnavailableError, match=r"needs the backend 'script'.*does not have it"):
            load(file)
        with pytest.raises(BackendUnavailableError, match="Absent says that it is not available on this machine"):
            load(file, delegates=[Absent])

    def test_no_yes_when_the_payload_is_ready(self, file):
        (result,) = load(file, delegates=[NothingToCompile]).run("one", *XY)
        assert torch.equal(result, XY[0] + XY[1])

    def test_no_yes_when_it_is_not(self, file):
        with pytest.raises(BackendFailure, match="ValueError: the payload needs a compiler"):
            load(file, delegates=[HalfWritten])

    def test_yes_no(self, file):
        """Cannot be: execute is only reached through is_available, whose refusal ends the loading."""
        with pytest.raises(BackendUnavailableError):
            load(file, delegates=[Absent])

    def test_yes_yes(self, file):
        (result,) = load(file, delegates=[ScriptDelegate]).run("one", *XY)
        assert torch.equal(result, XY[0] + XY[1])


class TestWarning:
    def test_nobody_has_the_backend(self, programs):
        with pytest.warns(BackendUnavailableWarning) as caught:
            lower(programs, TagPartitioner(backend="echo"))
        (only,) = notes(caught)
        assert "'echo'" in str(only.message) and "the ExecuTorch runtime here does not have it" in str(only.message)

    def test_each_backend_once(self, programs):
        backends = {"a": ScriptBackend, "b": ScriptBackend}
        with pytest.warns(BackendUnavailableWarning) as caught:
            lower(programs, {"one": TagPartitioner(backend="a"), "two": TagPartitioner(backend="b")}, backends=backends)
        assert [str(found.message).split("'")[1] for found in notes(caught)] == ["a", "b"]

    def test_every_way_to_lower(self):
        edge = edge_program(Add(), XY)
        with pytest.warns(BackendUnavailableWarning, match=STILL_POSSIBLE) as caught:
            to_backend(edge, TagPartitioner(backend="echo"))
            lower_whole_program(edge, "echo")
        assert [found.filename for found in notes(caught)] == [__file__] * 2

    def test_what_the_runtime_has_is_available(self, programs):
        with warnings.catch_warnings():
            warnings.simplefilter("error", BackendUnavailableWarning)
            assert lower(programs, "xnnpack").report.backend_ids == ("XnnpackBackend",)
            assert lower(programs, "reference").report.backend_ids == ("reference",)

    def test_the_command_line_notes_it(self, programs, tmp_path):
        torch.export.save(programs["one"], tmp_path / "add.pt2")
        (tmp_path / "mine.py").write_text(
            textwrap.dedent("""
                from exir_lowering import register_partitioner
                from exir_lowering.partitioners import SupportPartitioner, ops
                from exir_lowering import cli

                @register_partitioner("mine")
                def mine():
                    return SupportPartitioner({"echo": ops("aten.add.Tensor")})

                raise SystemExit(cli.main(["lower", "add.pt2", "-p", "mine", "-o", "add.pte"]))
            """)
        )
        done = forked.run(tmp_path / "mine.py", cwd=tmp_path, quiet=False)
        assert done.returncode == 0, done.stderr
        assert "Note: Backend 'echo' is not available here" in done.stderr and "mine.py:" not in done.stderr


@pytest.mark.usefixtures("own_registry")
class TestRegistration:
    def test_decorators(self, programs):
        @register_backend
        class Mine(ScriptBackend):
            backend_id = "mine"

        @register_delegate
        class MineToo(ScriptDelegate):
            delegate_id = "mine"

        @register_partitioner("mine")
        def mine():
            return TagPartitioner(backend="mine")

        (result,) = load(lower(programs, "mine").emit().buffer).run("one", *XY)
        assert torch.equal(result, XY[0] + XY[1])
        listed = {
            (info.group.rpartition(".")[2], info.provider) for info in registry.list_installed() if info.id == "mine"
        }
        assert listed == {
            ("backends", f"this process ({__name__}:{Mine.__qualname__})"),
            ("delegates", f"this process ({__name__}:{MineToo.__qualname__})"),
            ("partitioners", f"this process ({__name__}:{mine.__qualname__})"),
        }

    def test_the_call_comes_first(self, programs):
        @register_backend
        class Mine(ScriptBackend):
            backend_id = "mine"

        class Other(Backend):
            backend_id = "mine"

            def preprocess(self, program, compile_specs: list[CompileSpec]) -> PreprocessResult:
                return PreprocessResult(b"other")

        registered = lower_whole_program(edge_program(Add(), XY), "mine")
        given = lower_whole_program(edge_program(Add(), XY), "mine", backends={"mine": Other})
        assert given.processed_bytes == b"other" != registered.processed_bytes

    def test_an_id_that_is_taken(self):
        register_backend(type("Mine", (ScriptBackend,), {"backend_id": "mine"}))
        with pytest.raises(PluginLoadError, match=r"'mine'.*already registered, by .*Mine; now by .*Other"):
            register_backend(type("Other", (ScriptBackend,), {"backend_id": "mine"}))
        # A class that is defined again where it was replaces the older one, as in a notebook.
        again = register_backend(type("Mine", (ScriptBackend,), {"backend_id": "mine"}))
        assert type(registry.find_backend("mine")) is again

    def test_an_id_of_an_entry_point(self):
        register_backend(type("Mine", (ScriptBackend,), {"backend_id": "reference"}))
        with pytest.raises(PluginLoadError, match=r"'reference'.*provided twice: by exir-lowering .* and this process"):
            registry.find_backend("reference")

    @pytest.mark.parametrize(
        ("register", "plugin", "parts"),
        [
            (register_backend, ScriptDelegate, ("register_backend", "ScriptDelegate", "exir_lowering.Backend")),
            (register_backend, 3, ("register_backend", "got 3")),
            (register_delegate, ScriptBackend, ("register_delegate", "exir_lowering.Delegate")),
            (register_delegate, type("NoId", (Delegate,), {}), ("NoId", "delegate_id", "None")),
            (register_backend, type("Empty", (Backend,), {"backend_id": ""}), ("Empty", "backend_id", "''")),
            (register_partitioner, TagPartitioner, ("register_partitioner", "expected a name")),
            (register_partitioner("mine"), 3, ("register_partitioner('mine')", "got 3")),
        ],
    )
    def test_what_cannot_be_registered(self, register, plugin, parts):
        with pytest.raises(PluginLoadError) as caught:
            register(plugin)
        assert all(part in str(caught.value) for part in parts), str(caught.value)

    def test_an_unknown_name_lists_what_is_registered(self, programs):
        register_partitioner("mine")(TagPartitioner)
        with pytest.raises(UnknownPluginError, match="Did you mean 'mine'"):
            lower(programs, "mien")


class Deep(nn.Module):
    """Two partitions with weights, one of them in a branch, a count on the way, and operators of the host."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        hidden = torch.sin(self.first(x))
        return torch.cond(hidden.sum() > 0, self.second, lambda h: h[:, :4] * 2, (hidden,)) + self.calls


def matmuls(node):
    return "t" if operator_name(node) in ("aten.addmm.default", "aten.permute_copy.default") else None


class TestFallback:
    """load(unavailable="fallback"): the original graphs, kept with the file."""

    @pytest.fixture(scope="class")
    def deep(self):
        torch.manual_seed(0)
        model, batch = Deep().eval(), Dim("batch", min=2, max=8)
        model.requires_grad_(False)
        program = export(model, (torch.rand(3, 4),), dynamic_shapes={"x": {0: batch}})
        return model, lower({"one": program, "two": program}, TagPartitioner(matmuls))

    def test_it_computes_and_says_so(self, deep):
        model, lowered = deep
        assert all(method.partitions for method in lowered.report.methods)
        with pytest.warns(
            BackendUnavailableWarning, match="executed by PyTorch, from their original graphs, as"
        ) as caught:
            artifact = lowered.emit(keep_originals=True, share_state=False)  # each method counts its own calls
            program = load(artifact.buffer, unavailable="fallback")
        (only,) = notes(caught)
        assert only.filename == __file__ and "'echo'" in str(only.message)
        for method in program.method_names:
            for call, size in enumerate((2, 8, 3), start=1):
                for x in (torch.rand(size, 4), -torch.rand(size, 4)):
                    model.calls.zero_().add_(2 * call - 2 + int(x.sum() < 0))
                    (result,) = program.run(method, x)
                    assert torch.allclose(result, model(x), atol=1e-6)

    def test_a_backend_that_the_runtime_has_and_cannot_use(self, deep):
        """As OpenVINO's in the stock wheel: its id is taken in the runtime."""
        _model, _ = deep
        if installed.is_available("OpenvinoBackend"):
            pytest.skip("OpenVINO is installed here")
        x = torch.rand(3, 4)
        programs = {"one": export(nn.Linear(4, 4), (x,)), "two": export(nn.Linear(4, 4), (x,))}
        lowered = lower(
            programs, TagPartitioner(backend="OpenvinoBackend"), backends={"OpenvinoBackend": NoopBackend()}
        )
        buffer = lowered.emit(keep_originals=True).buffer
        with pytest.raises(BackendUnavailableError, match="says that it is not available"):
            load(buffer)
        program = load(buffer, unavailable="fallback")
        for name, original in programs.items():
            torch.testing.assert_close(program.run(name, x)[0], original.module()(x))

    def test_without_the_graphs(self, deep):
        with pytest.raises(BackendUnavailableError, match=r"needs the backend 'echo'.*keep_originals=True"):
            load(deep[1].emit().buffer, unavailable="fallback")

    def test_not_asked_for(self, deep):
        with pytest.raises(BackendUnavailableError, match="needs the backend 'echo'"):
            load(deep[1].emit(keep_originals=True).buffer)

    def test_what_is_available_is_used(self, programs):
        """Only the missing backend is replaced: the delegate that is there compiles and executes its own payload."""
        delegate = ScriptDelegate()
        lowered = lower(
            {"one": programs["one"], "two": programs["two"]},
            {"one": TagPartitioner(backend="script"), "two": TagPartitioner(backend="echo")},
            backends={"script": ScriptBackend},
        )
        program = load(lowered.emit(keep_originals=True).buffer, delegates=[delegate], unavailable="fallback")
        for method in ("one", "two"):
            (result,) = program.run(method, *XY)
            assert torch.equal(result, XY[0] + XY[1])
        assert delegate.executed == 1

    def test_weights_that_a_backend_stores_as_they_are_cost_nothing(self):
        """XNNPACK's named data has the same contents as the original graphs."""
        program = export(nn.Linear(512, 512).eval(), (torch.rand(1, 512),))
        lowered = lower(program, "xnnpack")
        plain, kept = (len(lowered.emit(keep_originals=keep).buffer) for keep in (False, True))
        assert plain < kept < plain + 4000 < 1_100_000

    def test_graphs_that_cannot_be_kept(self):
        class Elsewhere(nn.Module):
            def forward(self, x):
                return torch.zeros(3, device="meta") + torch.zeros(3, device="meta"), x + 1

        lowered = lower(export(Elsewhere(), (torch.rand(3),)), TagPartitioner())
        with pytest.raises(InputError, match=r"keep_originals: .*device meta"):
            lowered.emit(keep_originals=True)
