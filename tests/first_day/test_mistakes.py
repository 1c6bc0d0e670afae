"""Mistakes of the first day, and the words that answer them: what was wrong, and what to do."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from torch.export import Dim, export

import exir_lowering
from exir_lowering.cli import main

SECONDS = 2.0


class Tagger(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.drop = torch.nn.Dropout(0.1)
        self.label = torch.nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.label(self.drop(self.embed(input_ids) * attention_mask.unsqueeze(-1)))}


IDS, MASK = torch.ones(1, 8, dtype=torch.long), torch.ones(1, 8)
MODULE = """
import torch

def make():
    return None

def broken():
    raise OSError("no weights here")

def bare():
    return torch.nn.Linear(4, 4)

def wrong():
    return torch.nn.Linear(4, 4), (torch.ones(1, 5),)

class Branches(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

def branches():
    return Branches(), (torch.ones(1, 4),)
"""


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The things that a user has on the first day, in a folder that the commands run in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("first_day"))
        yield _things()


def _things() -> SimpleNamespace:
    length = Dim("length", min=2, max=16)
    sizes = {"input_ids": {1: length}, "attention_mask": {1: length}}
    example = {"input_ids": IDS, "attention_mask": MASK}
    program = export(Tagger().eval(), (), example, dynamic_shapes=sizes)
    lowered = exir_lowering.lower(program, "xnnpack")
    artifact = lowered.emit()
    artifact.save("m.pte")
    lowered.emit(external_weights="weights").save("apart.pte")
    torch.export.save(program, "m.pt2")
    net = torch.nn.Linear(4, 4).eval()
    other = export(net, (torch.ones(1, 4),))
    torch.export.save(other, "other.pt2")
    torch.save(net.state_dict(), "weights.pt")
    torch.save([IDS], "one.pt")
    Path("text.pt2").write_text("version https://git-lfs.github.com/spec/v1\n")
    Path("net.py").write_text(MODULE)
    Path("empty").mkdir()
    return SimpleNamespace(
        program=program, lowered=lowered, artifact=artifact, loaded=exir_lowering.load("m.pte"), net=net, other=other
    )


def trained() -> Any:
    return export(Tagger().train(), (IDS, MASK))


def doubled() -> Any:
    return export(torch.nn.Linear(4, 4).double().eval(), (torch.ones(1, 4).double(),))


def unbounded() -> Any:
    n = Dim("n")
    return export(Tagger().eval(), (IDS, MASK), dynamic_shapes=({1: n}, {1: n}))


def run(*inputs: Any, **named: Any) -> Callable[[SimpleNamespace], Any]:
    return lambda at: at.loaded.run("forward", *inputs, **named)


IN_PYTHON: dict[str, tuple[Callable[[SimpleNamespace], Any], str]] = {
    "a float for an int": (run(IDS.float(), MASK), "'input_ids'.*float32.*expected .*int64.*Convert it with .to"),
    "numpy's float64": (run(IDS.numpy(), numpy.ones((1, 8))), "'attention_mask'.*float64.*expected .*float32"),
    "an array of texts": (run(numpy.array(["a"]), MASK), "PyTorch has no such type of elements"),
    "too few inputs": (run(IDS), "There is none for 'attention_mask'"),
    "too many inputs": (run(IDS, MASK, MASK), "3 inputs, expected 2"),
    "a wrong name": (run(input_idz=IDS, attention_mask=MASK), "'input_idz' is none of them. Did you mean 'input_ids'"),
    "in order and by name": (run(IDS, MASK, input_ids=IDS), "'input_ids' is given twice"),
    "a tokenizer's dict in order": (run({"input_ids": IDS, "attention_mask": MASK}), r"or by name with \*\*"),
    "a list of numbers": (run([1, 2], MASK), "'input_ids'.*list.*expected a tensor"),
    "beyond the largest size": (run(IDS.repeat(1, 3), MASK.repeat(1, 3)), "'input_ids'.*24, more than 16"),
    "below the least size": (run(IDS[:, :1], MASK[:, :1]), "input_ids.*1.*2"),
    "sizes of one Dim that differ": (run(IDS, MASK[:, :7]), "attention_mask.* is 7, expected length"),
    "a size that would be broadcast": (run(IDS, MASK[:, :1]), "attention_mask.* is 1, expected length"),
    "a batch that was fixed": (run(IDS.repeat(2, 1), MASK.repeat(2, 1)), "'input_ids'.*dimension 0 is 2"),
    "no batch dimension": (run(IDS[0], MASK[0]), "'input_ids'.*1 dimensions, not 2"),
    "a misspelt method": (lambda at: at.loaded.run("forwrd", IDS, MASK), "Did you mean 'forward'"),
    "an output that is not there": (lambda at: at.loaded.run("forward", IDS, MASK)["logit"], "Did you mean 'logits'"),
    "an attribute that is not there": (lambda at: at.loaded(IDS, MASK).hidden, "no output 'hidden', only 'logits'"),
    "a file that is not there": (lambda at: exir_lowering.load("nothing.pte"), "there is no such file"),
    "a .pt2 for a .pte": (lambda at: exir_lowering.load("m.pt2"), "not lowered yet.*exir-lower lower"),
    "an artifact for a file": (lambda at: exir_lowering.load(at.artifact), r"Pass its \.buffer"),
    "what lower returns for a file": (lambda at: exir_lowering.verify(at.lowered, at.program), r"Pass its \.emit\(\)"),
    "weights that are in another file": (
        lambda at: exir_lowering.load("apart.pte"),
        "Pass its path as data=.*weights.ptd",
    ),
    "a module for a program": (lambda at: exir_lowering.lower(at.net, "xnnpack"), "Export the module first"),
    "a path for a program": (lambda at: exir_lowering.lower("m.pt2", "xnnpack"), "torch.export.load"),
    "a class for a partitioner": (lambda at: exir_lowering.lower(at.other, XnnpackPartitioner), "Create an instance"),
    "a misspelt partitioner": (lambda at: exir_lowering.lower(at.other, "xnnpak"), "Did you mean 'xnnpack'"),
    "a percentage for a share": (
        lambda at: exir_lowering.LoweringOptions(require_coverage=95),
        "a share between 0 and 1",
    ),
    "a folder that is not there": (lambda at: at.artifact.save("nowhere/m.pte"), "nowhere.*Create it first"),
    "no eval()": (lambda at: exir_lowering.plan(trained(), "xnnpack"), r"model\.eval\(\)"),
    "no eval(), lowered": (lambda at: exir_lowering.lower(trained(), "xnnpack"), "dropout is active"),
    "a model in float64": (lambda at: exir_lowering.plan(doubled(), "xnnpack"), r"after model\.float\(\)"),
    "no partitioner": (lambda at: exir_lowering.plan(at.other), 'give a partitioner, "xnnpack"'),
    "no upper bound": (lambda at: exir_lowering.plan(unbounded(), "xnnpack"), "a Dim that has a max"),
    "the program of another file": (lambda at: exir_lowering.verify("m.pte", at.other), "made from another program"),
    "no calibration": (lambda at: exir_lowering.quantize(at.other), "or dynamic=True"),
    "a method for a constant": (lambda at: at.lowered.emit(constant_methods={"forward": 1}), "choose other names"),
}
"""What is done, and the words of the error, of a warning, or of what is printed."""

ON_THE_COMMAND_LINE = {
    "lowr m.pt2": "no command 'lowr'. Did you mean 'lower'",
    "convert m.pt2": "no command 'convert'. Did you mean 'lower'",
    "diff m.pte apart.pte": "no command 'diff'. Did you mean 'inspect A B'",
    "lower m.pt2 --partitoner xnnpack -o x.pte": "Did you mean '--partitioner'",
    "lower m.pt2 -p xnnpack": "-o",
    "lower m.pt2 -p xnnpak -o x.pte": "Did you mean 'xnnpack'",
    "lower m.pt2 -p xnnpack,openvino -o x.pte": "-p xnnpack -p openvino",
    "lower m.pt2 -p nowhere:make -o x.pte": "No module named 'nowhere'",
    "lower m.pt2 -p xnnpack --rewrites saef -o x.pte": "Did you mean 'safe'",
    "plan m.pt2 -p ethosu": "Did you mean 'ethos-u'",
    "plan m.pt2 -p qnn": "QNN_SDK_ROOT",
    "lower text.pt2 -p xnnpack -o x.pte": "it is another kind of file",
    "lower weights.pt -p xnnpack -o x.pte": "what torch.save wrote, weights or a module, and no program",
    "lower nothing.pt2 -p xnnpack -o x.pte": "no file 'nothing.pt2'",
    "lower m.pt2 -p xnnpack -o nowhere/x.pte": "no directory 'nowhere'. Create it first",
    "lower m.pte -p xnnpack -o x.pte": "already lowered, for `exir-lower run`",
    "lower net.py -p xnnpack -o x.pte": "such as net.py:make",
    "lower net.py:mak -p xnnpack -o x.pte": "'make'",
    "lower net.py:make -p xnnpack -o x.pte": "returns a NoneType, expected a model and its inputs",
    "lower net.py:broken -p xnnpack -o x.pte": "no weights here",
    "lower net.py:bare -p xnnpack -o x.pte": r"a model without inputs, expected .*return model, \(x,\)",
    "lower net.py:wrong -p xnnpack -o x.pte": "torch.export cannot export Linear.*same reduction dim",
    "lower net.py:branches -p xnnpack -o x.pte": "What depends on a tensor's values is torch.where",
    "lower nowhere.py:make -p xnnpack -o x.pte": "no file 'nowhere.py'",
    "lower empty -p xnnpack -o x.pte": "is a directory, expected a file, or .*config.json",
    "lower somebody/bert-base -p xnnpack -o x.pte": "hf download somebody/bert-base --local-dir FOLDER",
    "plan m.pt2 -p xnnpack --task fill-mask": "--task: it is for the folder",
    "plan m.pt2 -p xnnpack --import nowhere": "No module named 'nowhere'",
    "lower m.pt2 other.pt2 -p xnnpack -o x.pte": "METHOD=",
    "run m.pt2": "not lowered yet.*exir-lower lower",
    "run m.pte --method forwrd": "Did you mean 'forward'",
    "run m.pte --inputs one.pt": "attention_mask",
    "verify m.pte other.pt2": "made from another program",
    "quantize m.pt2 -o x.pt2": "--dynamic",
    "check m.pte --runtime 9.9": "1.5.1",
    "bench nothing.pte": "no file 'nothing.pte'",
}
"""Commands, and the words that answer them: none of them is right."""


@pytest.mark.parametrize("mistake", IN_PYTHON)
def test_in_python(mistake: str, at: SimpleNamespace) -> None:
    action, words = IN_PYTHON[mistake]
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            said = str(action(at))
        except (exir_lowering.LoweringError, LookupError, TypeError) as error:
            said = str(error)
    _check(" ".join([said, *(str(one.message) for one in caught)]), words, start)


@pytest.mark.parametrize("command", ON_THE_COMMAND_LINE)
def test_on_the_command_line(command: str, at: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    start = time.process_time()
    assert main(shlex.split(command)) != 0
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err and "damaged" not in printed.err
    _check(printed.out + printed.err, ON_THE_COMMAND_LINE[command], start)
    assert len(printed.err.splitlines()) <= 12, printed.err


def test_without_a_partitioner(at: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    """It is allowed, and seldom meant."""
    assert main(["lower", "other.pt2", "-o", "host.pte"]) == 0
    assert "no -p was given, and -p xnnpack is" in capsys.readouterr().out


def _check(said: str, words: str, start: float) -> None:
    lasted = time.process_time() - start
    assert re.search(words, " ".join(said.split())), said
    assert lasted < SECONDS, lasted


CHEAP = ("lower m.pt2 -p xnnpak -o x.pte", "lower text.pt2 -p xnnpack -o x.pte", "lowr m.pt2")


@pytest.mark.parametrize("command", CHEAP)
def test_in_a_process_of_its_own(command: str, at: SimpleNamespace) -> None:
    """Most of what it takes is to import torch, if it is imported at all."""
    torch_alone = _seconds("import torch")
    code = f"from exir_lowering.cli import main; main({shlex.split(command)!r})"
    assert _seconds(code) < torch_alone + SECONDS


def _seconds(code: str) -> float:
    """Return how long an interpreter computes that runs some code."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport time\nprint(time.process_time())"], capture_output=True, text=True
    )
    return float(done.stdout.split()[-1])
