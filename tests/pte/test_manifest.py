"""The manifest of a file: what it says of the methods of families, and what is refused in it."""

from dataclasses import replace

import pytest
import torch
from torch.export import export

from exir_lowering import lower
from exir_lowering.pte import manifest
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.format import read_program
from exir_lowering.pte.manifest import Bucket, Crop, Line, Size
from exir_lowering.pte.value_kinds import STRING, ValueSpec

BUCKET = Bucket((Size(0, 1, 8, exact=True), Size(0, 0, 4, fill=-0.5)), (Crop(0, 0, 0, 0),))


@pytest.fixture(scope="module")
def methods():
    program = export(torch.nn.ReLU(), (torch.ones(4, 8),))
    program.graph_module.meta[manifest.BUCKET] = BUCKET
    lowered = lower({"forward@n=4": program, "encode@any": export(torch.nn.ReLU(), (torch.ones(2),))}, "xnnpack")
    return read_program(memoryview(lowered.emit().buffer))


def with_text(methods, text):
    changed = replace(methods[manifest.METHOD], outputs=(ValueSpec(STRING, text),))
    return {**methods, manifest.METHOD: changed}


def test_it_is_read_as_it_was_written(methods):
    assert methods[manifest.METHOD].outputs[0].content == (
        "exir-lowering methods 1\nforward@n=4\tXnnpackBackend\t0.1==8 0.0=4~-0.5\t0.0=0.0\n"
        "encode@any\tXnnpackBackend\t\t\n"
    )
    assert manifest.read(methods) == (
        Line("forward@n=4", ("XnnpackBackend",), BUCKET),
        Line("encode@any", ("XnnpackBackend",)),
    )


def test_a_line_without_a_number_is_padded_with_zeros(methods):
    (line,) = manifest.read(with_text(methods, "exir-lowering methods 1\nforward@n=4\tXnnpackBackend\t0.0=4\t\n"))
    assert line.bucket.sizes == (Size(0, 0, 4),) and line.bucket.sizes[0].fill == 0


@pytest.mark.parametrize("text", ["", "something else", "exir-lowering methods 2\nforward@n=4\t\t\t\n"])
def test_a_method_of_this_name_that_is_no_manifest_of_ours_is_only_a_method(methods, text):
    assert manifest.read(with_text(methods, text)) == ()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("forward@n=5\tXnnpackBackend\t\t", "no such method"),
        ("get_manifest\t\t\t", "no such method of a family"),
        ("forward@n=4\tXnnpackBackend", "not enough values"),
        ("forward@n=4\tXnnpackBackend\t\t\t", "too many values"),
        ("forward@n=4\t\t\t", "needs XnnpackBackend"),
        ("forward@n=4\tXnnpackBackend other\t\t", "needs XnnpackBackend"),
        ("forward@n=4\tXnnpackBackend\t0.0=5\t", "has 4 elements, not 5"),
        ("forward@n=4\tXnnpackBackend\t0.2=4\t", "out of range"),
        ("forward@n=4\tXnnpackBackend\t1.0=4\t", "out of range"),
        ("forward@n=4\tXnnpackBackend\t0.0=4\t1.0=0.0", "out of range"),
        ("forward@n=4\tXnnpackBackend\t0.0=4\t0.0=0.7", "out of range"),
        ("forward@n=4\tXnnpackBackend\t0.0=-4\t", "expected 'forward@n=4.*0.0=4"),
        ("forward@n=4\tXnnpackBackend\t0.0=\u0664\t", "has not 3 numbers"),
        ("forward@n=4\tXnnpackBackend\t-1.0=4\t", "expected 'forward@n=4.*1.0=4"),
        ("forward@n=4\tXnnpackBackend\tx\t", "has not 3 numbers"),
        ("forward@n=4\tXnnpackBackend\t0.0=4~\t", "expected 'forward@n=4.*0.0=4"),
        ("forward@n=4\tXnnpackBackend\t0.0=4~1e300\t", r"expected 'forward@n=4.*0.0=4~1e\+300"),
        ("forward@n=4\tXnnpackBackend\t0.0=4~1e+300\t", "input 0 cannot hold 1e.300"),
        ("forward@n=4\tXnnpackBackend\t0.0=4~1~2\t", "could not convert"),
        ("forward@n=4\tXnnpackBackend\t\t\nforward@n=4\tXnnpackBackend\t\t", "two lines"),
    ],
)
def test_a_text_that_does_not_describe_the_file_is_refused(methods, line, why):
    with pytest.raises(CorruptError, match=why):
        manifest.read(with_text(methods, f"exir-lowering methods 1\n{line}\n"))
