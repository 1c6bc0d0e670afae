"""Lower a model for tinyvec, save the file, load it, execute it, and compare with eager PyTorch."""

import torch

from exir_lowering import load, lower

model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).eval()
program = torch.export.export(model, (torch.ones(2, 8),))
torch.export.save(program, "model.pt2")  # for `exir-lower lower model.pt2 -p tinyvec -o model.pte`

lowered = lower(program, "tinyvec")
print(lowered.report)
lowered.emit().save("demo.pte")

x = torch.randn(2, 8)
(got,) = load("demo.pte").run("forward", x)
torch.testing.assert_close(got, model(x))
print("equal to eager PyTorch")
