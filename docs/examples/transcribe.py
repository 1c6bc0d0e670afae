"""Transcribes tones with whisper.pte. Each argument is the frequency of one."""

import sys

import torch
import transformers

import exir_lowering


def listen(tone):
    """Return the features of a second of a tone."""
    sound = torch.sin(2 * torch.pi * tone * torch.arange(16000) / 16000).numpy()
    extractor = transformers.WhisperFeatureExtractor(chunk_length=1)
    return extractor(sound, sampling_rate=16000, return_tensors="pt").input_features


program = exir_lowering.load("whisper.pte")
(start,), (end,) = program.run("start"), program.run("end")
for tone in sys.argv[1:]:
    program.run("encode", listen(int(tone)))
    tokens = [start]
    while tokens[-1] != end:
        (logits,) = program.run("decode", torch.tensor([tokens[-1:]]), torch.tensor([len(tokens) - 1]))
        tokens.append(int(logits[0, -1].argmax()))
    print("in the file:", bytes(tokens[1:-1]).decode())
