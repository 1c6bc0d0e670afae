"""Train a classifier under torch.compile(backend="exir_lowering"), and compare each step with eager PyTorch."""

import copy
from collections.abc import Callable

import torch

from exir_lowering.dynamo import reports

STEPS = 40


def spirals(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points on two spirals, and which of the two each of them is on."""
    radius = torch.rand(count) * 2 + 0.25
    label = torch.arange(count) % 2
    angle = (radius + label) * torch.pi
    return torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=1), label


def train(parameters: list[torch.nn.Parameter], call: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    """Return the loss of each step."""
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(call(points), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
points, label = spirals(128)
model = torch.nn.Sequential(
    torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)
)
eager, initial = copy.deepcopy(model), copy.deepcopy(model)

# "reference" stands for your partitioner. Without a fallback, a graph that cannot be compiled is an error.
options = {"partitioners": "reference", "fallback": None}
compiled = torch.compile(model, backend="exir_lowering", options=options)
losses = train(list(model.parameters()), compiled)
expected = train(list(eager.parameters()), eager)

((_, report),) = reports()[-1].reports
for method in report.methods:
    print(f"{method.name}: {method.delegated} of {len(method.nodes)} operators delegated")
for step in (1, 20, 40):
    print(f"step {step}: loss {losses[step - 1]:.2f}, in eager PyTorch {expected[step - 1]:.2f}")

torch.testing.assert_close(losses, expected, rtol=0, atol=1e-3)
for trained, right, before in zip(model.parameters(), eager.parameters(), initial.parameters(), strict=True):
    torch.testing.assert_close(trained, right, rtol=0, atol=1e-3)
    if torch.equal(trained, before):
        raise SystemExit("These weights have not changed.")
print("all weights have changed; losses and weights are those of eager PyTorch")
with torch.no_grad():
    right = (compiled(points).argmax(dim=1) == label).sum().item()
print(f"{right} of {len(points)} points on the right spiral")
