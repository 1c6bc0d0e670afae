"""Where programs come from: a function of a Python file, a folder of transformers, files with classes of packages."""

from __future__ import annotations

import json
import sys
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.export import ExportedProgram, export

from exir_lowering import cli
from exir_lowering.cli.program_files import find_programs, read_programs

MODEL = """
import torch
from beside import SIZE

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = torch.nn.Linear(SIZE, 4), torch.nn.Dropout()

    def forward(self, x, scale=None):
        y = self.dropout(self.linear(x))
        return {"logits": y if scale is None else y * scale}

x = torch.ones(2, SIZE)

def training():
    return Net(), (x,)

def alone():
    return Net().eval(), x

def named():
    return Net().eval(), {"x": x, "scale": torch.ones(4)}

def sized():
    return Net().eval(), ((x,), None, {"x": {0: torch.export.Dim("rows", max=16)}})

def flat():
    return Net().eval(), (x,), {"scale": torch.ones(4)}

def program():
    return torch.export.export(Net().eval(), (x,))

def methods():
    return {"one": alone(), "many": sized()}

def bare():
    return Net()

def four():
    return Net().eval(), (x,), {}, None, 3

net = Net()

def wrong():
    return Net().eval(), (torch.ones(2, 9),)

def broken():
    raise ZeroDivisionError("by zero")

made = {"ready": program()}
"""

Read = Callable[..., dict[str, ExportedProgram]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("SIZE = 8")
    (tmp_path / "model.py").write_text(MODEL)
    known = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - known:
        if getattr(sys.modules[name], "__file__", "") in {str(path) for path in tmp_path.glob("*.py")}:
            del sys.modules[name]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return what a command says that is refused."""

    def run(*argv: str) -> str:
        capsys.readouterr()
        assert cli.main([*argv]) == 2
        out, err = capsys.readouterr()
        assert out == "" and "Traceback" not in err
        return err

    return run


def read(*given: str, task: str | None = None, imports: tuple[str, ...] = ()) -> dict[str, ExportedProgram]:
    return read_programs(find_programs(given), Namespace(trust=False, task=task, imports=imports))


def test_what_a_function_may_return(folder: Path) -> None:
    for function, inputs in {
        "training": ("x",),
        "alone": ("x",),
        "named": ("x", "scale"),
        "flat": ("x", "scale"),
        "sized": ("x",),
        "program": ("x",),
    }.items():
        (found,) = read(f"model.py:{function}").values()
        assert found.graph_signature.user_inputs == inputs, function
        assert "0.5, True" not in found.graph_module.code
    assert {*read("model.py:methods")} == {"one", "many"} and {*read("model.py:made")} == {"ready"}
    assert {*read("model:made")} == {"ready"} and {*read("a=model.py:made", "b=model.py:alone")} == {"a", "b"}
    assert sys.path.count(str(folder)) == 0


def test_random_weights_are_the_same_each_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (read("model.py:training")["forward"].state_dict for _ in range(2))
    assert "Note: model.py:training: the model was in training mode" in capsys.readouterr().err
    assert first.keys() == second.keys() and all(map(torch.equal, first.values(), second.values()))


def test_what_is_wrong_with_a_function(folder: Path, told: Callable[..., str]) -> None:
    (folder / "typo.py").write_text("import torch\nimport no_such_module\n")
    for given, parts in {
        "model.py": ("name the function", "model.py:make"),
        "none.py:make": ("There is no file 'none.py'",),
        "model.py:nmaed": ("has no 'nmaed'", "'named'"),
        "model.py:bare": ("a model without inputs", "return model, (x,)"),
        "model.py:net": ("a model without inputs", "return model, (x,)"),
        "model.py:four": ("expected a model and its inputs",),
        "modle.onnx": ("There is no file 'modle.onnx', and no folder.\n",),
        "model.py:x": ("cannot be called",),
        "model.py:broken": ("calling broken raised ZeroDivisionError: by zero (model.py, line 49)",),
        "model.py:wrong": ("torch.export cannot export Net", "(model.py, line 11)"),
        "typo.py:make": ("'typo.py' cannot be imported", "no_such_module", "(typo.py, line 2)"),
        "a=model.py:methods": ("has the methods one, many",),
    }.items():
        said = told("plan", given)
        assert all(part in said for part in parts), said


def test_a_folder_of_transformers(folder: Path, capsys: pytest.CaptureFixture[str], told: Callable[..., str]) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = {"model_type": "bert", "vocab_size": 20, "max_position_embeddings": 32, **sizes}
    path = folder / "bert"
    path.mkdir()
    assert "is a directory, expected a file, or one with" in told("plan", "bert")
    (path / "config.json").write_text(json.dumps(config))
    assert "names no class" in (said := told("plan", "bert")) and "--task text-classification" in said
    assert "Did you mean 'text-classification'?" in told("plan", "bert", "--task", "text-clasification")
    assert "none is given" in told("plan", "model.py:named", "--task", "fill-mask")
    (program,) = read("bert", task="text-classification").values()
    assert program.graph_signature.user_inputs == ("input_ids", "attention_mask")
    ((_, bounds),) = program.range_constraints.items()
    assert bounds.upper == 32
    said = capsys.readouterr().err
    assert "the weights are random" in said and "BertForSequenceClassification with input_ids [1, length]" in said
    (path / "config.json").write_text(json.dumps({**config, "attn_implementation": "somebody/kernel"}))
    assert "expected eager or sdpa" in told("plan", "bert", "--task", "fill-mask")
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mine"}}))
    assert "not quantised yet" in told("plan", "bert", "--task", "fill-mask")
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["Trainer"]}))
    assert "names Trainer, expected one class" in told("plan", "bert")
    (path / "config.json").write_text(
        json.dumps({**config, "auto_map": {"AutoConfig": "mine.Mine"}, "model_type": "x"})
    )
    (path / "mine.py").write_text("raise SystemExit('the file named this')")
    assert "transformers cannot load or export it" in told("plan", "bert")


def test_a_language_model_has_a_cache(folder: Path) -> None:
    (folder / "gpt").mkdir()
    sizes = {"vocab_size": 20, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
    (folder / "gpt" / "config.json").write_text(json.dumps(config))
    found = read("gpt")
    assert {*found} == {"forward", "step"}
    for program in found.values():
        assert program.graph_signature.user_inputs == ("input_ids", "cache_position")
        assert len(program.graph_signature.buffers) >= 2


class Named(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": x + 1}


def renamed(path: Path, kind: str) -> None:
    """Save a program whose output is, as the file says, of another class."""
    torch.export.save(export(Named(), (torch.ones(3),)), path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            if name.endswith("models/model.json"):
                start = content.index(b"out_spec")
                content = content[:start] + content[start:].replace(b"builtins.dict", kind.encode(), 1)
            archive.writestr(name, content)


def test_outputs_of_classes_of_packages(folder: Path, told: Callable[..., str]) -> None:
    renamed(folder / "hf.pt2", "transformers.models.x.modeling_x.XOutput")
    (program,) = read("hf.pt2").values()
    assert program.module()(torch.zeros(3))["logits"].tolist() == [1, 1, 1]
    renamed(folder / "mine.pt2", "package.Output")
    said = told("plan", "mine.pt2")
    assert "'package.Output' is not registered" in said and "--import MODULE" in said and "damaged" not in said
    (folder / "package.py").write_text(
        "from torch.utils import _pytree as p\n"
        "class Output(dict): pass\n"
        "p.register_pytree_node(Output, lambda o: (list(o.values()), list(o)),\n"
        "  lambda v, k: Output(zip(k, v)), serialized_type_name='package.Output')\n"
    )
    (program,) = read("mine.pt2", imports=("package",)).values()
    assert type(program.module()(torch.zeros(3))).__name__ == "Output"
    assert "No module named 'packge'" in told("plan", "mine.pt2", "--import", "packge")


def test_damaged_is_what_is_damaged(folder: Path, told: Callable[..., str]) -> None:
    path = folder / "net.pt2"
    torch.export.save(export(torch.nn.Linear(64, 64), (torch.ones(1, 64),)), path)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        (at,) = (one.header_offset for one in archive.infolist() if one.filename.endswith("models/model.json"))
    content[at + 500] ^= 1
    path.write_bytes(content)
    assert "damaged in " in told("plan", "net.pt2")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("net/archive_format", "pt2")
    assert "torch.export.save was interrupted" in told("plan", "net.pt2")
    torch.save(torch.nn.Linear(2, 2).state_dict(), folder / "weights.pt")
    said = told("plan", "weights.pt")
    assert "what torch.save wrote" in said and "damaged" not in said and "MODEL.py:FUNCTION" in said


def test_a_recurrent_model_has_no_cache(folder: Path, told: Callable[..., str]) -> None:
    (folder / "mamba").mkdir()
    config = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "vocab_size": 20, "hidden_size": 16}
    (folder / "mamba" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    assert "MambaForCausalLM has no attention" in (said := told("plan", "mamba"))
    assert "docs/guides/recurrent-models.md" in said
