"""Somebody who ships an image classifier: a RegNet on the bytes of a camera."""

import torch
from transformers import RegNetConfig, RegNetForImageClassification

import exir_lowering


class Camera(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.register_buffer("scale", torch.tensor([4.4, 4.5, 4.4]).view(3, 1, 1) / 255)

    def forward(self, image):
        pixels = image.to(torch.float32).permute(0, 3, 1, 2).contiguous()
        return self.model(pixel_values=pixels * self.scale - 2).logits


torch.manual_seed(0)
config = RegNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=8, num_labels=7)
model = Camera(RegNetForImageClassification(config)).eval()
image = torch.randint(0, 256, (1, 64, 64, 3), dtype=torch.uint8)
program = torch.export.export(model, (image,))

plan = exir_lowering.plan(program, "xnnpack")
assert plan.methods[0].coverage > 0.9, plan
artifact = exir_lowering.lower(program, "xnnpack").emit()
assert exir_lowering.verify(artifact, program, [(image,), (255 - image,)]).ok
artifact.save("camera.pte")

loaded = exir_lowering.load("camera.pte")
(logits,) = loaded(image.numpy())
torch.testing.assert_close(logits, model(image), atol=1e-4, rtol=1e-4)
(again,) = loaded.run("forward", image=image)
assert again.equal(logits)
print("class", int(logits.argmax()))
