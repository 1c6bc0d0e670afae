"""Somebody who ships a detector: a YOLOS, whose result has classes and boxes by name."""

import torch
from transformers import YolosConfig, YolosForObjectDetection

import exir_lowering

torch.manual_seed(0)
config = YolosConfig(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    image_size=[64, 64],
    patch_size=16,
    num_detection_tokens=10,
    num_labels=5,
)
model = YolosForObjectDetection(config).eval()
image = torch.rand(1, 3, 64, 64)
program = torch.export.export(model, (), {"pixel_values": image})
print(exir_lowering.plan(program, "xnnpack"))
artifact = exir_lowering.lower(program, "xnnpack").emit()
artifact.save("detector.pte")

out = exir_lowering.load("detector.pte").run("forward", pixel_values=image.numpy())
eager = model(pixel_values=image)
for name in ("logits", "pred_boxes"):
    torch.testing.assert_close(out[name], eager[name], atol=1e-3, rtol=1e-3)
logits, boxes, *_ = out
assert logits is out["logits"] and boxes is out.pred_boxes
best = logits[0, :, :-1].softmax(-1).amax(-1).argmax()
print("box", boxes[0, best].tolist())
