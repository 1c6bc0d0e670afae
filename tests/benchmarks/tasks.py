"""What a worker costs: eight partitions of a second, and partitions that take no time, alone, by jobs, and on Dask.

python tests/benchmarks/tasks.py [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))


def measure(layers: int, seconds: float, width: int = 8, **options: Any) -> dict[str, float]:
    """Lower layers that take so many seconds each; return the seconds of the step and this process's CPU time."""
    from parallel_backends import Sleeping, chain, each_layer

    from exir_lowering import LoweringOptions, lower

    program, partitioner = chain(layers, width), each_layer("sleeping", seconds=seconds)
    before = time.process_time()
    done = lower(program, partitioner, backends={"sleeping": Sleeping}, options=LoweringOptions(**options))
    return {"preprocess_s": done.report.seconds["preprocess"], "cpu_s": time.process_time() - before}


def compare(**options: Any) -> dict[str, dict[str, float]]:
    """Measure a way of lowering, the start of its workers first."""
    return {
        "start": measure(4, 0, **options),
        "8 x 1 s": measure(8, 1, **options),
        "64 x 0 s": min((measure(64, 0, **options) for _ in range(3)), key=lambda found: found["preprocess_s"]),
        "8 x 16 MB": min((measure(8, 0, 2000, **options) for _ in range(3)), key=lambda found: found["preprocess_s"]),
    }


def main() -> None:
    """Measure, and print."""
    from distributed import Client, LocalCluster

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--workers", type=int, default=4, help="of the Dask cluster")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found = {"jobs=1": compare(), "jobs=4": compare(jobs=4)}
    with (
        LocalCluster(n_workers=given.workers, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        found[f"Dask, {given.workers}"] = compare(executor=client.get_executor())
    if given.json:
        print(json.dumps(found))
        return
    for way, cases in found.items():
        for case, numbers in cases.items():
            print(f"{way:16} {case:10} {numbers['preprocess_s']:8.3f} s   CPU {numbers['cpu_s']:6.3f} s")


if __name__ == "__main__":
    main()
