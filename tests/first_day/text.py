"""Somebody who ships a text classifier: an Electra of dynamic length, by name, in float and with weights of 8 bits."""

import numpy
import torch
from transformers import ElectraConfig, ElectraForSequenceClassification

import exir_lowering

torch.manual_seed(0)
config = ElectraConfig(
    vocab_size=300, embedding_size=16, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
)
model = ElectraForSequenceClassification(config).eval()
example = {"input_ids": torch.randint(0, 300, (1, 12)), "attention_mask": torch.ones(1, 12, dtype=torch.long)}
length = torch.export.Dim("length", min=2, max=48)
sizes = {"input_ids": {1: length}, "attention_mask": {1: length}}
program = torch.export.export(model, (), example, dynamic_shapes=sizes)

exir_lowering.lower(program, "xnnpack").emit().save("text.pte")
loaded = exir_lowering.load("text.pte")
for size in (2, 31, 48):
    ids, mask = numpy.arange(size)[None], numpy.ones((1, size), dtype=numpy.int64)
    out = loaded.run("forward", input_ids=ids, attention_mask=mask)
    eager = model(torch.from_numpy(ids), torch.from_numpy(mask)).logits
    torch.testing.assert_close(out["logits"], eager, atol=1e-4, rtol=1e-4)
    assert out.logits is out["logits"]

quantised = exir_lowering.quantize(program, [((), example)], dynamic=True)
small = exir_lowering.lower(quantised.program, "xnnpack").emit()
out = exir_lowering.load(small.buffer).run("forward", **example)
torch.testing.assert_close(out["logits"], model(**example).logits, atol=0.05, rtol=0.05)
print("label", int(out["logits"].argmax()))
