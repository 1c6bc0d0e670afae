"""Lowers one base model with two LoRA adapters: base.ptd has the base, a small .pte for each adapter has the rest."""

import copy
from pathlib import Path

import torch
from torch.export import Dim, export

import exir_lowering

WIDTH, WORDS, RANK = 256, 500, 4


class Block(torch.nn.Module):
    """Attention and a feed-forward layer, as in a transformer."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.feed = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.SiLU(), torch.nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        """Return the next hidden states."""
        heads = (layer(x).unflatten(2, (4, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attended = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.feed(self.norm(x))


class LoRA(torch.nn.Module):
    """A linear layer, and a product of two thin matrices which is added to it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, RANK, bias=False)
        self.up = torch.nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x):
        """Return what both compute."""
        return self.base(x) + self.up(self.down(x))


def adapted(base, seed):
    """Return the base with an adapter of random weights, in place of one that was trained."""
    torch.manual_seed(seed)
    model = copy.deepcopy(base, {id(weight): weight for weight in base.parameters()})  # the weights are not copied
    for block in model[1:-1]:
        block.query, block.value = LoRA(block.query), LoRA(block.value)
    return model


torch.manual_seed(0)
base = torch.nn.Sequential(torch.nn.Embedding(WORDS, WIDTH), Block(), torch.nn.Linear(WIDTH, WORDS)).eval()
models = {"plain": base, "first": adapted(base, 1), "second": adapted(base, 2)}
tokens = torch.arange(0, 90, 10).unsqueeze(0)
length = ({1: Dim("length", min=2, max=64)},)
programs = {name: export(model, (tokens,), dynamic_shapes=length) for name, model in models.items()}
lowered = {name: exir_lowering.lower(program, "xnnpack") for name, program in programs.items()}

# What the base has goes into base.ptd. A weight's key is its name, or a digest of its content where XNNPACK has it.
keys = set()
lowered["plain"].emit(external_weights=lambda key, size: keys.add(key))  # which puts it nowhere else
contents = set()
for name in models:
    artifact = lowered[name].emit(external_weights=lambda key, size: "base" if key in keys else None)
    artifact.save(f"{name}.pte")  # and base.ptd
    contents.add(artifact.data_files["base.ptd"])
print("different contents of base.ptd:", len(contents))
for path in ("base.ptd", *(f"{name}.pte" for name in models)):
    print(f"{path:10} {Path(path).stat().st_size / 1e6:.2f} MB")

for name, model in models.items():
    (got,) = exir_lowering.load(f"{name}.pte", data="base.ptd").run("forward", tokens)
    torch.testing.assert_close(got, model(tokens), atol=1e-4, rtol=1e-4)
    print(name, "is as in PyTorch")
