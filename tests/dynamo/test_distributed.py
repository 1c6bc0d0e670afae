"""Two processes that train one model: DistributedDataParallel, whose buckets torch.compile compiles one by one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked

TRAINING = """
import sys
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from exir_lowering.dynamo import reports

def train(rank, frozen, backend, **options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [nn.Linear(8, 600), nn.BatchNorm1d(600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 600)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(600, 8))
    model[3].requires_grad_(not frozen)
    compiled = torch.compile(model, backend=backend, **options) if backend else model
    parallel = DistributedDataParallel(compiled, bucket_cap_mb=1)
    steps = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    torch.manual_seed(rank)
    losses = []
    for step in range(6):
        parallel.train(step not in (2, 5))
        with torch.set_grad_enabled(parallel.training):
            loss = parallel(torch.randn(4, 8)).pow(2).mean()
        losses.append(loss.detach())
        if parallel.training:
            loss.backward()
            steps.step()
            steps.zero_grad()
    return losses, [weight.detach().clone() for weight in model.state_dict().values()]

rank, folder = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
for frozen in (False, True):
    expected = train(rank, frozen, None)
    for partitioner in ("xnnpack", "reference", None):
        found = train(rank, frozen, "exir_lowering", options={"partitioners": partitioner, "fallback": None})
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        graphs = reports()
        assert len(graphs) >= 2 and {report.backend for report in graphs} == {"exir_lowering"}, graphs
        if partitioner == "reference":
            assert all(method.partitions for report in graphs for _, one in report.reports for method in one.methods)
distributed.destroy_process_group()
print("the same")
"""


def test_two_processes_with_several_buckets(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(forked.run, TRAINING, rank, tmp_path, timeout=240) for rank in (0, 1)]
        for run in runs:
            assert run.result().stdout == "the same\n", run.result().stderr[-3000:]
