"""Random programs as people write them: layers, views, writes in place, branches, all kinds of inputs and outputs."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import random_operators
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export

Pool = list[Any]


class Random(nn.Module):
    """Runs random steps over a pool of tensors; each step has a seed of its own, so that any can be left out."""

    def __init__(self, seed: int, steps: Sequence[int], training: bool, first: Random | None = None) -> None:
        super().__init__()
        self.used: list[str] = []
        self.possible: dict[int, int] = {}
        self.found = None if first is None else first.possible
        torch.manual_seed(seed)
        self.seed, self.steps = seed, list(steps)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.vector = nn.Parameter(torch.randn(4))
        self.tied = self.weight
        self.small = nn.Parameter(torch.randn(4, 4, dtype=torch.float16))
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("kept", torch.randn(4, 4))
        # Writes into buffers that share memory cannot be exported.
        self.register_buffer("view_of_kept", self.kept.t() if seed % 16 == 0 else self.kept.t().clone())
        self.register_buffer("temporary", torch.arange(4), persistent=False)
        self.plain = torch.randn(4)
        self.layers = nn.ModuleDict(
            {name: layer for name, layer in _layers().items() if first is None or name in first.used}
        )
        self.train(training)

    def forward(self, *inputs: Any) -> Any:
        flat = list(torch.utils._pytree.tree_leaves(inputs))
        pool: Pool = [x for x in flat if isinstance(x, torch.Tensor)]
        for step in self.steps:
            pool += self._step(step, list(pool))
        return self._results(random.Random(f"{self.seed} results"), pool, flat)

    def layer(self, name: str) -> nn.Module:
        """Return a layer; the first run finds out which ones are needed."""
        self.used.append(name)
        return self.layers[name]

    def _step(self, step: int, pool: Pool) -> Pool:
        """Take a step. The first run tries operators until one can be called; later ones do what was possible."""
        if self.found is not None:
            return self._try(step, self.found[step], pool) if step in self.found else []
        for attempt in range(8):
            try:
                made = self._try(step, attempt, [value.clone() for value in pool])
            except Exception:
                continue
            if sum(value.numel() for value in made) < 5000:
                self.possible[step] = attempt
                return self._try(step, attempt, pool)
        return []

    def _try(self, step: int, attempt: int, pool: Pool) -> Pool:
        random_ = random.Random(f"{self.seed} {step} {attempt}")
        # Later values are taken more often, which makes longer chains.
        operands = [pool[max(random_.randrange(len(pool)), random_.randrange(len(pool)))] for _ in range(3)]
        made = random_.choice(random_operators.ALL)(random_, operands, self)
        return [m for m in (made if isinstance(made, (list, tuple)) else [made]) if isinstance(m, torch.Tensor)]

    def _results(self, random_: random.Random, pool: Pool, inputs: list[Any]) -> Any:
        last = pool[-random_.randint(1, 4) :]
        kind = random_.randrange(8)
        if kind == 0:
            return {"a": last, "b": (pool[0], None), "c": 3}
        if kind == 1:
            return (*last, last[-1])
        if kind == 2:
            return (*last, inputs[0], self.vector, self.count)
        if kind == 3:
            return [last[-1], (last[0].shape[0] if last[0].dim() else 1), None]
        if kind == 4:
            return last[-1]
        return tuple(last)


def _layers() -> dict[str, nn.Module]:
    return {
        "linear": nn.Linear(4, 4),
        "no_bias": nn.Linear(4, 4, bias=False),
        "conv1": nn.Conv1d(4, 4, 3, padding=1),
        "conv2": nn.Conv2d(4, 4, 3, padding=1, groups=2),
        "deconv": nn.ConvTranspose2d(4, 4, 2, stride=2),
        "norm1": nn.BatchNorm1d(4),
        "norm2": nn.BatchNorm2d(4),
        "layer_norm": nn.LayerNorm(4),
        "group_norm": nn.GroupNorm(2, 4),
        "instance": nn.InstanceNorm2d(4, affine=True),
        "rms": nn.RMSNorm(4),
        "lstm": nn.LSTM(4, 4, batch_first=True, bidirectional=True, num_layers=2, dropout=0.3),
        "gru": nn.GRU(4, 4, batch_first=True),
        "rnn": nn.RNN(4, 4, batch_first=True),
        "cell": nn.LSTMCell(4, 4),
        "embedding": nn.Embedding(10, 4, padding_idx=0),
        "attention": nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.1),
        "encoder": nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=True),
        "dropout": nn.Dropout(0.5),
        "dropout2": nn.Dropout2d(0.5),
        "prelu": nn.PReLU(4),
        "bilinear": nn.Bilinear(4, 4, 4),
    }


INPUTS: Sequence[Callable[[], tuple[Any, ...]]] = (
    lambda: (torch.randn(4, 4), torch.randn(4, 4)),
    lambda: (torch.randn(2, 4, 4), torch.randn(4)),
    lambda: (torch.randn(2, 4, 4, 4), torch.randn(1, 4, 1, 1)),
    lambda: (torch.randn(4, 4).t(), torch.randint(0, 5, (4,))),
    lambda: (torch.randn(2, 4, 4, 4).to(memory_format=torch.channels_last), torch.randn(2, 4, 4, 4)),
    lambda: (torch.randint(0, 9, (4, 4)), torch.randn(4, 4, dtype=torch.float16), torch.randn(())),
    lambda: ((torch.randn(4, 4), {"key": torch.randn(4, 4) > 0}), torch.randn(4)),
    lambda: (torch.randn(4, 4), torch.randn(0, 4), torch.tensor(2)),
    lambda: (torch.randn(3, 4), 3, torch.randn(4)),
    lambda: (torch.randn(3, 4, 4), [torch.randn(3, 4), torch.randn(3, 4)], 0.5),
    lambda: (torch.randn(4, 4), torch.randn(4, 4, dtype=torch.float64), torch.randint(0, 3, (4,), dtype=torch.int32)),
    lambda: (torch.randn(6, 4)[1:5], torch.randn(4, 8)[:, ::2]),
)


def make(seed: int, steps: Sequence[int] | None = None) -> tuple[str, ExportedProgram]:
    """Make the program of a seed, with all of its steps or some."""
    random_ = random.Random(seed)
    torch.manual_seed(seed)
    inputs = random_.choice(INPUTS)()
    steps = range(random_.randint(1, 12)) if steps is None else steps
    training, dynamic = random_.random() < 0.2, random_.random() < 0.25
    module = Random(seed, steps, training)
    with torch.no_grad():
        module(*copy.deepcopy(inputs))
    module = Random(seed, steps, training, module)
    shapes = _dynamic(random_, inputs) if dynamic else None
    if random_.random() < 0.3:
        with torch.no_grad():
            program = export(module, (*inputs,), dynamic_shapes=shapes, strict=False)
    else:
        program = export(module, (*inputs,), dynamic_shapes=shapes, strict=False)
    return f"{len(program.graph.nodes)} nodes{' training' * training}{' dynamic' * dynamic}", program


def _dynamic(random_: random.Random, inputs: tuple[Any, ...]) -> Any:
    """Make the first axis of all tensors that have the size of the first one's dynamic, and perhaps another one."""
    rows, columns = Dim.AUTO, (Dim.AUTO if random_.random() < 0.5 else None)

    def axes(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return None
        found = {0: rows} if value.shape[0] > 1 else {}
        if columns is not None and value.dim() > 2:
            found[value.dim() - 1] = columns
        return found

    return (torch.utils._pytree.tree_map(axes, inputs),)  # one starred argument
