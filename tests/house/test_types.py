"""What a type checker says of calls of the public functions: documented forms pass, others do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="the extra 'lint' is not installed")

ROOT = Path(__file__).parent.parent.parent

BEFORE = """\
from collections.abc import Mapping, Sequence
from typing import Any
from executorch.exir import to_edge
from exir_lowering import ExplainedResult, LoweredMethods, LoweringPlan, Partitioner, buckets, load, lower, plan
from exir_lowering import to_backend, verify
from exir_lowering.backends.xnnpack import xnnpack
from exir_lowering.partitioners import SupportPartitioner, ops
from exir_lowering.plugins import PartitionerLike
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.fx.passes.infra.pass_manager import PassManager

class Typed:
    def partition(self, exported_program: ExportedProgram) -> ExplainedResult: raise NotImplementedError

class Pass(PassBase):
    def call(self, graph_module: GraphModule) -> PassResult: raise NotImplementedError

def change(module: GraphModule) -> None: ...
def takes(node: Node) -> bool: return True

def check(program: ExportedProgram, programs: dict[str, ExportedProgram], mine: Partitioner, like: PartitionerLike,
          several: list[SupportPartitioner], by_name: dict[str, str], typed: Typed) -> None:
"""

RIGHT = """\
lower(program)
lower(to_edge(programs))
lower(program, None)
lower(program, "xnnpack")
lower(program, mine)
lower(program, typed)
lower(program, xnnpack())
lower(program, like)
lower(program, [])
lower(program, [mine, "xnnpack", typed])
lower(program, ("xnnpack", mine))
lower(program, several)
lower(programs, by_name)
lower(programs, {"prefill": "xnnpack", "decode": mine})
lower(programs, {"prefill": ["xnnpack", mine], "decode": None})
lower(programs, {"prefill": (mine, typed), "decode": typed})
lower(programs, SupportPartitioner({"mine": ops("aten.add.Tensor") | takes}), transform_passes=[change, Pass()])
lower(programs, transform_passes=PassManager([change]))
lower(programs, transform_passes={"prefill": [change], "decode": PassManager([change])})
result: LoweredMethods = lower(program, "xnnpack", backends={"mine": object()}, options=None)
result.emit(keep_originals=True, external_weights="weights").save("model.pte")
planned: LoweringPlan = plan(program, ["xnnpack", mine])
plan(program)
plan(programs, {"prefill": "xnnpack"}, transform_passes=(change,))
to_backend(programs, {"prefill": "xnnpack", "decode": [mine]})
to_backend(program, None)
load(b"").run("forward", 3)
verify("model.pte", {"forward": program})
lower(buckets(program, {"seq": [16, 64]}), "xnnpack")
buckets(program, {"batch": [1, 8], "seq": "auto"}, sizes=[{"seq": 9}], pad={"x": 0}, partitioners=mine).choice
"""

WRONG = """\
lower(program, 3)
lower(program, ["xnnpack", 3])
lower(program, {"forward": 3})
lower(program, {3: "xnnpack"})
lower(program, takes)
lower(program, Typed)
lower(program, object())
lower(program, transform_passes=3)
lower(program, transform_passes="fuse")
lower(program, transform_passes=[3])
lower(program, options={"progress": True})
lower(program, "xnnpack", "echo")
lower(3)
lower({"forward": 3})
lower(program).emit(keep_originals="x")
lower(program).emit(external_weights=3)
lower(program).emit().save(3)
plan(3)
plan(program, 3)
load(3)
load("model.pte").run(3)
verify("model.pte", 3)
to_backend(program, 3)
to_backend(program)
buckets(program, {"seq": "all"})
buckets(program, {"seq": "auto"}, sizes={"seq": 9})
SupportPartitioner({"mine": 3})
ops("aten.add.Tensor") | 3
"""


def test_documented_calls_pass_and_others_are_refused(tmp_path: Path) -> None:
    calls = [*RIGHT.splitlines(), *WRONG.splitlines()]
    code = BEFORE + "".join(f"    {call}\n" for call in calls)
    first = BEFORE.count("\n") + 1
    script = tmp_path / "documented_calls.py"
    script.write_text(code)
    # It finds the package, its configuration, and what an earlier run of it has learnt of torch, where it is started.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-pretty", str(script)], cwd=ROOT, capture_output=True, text=True
    )
    assert not done.stderr, done.stderr
    refused = {int(line.split(":")[1]): line for line in done.stdout.splitlines() if f"{script.name}:" in line}
    wrongly = [refused[first + i] for i in range(len(RIGHT.splitlines())) if first + i in refused]
    assert not wrongly, wrongly
    taken = [call for i, call in enumerate(calls) if i >= len(RIGHT.splitlines()) and first + i not in refused]
    assert not taken, taken
    assert min(refused) >= first, refused
