"""Somebody who ships a speech encoder: a HuBERT on sound of any length up to a second."""

import torch
from transformers import HubertConfig, HubertForCTC

import exir_lowering

torch.manual_seed(0)
config = HubertConfig(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    conv_dim=(16, 16, 16),
    conv_stride=(5, 4, 4),
    conv_kernel=(10, 8, 4),
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=4,
    feat_extract_norm="layer",
    do_stable_layer_norm=True,
    vocab_size=28,
)
model = HubertForCTC(config).eval()
sound = torch.randn(1, 4000)
samples = 80 * torch.export.Dim("frames", min=20, max=200)  # as torch.export asked for
program = torch.export.export(model, (), {"input_values": sound}, dynamic_shapes={"input_values": {1: samples}})
exir_lowering.lower(program, "xnnpack").emit().save("speech.pte")

loaded = exir_lowering.load("speech.pte")
for size in (1600, 4080, 16000):
    sound = torch.randn(1, size)
    out = loaded.run("forward", input_values=sound.numpy())
    torch.testing.assert_close(out["logits"], model(sound).logits, atol=1e-3, rtol=1e-3)
print("letters", out["logits"].shape[1])
