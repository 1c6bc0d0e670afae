"""One first lowering in a fresh process: `python tests/benchmarks/lowering_child.py ENGINE MODEL`.

Prints the CPU seconds of the imports and of the lowering; building and exporting the model is in neither.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
warnings.simplefilter("ignore")
engine, model = sys.argv[1:]

# As a script of a user would import it.
if engine == "executorch":
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
else:
    import exir_lowering

    lower, options = exir_lowering.lower, exir_lowering.LoweringOptions
    without = options(fast=False) if engine == "plain" else None
imported = time.process_time()

from lowering_models import export_model  # noqa: E402

program, _ = export_model(model)

start = time.process_time()
if engine == "executorch":
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    buffer = lowered.to_executorch().buffer
else:
    buffer = lower(program, "xnnpack", options=without).emit().buffer
end = time.process_time()
print(json.dumps({"imports": imported, "lowering": end - start, "total": imported + end - start}))
