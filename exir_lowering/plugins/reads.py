"""Names for the parts of a partition that a backend may declare that it does not read.

Apart from the contract of backends, as checks of payloads need it where there is no compiler.
"""

from __future__ import annotations

NAMES = "names"
"""In `unread`: the names of nodes, inputs and weights, also those in `node.meta`."""

PROVENANCE = frozenset(
    {
        NAMES, "desc", "from_node", "nn_module_stack", "original_aten", "seq_nr", "source_fn_stack", "stack_trace",
        "torch_fn",
    }
)  # fmt: skip
"""For `unread`: the names, and what says which code of the model a node comes from."""
