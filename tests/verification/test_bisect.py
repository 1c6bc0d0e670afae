"""`bisect` names the operator that goes wrong in a backend."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import culprit_delegates
import culprits
import pytest
import quantized_models
import torch
from culprits import Chain, Planted
from torch.export import ExportedProgram, export, save

from exir_lowering import BackendFailure, Culprit, InputError, LoweringOptions, Rewrite, bisect, cli
from exir_lowering.backends.reference import ReferenceBackend, ReferenceDelegate, executable, reference_partitioner
from exir_lowering.partitioners import RuledPartitioner, SupportPartitioner, deny
from exir_lowering.plugins import registry
from exir_lowering.testing.trial import take_fingerprint
from exir_lowering.verification import bisecting


def chain(count: int, odd: dict[int, Callable[..., Any]] | None = None) -> ExportedProgram:
    return export(Chain(count, odd).eval(), (torch.randn(2, 4),))


def planted(*names: str, operator: str = "exp.default", args: tuple[Any, ...] = ()) -> dict[str, Any]:
    return {"reference": Planted(*names, operator=operator, args=args)}


def bisect_here(*given: Any, **more: Any) -> Culprit:
    """Search in this process, which another one cannot share a delegate with that is an object: it is faster."""
    return bisect(*given, **{"delegates": [ReferenceDelegate()], **more})


def names(found: Culprit) -> list[str]:
    return [one.node.name for one in found.operators]


@pytest.mark.parametrize("place", [0, 199, random.Random(0).randrange(1, 199)])
def test_one_operator_of_two_hundred_is_named(place: int) -> None:
    program = chain(200)
    before, random_state = take_fingerprint({"": program}), torch.get_rng_state()
    name = f"aten_sin_default_{place}".removesuffix("_0")
    found = bisect(program, "reference", backends=planted(name))
    assert found.kind == "off" and names(found) == [name], str(found)
    assert found.lowerings <= math.log2(200) + 4
    assert found.operators[0].node.module == f"blocks.{place}"
    assert "return self.function(x)" in found.operators[0].node.source
    assert f"blocks.{place}\n" in str(found) and f"deny(name={name!r})" in str(found)
    assert take_fingerprint({"": program}) == before and torch.equal(torch.get_rng_state(), random_state)
    assert "With only this operator in a backend the file is wrong." in " ".join(str(found).split())


def test_the_first_of_several_is_named_and_then_the_next() -> None:
    program, backends = chain(40), planted("aten_sin_default_9", "aten_sin_default_30")
    found = bisect_here(program, "reference", backends=backends)
    assert names(found) == ["aten_sin_default_9"] and "bisect again with it" in str(found)
    rest = RuledPartitioner(reference_partitioner(), deny(name="aten_sin_default_9"))
    assert names(bisect_here(program, rest, backends=backends)) == ["aten_sin_default_30"]


def test_what_only_some_values_show() -> None:
    program, saturating = (
        chain(20, {0: lambda x: x * 3, 9: torch.tanh}),
        planted("aten_mul_tensor", operator="clamp.default", args=(None, 8.0)),
    )
    assert bisect_here(program, "reference", inputs=[(torch.ones(2, 4),)], backends=saturating).ok
    found = bisect_here(program, "reference", backends=saturating)
    assert names(found) == ["aten_mul_tensor"] and found.error.endswith('in "ramp from 0 to 255", call 1.')
    table = export(culprits.Table().eval(), (torch.tensor([[1, 2]]),))
    assert bisect_here(
        table, "reference", inputs=[(torch.tensor([[3, 4]]),)], delegates=[culprit_delegates.LastId()]
    ).ok
    found = bisect_here(table, "reference", delegates=[culprit_delegates.LastId()])
    assert names(found) == ["aten_embedding_default"] and '"last token id"' in found.error, str(found)


class Memory(torch.nn.Module):
    """Writes what the other method reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4, 3))

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        if len(place) > 1:
            self.kept[place] = x.sin().atan()
            return x.cos().erf()
        return (self.kept[place] + x).erf().sin()


@pytest.mark.parametrize(("name", "method"), [("aten_atan_default", "write"), ("aten_add_tensor", "read")])
def test_methods_that_share_state(name: str, method: str) -> None:
    model, x = Memory().eval(), torch.randn(2, 3)
    programs = {
        "write": export(model, (x, torch.tensor([0, 1]))),
        "read": export(model, (x[:1], torch.tensor([0]))),
    }
    found = bisect_here(programs, "reference", backends=planted(name))
    assert names(found) == [name] and found.operators[0].method == method, str(found)
    if method == "write":
        inputs = {"write": [(x.square(), torch.tensor([0, 1]))]}
        wrong = planted("aten_cos_default")
        assert names(bisect_here(programs, "reference", inputs=inputs, backends=wrong)) == ["aten_cos_default"]


def test_state_is_shared_as_emit_shares_it() -> None:
    """What is read is above 0.5 only where the other method wrote it."""
    written, read = (torch.ones(2, 3), torch.tensor([0, 1])), (torch.zeros(1, 3), torch.tensor([0]))
    programs = {"write": export(Memory().eval(), written), "read": export(Memory().eval(), read)}
    partitioner = RuledPartitioner(SupportPartitioner({"reference": executable()}), deny(op="aten.index"))
    inputs = {"write": [written], "read": [read]}
    clamped = planted("aten_add_tensor", operator="clamp.default", args=(None, 0.5))
    assert bisect_here(programs, partitioner, inputs=inputs, backends=clamped).ok
    found = bisect_here(programs, partitioner, inputs=inputs, backends=clamped, share_state=True)
    assert names(found) == ["aten_add_tensor"], str(found)


def test_the_third_call() -> None:
    program = chain(12, {5: torch.atan})
    found = bisect(program, "reference", delegates=[culprit_delegates.ThirdCall])
    assert names(found) == ["aten_atan_default"] and "call 3" in found.error
    assert not bisect(program, "reference", delegates=[culprit_delegates.ThirdCall()]).ok


@pytest.mark.parametrize(
    ("delegate", "kind", "error"),
    [
        (culprit_delegates.Dying, "crashes", "SIGSEGV"),
        (culprit_delegates.Hanging, "hangs", "took more"),
        (culprit_delegates.Failing, "fails", "out of order"),
    ],
)
def test_what_ends_the_process_hangs_or_fails(
    delegate: Any, kind: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bisecting, "PATIENCE", 1.0 if kind == "hangs" else 60.0)
    program = chain(9, {5: torch.atan})
    found = bisect(program, "reference", delegates=[delegate])
    assert names(found) == ["aten_atan_default"] and found.kind == kind and error in found.error, str(found)


def test_a_piece_that_ends_the_process_where_the_whole_is_off() -> None:
    found = bisect(chain(9, {5: torch.atan}), "reference", delegates=[culprit_delegates.Brittle])
    assert names(found)[0] == "aten_atan_default" and found.kind == "off" and len(found.operators) == 4, str(found)


def test_what_leaves_its_process_damaged() -> None:
    found = bisect(chain(9, {5: torch.atan}), "reference", delegates=[culprit_delegates.Damaging])
    assert names(found) == ["aten_atan_default"], str(found)


def test_what_the_host_has_no_kernel_for_is_not_taken_for_the_failure() -> None:
    program = chain(9, {2: lambda x: torch.nextafter(x, x + 1), 5: torch.atan})
    found = bisect_here(program, "reference", delegates=[culprit_delegates.Failing()])
    assert found.where == "backend" and names(found) == ["aten_atan_default", "aten_nextafter_default"], str(found)
    assert "out of order" in found.error


@pytest.mark.skipif(sys.platform != "linux", reason="no other system lists the children of a process")
def test_no_process_is_left() -> None:
    def children() -> int:
        parents = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has ended
                parents.append(stat.read_text().rpartition(")")[2].split()[1])
        return parents.count(str(os.getpid()))

    before = children()
    found = bisect(chain(1, {0: torch.atan}), "reference", delegates=[culprit_delegates.Wrong])
    gc.collect()
    assert names(found) == ["aten_atan_default"] and children() <= before


@pytest.mark.parametrize("apart", [1, 9])
def test_what_goes_wrong_only_together(apart: int) -> None:
    program = chain(20, {8: torch.atan, 8 + apart: torch.erf})
    found = bisect_here(program, "reference", delegates=[culprit_delegates.Fused()])
    between = [] if apart == 1 else [f"aten_sin_default_{number}" for number in range(15, 7, -1)]
    assert names(found) == ["aten_erf_default", *between, "aten_atan_default"], str(found)


def test_a_quantised_operator_with_what_is_around_it() -> None:
    found = bisect_here(
        quantized_models.quantized(False),
        quantized_models.partitioners(False),
        backends={"XnnpackBackend": culprits.Negating("aten_linear_default_1")},
    )
    assert names(found)[0] == "aten_linear_default_1", str(found)
    assert all(name.startswith("quantized_decomposed") for name in names(found)[1:])
    assert names(found)[0] in str(found) and "and 3 more" in str(found) and len(str(found).splitlines()) < 15


class Forgets(Rewrite):
    name, operators, exactness = "forgets", ("aten.atan.default",), "bits"

    def rewrite(self, node: Any, scope: Any) -> Any:
        return node.args[0]


class Mistakes(Rewrite):
    name, operators, exactness = "mistakes", ("aten.atan.default",), "tolerance"

    def rewrite(self, node: Any, scope: Any) -> Any:
        return scope.call("aten.tanh.default", node.args[0])


def test_nothing_wrong_and_wrong_on_the_host() -> None:
    wrong = LoweringOptions(rewrites=[Forgets()])
    found = bisect_here(chain(5, {3: torch.atan}), "reference", options=wrong)
    assert found.where == "host" and not found.ok and not found.operators, str(found)
    assert "is wrong, without any backend too: forward, output 0" in str(found)
    found = bisect_here(chain(5, {3: torch.atan}), "reference", options=LoweringOptions(rewrites=[Mistakes()]))
    assert "aten.atan.default is wrong by itself on the host (aten::tanh.out): blocks.3, File" in found.error
    found = bisect_here(chain(5), "reference")
    assert found.ok and found.lowerings == 1 and not found.operators
    assert "matches eager PyTorch" in str(found) and json.loads(found.to_json())["ok"]


def test_an_error_that_the_host_has_most_of_is_blamed_on_no_backend() -> None:
    """The host's own is 0.9 of what is allowed, and that of the backend 0.3."""
    inputs, wrong = [(torch.full((2, 4), 0.0164),)], LoweringOptions(rewrites=[Forgets()])
    backends = planted("aten_sin_default", operator="mul.Scalar", args=(1.00003,))
    found = bisect_here(chain(3, {0: torch.atan}), "reference", inputs=inputs, backends=backends, options=wrong)
    assert found.where == "host" and found.kind == "off" and "output 0" in found.error, str(found)
    assert bisect_here(chain(3, {0: torch.atan}), "reference", inputs=inputs, backends=backends).ok


class Once(Planted):
    """Wrong in the first lowering only."""

    def preprocess(self, *given: Any, **also: Any) -> Any:
        made = super().preprocess(*given, **also)
        self.names = ()
        return made


def test_what_only_the_first_lowering_does_is_blamed_on_no_operator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    backends = {"reference": Once("aten_sin_default_3", operator="exp.default", args=())}
    found = bisect_here(chain(6), "reference", backends=backends, options=LoweringOptions(progress=True))
    assert found.where == "unsteady" and not found.operators, str(found)
    assert "not when it is lowered or runs again" in " ".join(str(found).split())
    assert "bisect" in capsys.readouterr().err


def test_mistakes_are_named() -> None:
    program = chain(3)
    with pytest.raises(InputError, match="there is no program for 'other'"):
        bisect(program, "reference", inputs={"other": [(torch.ones(2, 4),)]})
    with pytest.raises(InputError, match="call 0 of 'forward'"):
        bisect(program, "reference", inputs=[torch.ones(2, 4)])

    class Refusing(ReferenceBackend):
        def preprocess(self, *given: Any, **also: Any) -> Any:
            raise ValueError("not today")

    with pytest.raises(BackendFailure, match="not today"):
        bisect(program, "reference", backends={"reference": Refusing})


PARTITIONER = """
from exir_lowering.backends.reference import executable
from exir_lowering.partitioners import SupportPartitioner


def make():
    return SupportPartitioner({"wrong": executable()})
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save(chain(12, {4: torch.atan}), "model.pt2")
    torch.save([(torch.zeros(2, 4),), (torch.ones(2, 4),)], "inputs.pt")
    return tmp_path


def test_the_command(shell: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["bisect", "model.pt2", "-p", "reference", "--inputs", "inputs.pt"]
    assert cli.main(command) == 0
    assert "matches eager PyTorch in 2 calls" in capsys.readouterr().out
    for group, plugin in (
        (registry.BACKENDS, culprits.WrongBackend),
        (registry.DELEGATES, culprit_delegates.WrongDelegate),
    ):
        monkeypatch.setitem(registry._registered[group], "wrong", plugin)
    (shell / "mine_of_bisect.py").write_text(PARTITIONER)
    command[2:4] = ["-p", "mine_of_bisect:make"]
    assert cli.main([*command, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["operators"][0]["node"]["name"] == "aten_atan_default" and found["kind"] == "off"
    assert found["version"] == 2 and not found["verification"]["ok"]
