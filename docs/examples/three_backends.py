"""Lower a model for three backends in one file: XNNPACK, OpenVINO, and a backend in Python for what both leave."""

import torch

import exir_lowering


class Compass(torch.nn.Module):
    """A model with operators that XNNPACK does not take, and one that OpenVINO does not take either."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 16, 3, stride=2)
        self.norm = torch.nn.GroupNorm(4, 16)
        self.head = torch.nn.Linear(16, 2)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the angle of each image."""
        features = torch.relu(self.norm(self.conv(image)))
        sine_cosine = self.head(features.mean((2, 3)))
        return torch.atan2(sine_cosine[:, :1], sine_cosine[:, 1:])


def show(plan: exir_lowering.LoweringPlan) -> None:
    """Print the partitions of the only method, and what is in them."""
    (method,) = plan.methods
    for partition in method.partitions:
        operators = (name.removeprefix("aten.").partition(".")[0] for name in partition.operators)
        print(f"  {partition.backend_id}: {', '.join(operators)}")
    for node in method.host:
        print(f"  no backend: {node.operator}: {node.reason}")


torch.manual_seed(0)
model = Compass().eval()
image = torch.randn(1, 1, 28, 28)
program = torch.export.export(model, (image,))

# The first backend of a list takes what it can, the next ones what is left. A plan calls no backend.
for order in (["xnnpack", "openvino", "reference"], ["openvino", "xnnpack", "reference"], ["xnnpack", "openvino"]):
    print(", ".join(order))
    show(exir_lowering.plan(program, order))

exir_lowering.lower(program, ["xnnpack", "openvino", "reference"]).emit().save("compass.pte")
loaded = exir_lowering.load("compass.pte")

# On a processor with bfloat16, OpenVINO computes with two to three digits.
found = exir_lowering.verify("compass.pte", program, tolerance=0.02)
print("as in eager PyTorch, to two digits" if found.ok else found)
(angle,) = loaded.run("forward", image)
torch.testing.assert_close(angle, model(image), rtol=0, atol=0.02)
