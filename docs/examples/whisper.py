"""Lowers Whisper to whisper.pte: `encode` takes a sound, `decode` a token. Transcribes two tones in PyTorch."""

import torch
import transformers
from torch.export import export

import exir_lowering

START, END, LENGTH = 1, 10, 20  # the first and the last token of a text, and the length of the longest one
TEXTS = {220: "a deep tone\n", 880: "a high tone\n"}


def listen(tone):
    """Return the features of a second of a tone."""
    sound = torch.sin(2 * torch.pi * tone * torch.arange(16000) / 16000).numpy()
    extractor = transformers.WhisperFeatureExtractor(chunk_length=1)  # in seconds: 30 for OpenAI's models
    return extractor(sound, sampling_rate=16000, return_tensors="pt").input_features


def trained():
    """Return a small Whisper that knows two tones, in place of one that is `from_pretrained`."""
    sizes = {"d_model": 96, "encoder_layers": 2, "decoder_layers": 2, "max_source_positions": 50, "vocab_size": 128}
    tokens = {"decoder_start_token_id": START, "bos_token_id": START, "eos_token_id": END, "pad_token_id": 0}
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes, **tokens))
    sounds, texts = torch.cat([*map(listen, TEXTS)]), torch.tensor([list(text.encode()) for text in TEXTS.values()])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(150):
        optimizer.zero_grad()
        model(input_features=sounds, labels=texts).loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


class Transcriber(torch.nn.Module):
    """Whisper, with the keys and values of the text and of the sound in buffers, which are its state."""

    def __init__(self, model):
        super().__init__()
        self.model, self.encoder, self.decoder = model, model.model.encoder, model.model.decoder
        heads, width = model.config.decoder_attention_heads, self.decoder.layers[0].self_attn.head_dim
        self.text = transformers.StaticCache(model.config, LENGTH)
        self.sound = transformers.StaticCache(model.config, self.encoder.max_source_positions)
        for kind, cache in (("text", self.text), ("sound", self.sound)):
            cache.early_initialization(1, heads, width, model.dtype, model.device)
            for number, layer in enumerate(cache.layers):
                for name in ("keys", "values", "cumulative_length"):
                    self.register_buffer(f"{kind}_{name}_{number}", getattr(layer, name))

    def forward(self, features=None, token=None, position=None):
        """Call the method whose arguments are passed: `torch.export` exports `forward`."""
        return self.encode(features) if token is None else self.decode(token, position)

    def encode(self, features):
        """Compute, once for each sound, the keys and values that the layers of the decoder attend to."""
        states = self.encoder(features).last_hidden_state
        for layer, cache in zip(self.decoder.layers, self.sound.layers, strict=True):
            for name, buffer in (("k_proj", cache.keys), ("v_proj", cache.values)):
                projected = getattr(layer.encoder_attn, name)(states)
                buffer.copy_(projected.unflatten(2, (-1, buffer.shape[3])).transpose(1, 2))
        return states

    def decode(self, token, position):
        """Return the logits of the token after this one."""
        cache = transformers.EncoderDecoderCache(self.text, self.sound)
        for number, layer in enumerate(self.text.layers):
            layer.cumulative_length.copy_(position[0])
            cache.is_updated[number] = True  # the keys and values of the sound are in the cache
        states = self.decoder(token, None, torch.empty(1, 0, 0), cache, use_cache=True)  # no states of the encoder
        return self.model.proj_out(states.last_hidden_state)


torch.manual_seed(0)
whisper = Transcriber(trained())
encode = export(whisper, (), {"features": listen(220)}, strict=True)
decode = export(whisper, (), {"token": torch.tensor([[START]]), "position": torch.tensor([0])}, strict=True)
lowered = exir_lowering.lower({"encode": encode, "decode": decode}, "xnnpack")
lowered.emit(constant_methods={"start": START, "end": END}).save("whisper.pte")
print(*(state for state in lowered.report.states if state.shared), sep="\n")
for tone in TEXTS:
    print("in PyTorch:", bytes(whisper.model.generate(listen(tone))[0]).strip(bytes([START, END])).decode())
