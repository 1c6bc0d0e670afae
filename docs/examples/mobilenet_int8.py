"""Quantise MobileNetV2 to int8 with PT2E, find out what that costs, and check the file.

The weights are random, as no package ships trained ones: use your model, and images like those that it will see.
"""

import re
import statistics
from pathlib import Path

import torch
from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

import exir_lowering
from exir_lowering.quantization import LayerError

SIZE = 64


class Classifier(torch.nn.Module):
    """A model of transformers that takes and returns plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MobileNetV2ForImageClassification(MobileNetV2Config(image_size=SIZE, num_labels=10))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.model(pixel_values=image).logits


def stage(layer: LayerError) -> str:
    """Return which part of the network a layer is in."""
    block = re.search(r"\.layer\.(\d+)", layer.path)
    if block is None:
        return "stem" if "stem" in layer.path else "head"
    first = int(block[1]) // 4 * 4
    return f"blocks {first} to {first + 3}"


torch.manual_seed(0)
model = Classifier().eval()
for module in model.modules():  # random filters, but like trained ones they keep the signal and do not amplify errors
    if isinstance(module, torch.nn.Conv2d):
        torch.nn.init.kaiming_normal_(module.weight)
        if module.groups > 1:
            module.weight.data.abs_().mul_(0.5)
images = [(torch.randn(1, 3, SIZE, SIZE),) for _ in range(8)]
program = torch.export.export(model, images[0])

# Ranges come from the first images, the error is measured on the others.
quantised = exir_lowering.quantize(program, images[:4], check=images[4:])
by_stage: dict[str, list[LayerError]] = {}
for layer in quantised.errors.layers:
    by_stage.setdefault(stage(layer), []).append(layer)

print(f"{len(quantised.errors.layers)} layers in int8. Median SQNR against float, and the bytes saved:")
for name in ("stem", "blocks 0 to 3", "blocks 4 to 7", "blocks 8 to 11", "blocks 12 to 15"):
    error = statistics.median(layer.sqnr for layer in by_stage[name])
    saved = sum(layer.extra_bytes for layer in by_stage[name])
    print(f"  {name:16} {error:.0f} dB  {saved / 1000:5.0f} kB")
(output,) = quantised.errors.outputs
print(f"The cosine of the logits and those in float: {output.cosine:.3f}")

for name, version in {"float": program, "int8": quantised.program}.items():
    artifact = exir_lowering.lower(version, "xnnpack").emit()
    path = Path(f"mobilenet_{name}.pte")
    artifact.save(path)
    found = exir_lowering.verify(artifact, version)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {'matches eager PyTorch' if found.ok else found}")
