"""Load and run in ExecuTorch's own runtime: what works, and that nothing a caller can do ends the process."""

import os
import re
import sys
import threading
from pathlib import Path

import numpy
import pytest
import torch
from executorch.exir import ExecutorchBackendConfig
from executorch.exir.backend.canonical_partitioners.all_node_partitioner import AllNodePartitioner
from runtime_children import run
from runtime_models import Lookup
from torch import nn
from torch.export import Dim, export

import exir_lowering
from exir_lowering import (
    BackendUnavailableError,
    InputError,
    LoweringError,
    load,
    lower,
)
from exir_lowering.pte.payloads import read_payload


class Double(nn.Module):
    def forward(self, x):
        return x * 2


class Take(nn.Module):
    def forward(self, x, n: int):
        return x[:n] * 2


def message_of(call, error=InputError):
    with pytest.raises(error) as caught:
        call()
    assert isinstance(caught.value, LoweringError)
    return str(caught.value)


class TestRun:
    @pytest.mark.parametrize("batch", [1, 2, 6, 3])
    def test_dynamic_batch(self, net, two_methods_file, batch):
        x = torch.randn(batch, 3, 8, 8)
        (result,) = load(two_methods_file).run("forward", x)
        assert result.shape == (batch, 5)
        torch.testing.assert_close(result, net(x), atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("kind", [str, Path, "bytes", bytearray, memoryview])
    def test_sources(self, net, two_methods_file, kind):
        source = two_methods_file.read_bytes() if kind == "bytes" else None
        if kind in (bytearray, memoryview):
            source = kind(two_methods_file.read_bytes())
        program = load(kind(two_methods_file) if source is None else source)
        del source
        x = torch.randn(2, 3, 8, 8)
        torch.testing.assert_close(program.run("forward", x)[0], net(x), atol=1e-4, rtol=1e-4)

    def test_outputs_belong_to_the_caller(self, two_methods):
        program = load(two_methods.buffer)
        (first,) = program.run("forward", torch.randn(2, 3, 8, 8))
        kept = first.clone()
        for _ in range(3):
            program.run("forward", torch.randn(6, 3, 8, 8))
        assert torch.equal(first, kept)
        first.zero_()
        del program
        assert not first.any()

    def test_state_is_kept_between_runs_whatever_else_runs(self, two_methods):
        program = load(two_methods.buffer)
        other = load(two_methods.buffer)
        for number in range(1, 4):
            assert torch.equal(program.run("count", torch.ones(3))[0], torch.full((3,), 2.0 * number))
            # Methods of one program of the runtime would overwrite each other's buffers.
            program.run("forward", torch.randn(6, 3, 8, 8))
            other.run("count", torch.full((3,), 100.0))

    def test_data_file(self, net, external):
        path, data = external
        x = torch.randn(3, 3, 8, 8)
        for source in (path, path.read_bytes()):
            torch.testing.assert_close(load(source, data=data).run("forward", x)[0], net(x), atol=1e-4, rtol=1e-4)

    def test_constant_methods(self, numbers):
        program = load(numbers)
        assert program.method_names == ("forward", "ones", "version")
        assert program.run("version") == [3]
        assert torch.equal(program.run("ones")[0], torch.ones(2))

    def test_threads(self, net, two_methods):
        program = load(two_methods.buffer)
        wrong = []

        def work(seed):
            generator = torch.Generator().manual_seed(seed)
            for batch in (1, 4, 6):
                x = torch.randn(batch, 3, 8, 8, generator=generator)
                if not torch.allclose(program.run("forward", x)[0], net(x), atol=1e-4):
                    wrong.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


LAYOUTS = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[:1].expand(2, 3, 8, 8),
    "offset": lambda x: torch.cat([x, x])[1:3],
    "requires_grad": lambda x: x.clone().requires_grad_(),
    "parameter": lambda x: nn.Parameter(x.clone()),
}


class TestLayout:
    """The runtime reads the memory of an input in the order the file says, whatever its strides are."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_any_layout(self, net, fixed, two_methods, layout):
        x = LAYOUTS[layout](torch.randn(2, 3, 8, 8))
        before = x.detach().clone()
        with torch.no_grad():
            expected = net(x)
        for source in (fixed, two_methods.buffer):
            (result,) = load(source).run("forward", x)
            torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(x, before)


X = torch.ones(2, 3, 8, 8)
FIXED = "expected a tensor of float32 of shape [2, 3, 8, 8]"
DYNAMIC = "expected a tensor of float32 of shape at most [6, 3, 8, 8]"
WRONG_INPUTS = {
    "none": ((), ["got 0 inputs, expected 1", "(x: a tensor of float32"]),
    "nested": (([X], X), ["got 2 inputs, expected 1", "one by one"]),
    "dtype": ((X.double(),), ["argument 'x' is a tensor of float64 of shape [2, 3, 8, 8]", ".to(torch.float32)"]),
    "rank": ((X[0],), ["argument 'x'", "shape [3, 8, 8]", "has 3 dimensions, not 4"]),
    "size": ((torch.ones(2, 3, 8, 9),), ["argument 'x'", "shape [2, 3, 8, 9]", "dimension 3 is 9"]),
    "batch": ((torch.ones(7, 3, 8, 8),), ["argument 'x'", "shape [7, 3, 8, 8]", "dimension 0 is 7"]),
    "float": ((1.5,), ["argument 'x' is the float 1.5"]),
    "None": ((None,), ["argument 'x' is None"]),
    "list": (([X],), ["argument 'x' is of type builtins.list", "one by one"]),
    "numpy": ((X.double().numpy(),), ["argument 'x' is a tensor of float64", '.astype("float32")']),
    "text": ((numpy.array(["x"]),), ["argument 'x' is of type numpy.ndarray", "PyTorch has no such type"]),
    "meta": ((X.to("meta"),), ["argument 'x'", "on meta", "on the CPU"]),
    "sparse": ((X.to_sparse(),), ["argument 'x'", "layout sparse_coo", "dense"]),
}


class TestWrongInputs:
    @pytest.mark.parametrize("case", WRONG_INPUTS)
    def test_named_and_the_program_stays_usable(self, net, fixed, two_methods, case):
        inputs, parts = WRONG_INPUTS[case]
        for source, expected in ((fixed, FIXED), (two_methods.buffer, DYNAMIC)):
            program = load(source)
            message = message_of(lambda program=program: program.run("forward", *inputs))
            for part in ("Method 'forward'", *parts):
                assert part in message
            if "got" not in parts[0]:
                assert expected in message
            torch.testing.assert_close(program.run("forward", X)[0], net(X), atol=1e-4, rtol=1e-4)

    def test_a_smaller_static_size(self, fixed):
        assert "dimension 0 is 1, not 2" in message_of(lambda: load(fixed).run("forward", X[:1]))

    @pytest.mark.parametrize(
        ("index", "value", "parts"),
        [
            (0, None, ["argument 'x' is None", "expected a tensor of float32 of shape [3]"]),
            (1, 3.5, ["argument 'factor' is the float 3.5", "expected the float 2.5", "export it again"]),
            (1, torch.tensor(2.5), ["argument 'factor' is a tensor of float32 of shape []", "expected the float 2.5"]),
            (2, 1, ["argument 'flag' is the int 1", "expected the bool True"]),
            (3, torch.ones(3), ["argument 'other' is a tensor of float32 of shape [3]", "expected None"]),
        ],
    )
    def test_numbers(self, numbers, index, value, parts):
        program = load(numbers)
        inputs = [torch.ones(3), 2.5, True, None]
        assert torch.equal(program.run("forward", *inputs)[0], torch.full((3,), 2.5))
        inputs[index] = value
        message = message_of(lambda: program.run("forward", *inputs))
        for part in parts:
            assert part in message

    def test_an_integer_that_was_fixed(self):
        program = load(lower(export(Take(), (torch.ones(8), 2))).emit().buffer)
        assert program.run("forward", torch.ones(8), 2)[0].shape == (2,)
        assert "argument 'n' is the int 3, expected the int 2" in message_of(
            lambda: program.run("forward", torch.ones(8), 3)
        )

    def test_an_integer_that_was_dynamic_cannot_be_given(self):
        # ExecuTorch 1.5 writes None for it: the runtime refuses an int, and ends the process in the kernel on None.
        dynamic = {"x": None, "n": Dim.DYNAMIC}
        with torch.no_grad():
            program = export(Fill(), (torch.ones(8), 2), dynamic_shapes=dynamic)
        try:
            content = lower(program).emit().buffer
        except InputError as error:
            pytest.skip(f"emission refuses it: {error}")
        for given in (2, None):
            message = message_of(lambda given=given: load(content).run("forward", torch.ones(8), given))
            assert "argument 'n'" in message
            assert "integer" in message

    def test_a_value_that_a_kernel_refuses(self):
        class Times(Lookup):
            def forward(self, x, times):
                return super().forward(x) * times

        inputs = torch.tensor([1, 2]), 3
        program = load(lower(export(Times(), inputs)).emit().buffer)
        (before,) = program.run("forward", *inputs)
        message = message_of(lambda: program.run("forward", torch.tensor([7, 8]), 3))
        assert "failed in the ExecuTorch runtime" in message and "tensors of shapes [2])" in message
        assert torch.equal(program.run("forward", *inputs)[0], before)

    def test_unknown_method(self, two_methods):
        program = load(two_methods.buffer)
        message = message_of(lambda: program.run("foward", X))
        assert "'foward'" in message
        assert "'count', 'forward'" in message
        assert "Did you mean 'forward'?" in message
        assert "a int as the name" in message_of(lambda: program.run(3, X))


class Fill(nn.Module):
    def forward(self, x, n: int):
        return torch.full((n,), 1.0) + x[0]


class TestWrongSources:
    def test_missing(self, tmp_path):
        assert "no such file" in message_of(lambda: load(tmp_path / "none.pte"))

    def test_directory(self, tmp_path):
        assert "a directory" in message_of(lambda: load(tmp_path))

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
    def test_pipe(self, tmp_path):
        os.mkfifo(tmp_path / "pipe.pte")
        assert "not a regular file" in message_of(lambda: load(tmp_path / "pipe.pte"))

    def test_empty(self, tmp_path):
        (tmp_path / "empty.pte").touch()
        assert "it is empty" in message_of(lambda: load(tmp_path / "empty.pte"))
        assert "it is empty" in message_of(lambda: load(b""))

    @pytest.mark.parametrize("source", [None, 3, ["a.pte"], torch.ones(3)])
    def test_type(self, source):
        assert f"got a {type(source).__name__}, expected the path" in message_of(lambda: load(source))

    def test_other_files(self, external):
        assert "Give the .pte file that it was saved with, and this one as data=" in message_of(
            lambda: load(external[1])
        )
        assert "damaged, or not what ExecuTorch writes" in message_of(lambda: load(__file__))

    def test_a_backend_that_the_runtime_lacks(self):
        partitioner = AllNodePartitioner("EchoBackend", [])
        content = lower(export(Double(), (torch.ones(3),)), partitioner, backends={"EchoBackend": Payload}).emit()
        message = message_of(lambda: load(content.buffer), BackendUnavailableError)
        for part in ("method 'forward'", "'EchoBackend'", "XnnpackBackend"):
            assert part in message


class Payload(exir_lowering.Backend):
    backend_id = "EchoBackend"
    version = "1"

    def preprocess(self, program, compile_specs):
        return exir_lowering.PreprocessResult(processed_bytes=b"payload", debug_handle_map={}, data_store_output=None)


class TestDataFile:
    def test_not_given(self, external):
        path, data = external
        message = message_of(lambda: load(path))
        assert "lacks 4 of its weights" in message
        assert "data=" in message
        assert data.name in message
        assert "data=" in message_of(lambda: load(path.read_bytes()))

    def test_missing_or_wrong(self, external, tmp_path):
        path, _ = external
        assert "no such file" in message_of(lambda: load(path, data=tmp_path / "none.ptd"))
        assert "got a int, expected the path or content of a .ptd file" in message_of(lambda: load(path, data=3))
        assert "it is a .pte file" in message_of(lambda: load(path, data=path))
        other = lower(export(nn.Linear(2, 2), (torch.ones(2, 2),))).emit(
            ExecutorchBackendConfig(external_constants=True)
        )
        other.save(tmp_path / "other.pte")
        (name,) = other.data_files
        assert "weights are not in" in message_of(lambda: load(path, data=tmp_path / name))

    def test_damaged(self, external, tmp_path):
        path, data = external
        content = data.read_bytes()
        cut = tmp_path / "cut.ptd"
        for length in range(0, len(content), 37):
            cut.write_bytes(content[:length])
            assert "cannot be loaded" in message_of(lambda: load(path, data=cut))


def test_damaged_names_in_a_payload(two_methods):
    # The binding ends the process when XNNPACK prints a name that is not UTF-8.
    content = bytearray(two_methods.buffer)
    payloads = [found.start() - 4 for found in re.finditer(b"XH00", content)]
    names = {at: sorted(read_payload("XnnpackBackend", memoryview(bytes(content))[at:]).weights) for at in payloads}
    at = next(at for at in payloads if names[at])
    content[content.index(names[at][0].encode(), at)] = 0xFF
    assert "not UTF-8" in message_of(lambda: load(bytes(content)))


def test_loading_does_not_read_the_weights(tmp_path):
    size = 64 << 20
    linear = nn.Linear(4096, 4096, bias=False)
    path = lower(export(linear, (torch.ones(1, 4096),))).emit().save(tmp_path / "large.pte")
    assert path.stat().st_size > size
    code = (
        "import sys, resource, torch\n"
        "from exir_lowering import load\n"
        "from exir_lowering._upstream import installed\n"
        "installed.is_available('XnnpackBackend')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "load(sys.argv[1])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = run(code, path, fresh=True)  # a forked child has to read the libraries again, and counts that
    assert done.returncode == 0, done.stderr
    if sys.platform == "linux":
        assert int(done.stdout.split()[-1]) * 1024 < size / 4


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of a process")
def test_a_file_that_is_checked_as_a_whole_is_in_memory_once(tmp_path):
    linear = nn.Linear(4096, 2048, bias=False)
    path = lower(export(linear, (torch.ones(1, 4096),))).emit().save(tmp_path / "large.pte")

    def mapped():
        return int(re.search(r"^RssFile:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) * 1024

    load(path).run("forward", torch.ones(1, 4096))  # code of kernels is read
    before = mapped()
    program = load(path, verify="full")
    program.run("forward", torch.ones(1, 4096))
    assert path.stat().st_size > 32 << 20 and mapped() - before < 1.25 * path.stat().st_size
    assert path.read_bytes() == bytes(program._file.file.content)  # the system reads it again
