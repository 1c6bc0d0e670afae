"""The models that the tests of both engines run."""

import torch
from lowering_support import TagPartitioner, by_operator
from torch import nn
from torch.export import Dim, export

BATCH = Dim("batch", min=1, max=8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.linear = nn.Linear(4, 5)

    def forward(self, x):
        return self.linear(torch.relu(self.conv(x)).mean((2, 3)))


class Count(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        self.total.add_(x)
        return self.total * 2


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, index):
        return self.table(index + 1) * 2


class Scaled(nn.Module):
    def forward(self, x, factor, flag, other):
        return x * factor if flag else x


class AddSin(nn.Module):
    def forward(self, x, y):
        return torch.sin(x + y)


class Apart(nn.Module):
    def forward(self, x, y):
        return torch.sin(torch.sin(x + y) + y)


def dynamic_net():
    torch.manual_seed(0)
    net = Net().eval()
    batch = Dim("batch", min=1, max=6)
    return net, export(net, (torch.randn(2, 3, 8, 8),), dynamic_shapes={"x": {0: batch}})


def count():
    return export(Count(), (torch.ones(3),))


def program_of(module, *inputs, batch=False):
    shapes = tuple({0: BATCH} for _ in inputs) if batch else None
    return export(module.eval(), inputs, dynamic_shapes=shapes)


def sums(*names, **options):
    return TagPartitioner(by_operator(*(names or ("aten.add.Tensor",))), "script", **options)
