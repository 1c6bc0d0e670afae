"""Inputs of the classes in exported_classes.py, of several sizes: made for what a forward takes, or written by hand."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor


def _ids(batch: int, length: int, vocabulary: int = 90) -> Tensor:
    return torch.randint(5, min(vocabulary, 90), (batch, length))


def _mask(batch: int, length: int) -> Tensor:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, -2:] = 0
    return mask


def _side(config: Any) -> int:
    for part in (config, getattr(config, "vision_config", None), getattr(config, "image_config", None)):
        size = getattr(part, "image_size", None)
        if size:
            return size if isinstance(size, int) else size[0]
    return 32


def _pixels(batch: int, config: Any, scale: int) -> Tensor:
    side = _side(config) * scale
    return torch.randn(batch, getattr(config, "num_channels", 3), side, side)


def made(name: str, model: Any, batch: int, scale: int) -> dict[str, Any]:
    """Inputs of a model of a class: what is said of it below, or what its forward takes."""
    config, takes = model.config, signature(model.forward).parameters
    special = max((key for key in SPECIAL if name.startswith(key)), key=len, default=None)
    if special is not None:
        return SPECIAL[special](config, batch, scale)
    found: dict[str, Any] = {}
    length = 8 * scale
    if "input_features" in takes:
        found["input_features"] = torch.randn(batch, 16 * scale, config.num_mel_bins)
    elif "input_values" in takes:
        found["input_values"] = torch.randn(batch, 400 * scale)
    elif "pixel_values" in takes:
        found["pixel_values"] = _pixels(batch, config, scale)
    if "input_ids" in takes:
        found["input_ids"] = _ids(batch, length)
        if "attention_mask" in takes:
            found["attention_mask"] = _mask(batch, length)
        if "MultipleChoice" in name:
            found = {key: value.unsqueeze(1).repeat(1, 2, 1) for key, value in found.items()}
    if "decoder_input_ids" in takes:
        found["decoder_input_ids"] = _ids(batch, 6 * scale)
    if "bool_masked_pos" in takes and "MaskedImage" in name:
        patches = (_side(config) * scale // config.patch_size) ** 2
        found["bool_masked_pos"] = torch.rand(batch, patches) < 0.5
    return found


def _video(config: Any, batch: int, scale: int) -> dict[str, Any]:
    side = config.image_size * scale
    return {"pixel_values": torch.randn(batch, config.num_frames, 3, side, side)}


def _detected(config: Any, batch: int, scale: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, 32 * scale, 32 * scale), "input_ids": _ids(batch, 8)}


def _flava(config: Any, batch: int, scale: int) -> dict[str, Any]:
    return {
        "input_ids": _ids(batch, 8 * scale),
        "pixel_values": torch.randn(batch, 3, 32, 32),
        "attention_mask": _mask(batch, 8 * scale),
    }


def _patches(config: Any, batch: int, scale: int) -> dict[str, Any]:
    high, wide = 2, 4 * scale
    return {
        "pixel_values": torch.randn(batch, high * wide, 3 * config.patch_size**2),
        "pixel_attention_mask": torch.ones(batch, high * wide, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[high, wide]] * batch),
    }


def _marked(batch: int, count: int, length: int) -> Tensor:
    """Tokens of a text before and after a picture or a sound, which has a number of tokens."""
    one = torch.full((batch, 1), 92)
    return torch.cat([_ids(batch, 2), one, torch.full((batch, count), 90), one + 1, _ids(batch, length)], 1)


def _picture(batch: int, scale: int, sizes: tuple[int, ...], types: bool = True) -> dict[str, Any]:
    """A text with a picture of four patches of four parts each."""
    ids = _marked(batch, 4, 4 * scale)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(batch * 16, *sizes),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * batch),
        **({"mm_token_type_ids": (ids == 90).int()} if types else {}),
    }


def _sound(batch: int, count: int, length: int, frames: int) -> dict[str, Any]:
    ids = _marked(batch, count, length)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "input_features": torch.randn(batch, 16, frames),
        "input_features_mask": torch.ones(batch, frames, dtype=torch.int64),
    }


SPECIAL: dict[str, Callable[[Any, int, int], dict[str, Any]]] = {
    "Timesformer": _video, "VideoMAE": _video, "Vivit": _video,
    "GroundingDino": _detected, "MMGroundingDino": _detected,
    "Flava": _flava,
    "FlavaImageModel": lambda config, batch, scale: {"pixel_values": torch.randn(batch, 3, 32, 32)},
    "FlavaTextModel": lambda config, batch, scale: {"input_ids": _ids(batch, 8 * scale)},
    "Siglip2": _patches,
    "BigBird": lambda config, batch, scale: {"input_ids": _ids(batch, 32 * scale), "attention_mask": _mask(batch,
        32 * scale)},
    "BigBirdForMultipleChoice": lambda config, batch, scale: {"input_ids": _ids(batch * 2, 32 * scale).unflatten(0,
        (batch, 2))},
    "Splinter": lambda config, batch, scale: {"input_ids": torch.cat([_ids(batch, 7 * scale), torch.full((batch, 1),
        3)], 1)},
    "Wav2Vec2Bert": lambda config, batch, scale: {"input_features": torch.randn(batch, 32 * scale, 24)},
    "UnivNet": lambda config, batch, scale: {
        "input_features": torch.randn(batch, 7 * scale, 16), "noise_sequence": torch.randn(batch, 7 * scale, 8)},
    "PerceiverModel": lambda config, batch, scale: {"inputs": torch.randn(batch, 10 * scale, 32)},
    "PerceiverForSequenceClassification": lambda config, batch, scale: {"inputs": _ids(batch, 10)},
    "PerceiverForOpticalFlow": lambda config, batch, scale: {"inputs": torch.randn(batch, 2, 27, 16, 24)},
    "PerceiverForMultimodalAutoencoding": lambda config, batch, scale: {
        "inputs": {"image": torch.randn(1, 2, 3, 16, 16), "audio": torch.randn(1, 64, 1), "label": torch.zeros(1, 5)},
        "subsampled_output_points": {"image": torch.arange(8), "audio": torch.arange(4), "label": None}},
    "Lfm2Vl": lambda config, batch, scale: {
        "input_ids": torch.cat([_ids(batch, 6 * scale), torch.full((batch, 2 * scale), 90)], 1),
        **_patches(config.vision_config, batch, scale)},
    "Siglip2ForImageClassification": lambda config, batch, scale: _patches(config.vision_config, batch, scale),
    "Whisper": lambda config, batch, scale: {
        "input_features": torch.randn(batch, 16, 64), "decoder_input_ids": _ids(batch, 6 * scale)},
    "WhisperForAudioClassification": lambda config, batch, scale: {"input_features": torch.randn(batch, 16, 64)},
    "AST": lambda config, batch, scale: {"input_values": torch.randn(batch, 32, 16)},
    "Speech2Text": lambda config, batch, scale: {
        "input_features": torch.randn(batch, 32 * scale, 16), "decoder_input_ids": _ids(batch, 6 * scale)},
    "Moonshine": lambda config, batch, scale: {
        "input_values": torch.randn(batch, 3000 * scale), "decoder_input_ids": _ids(batch, 6 * scale)},
    "Encodec": lambda config, batch, scale: {"input_values": torch.randn(batch, 1, 320 * scale)},
    "Dac": lambda config, batch, scale: {"input_values": torch.randn(batch, 1, 320 * scale)},
    "ViTMAE": lambda config, batch, scale: {
        "pixel_values": torch.randn(batch, 3, 32, 32),
        "noise": torch.rand(batch, (config.image_size // config.patch_size) ** 2)},
    "SpeechT5HifiGan": lambda config, batch, scale: {"spectrogram": torch.randn(batch, 12 * scale, 16)},
    "FastSpeech2ConformerHifiGan": lambda config, batch, scale: {"spectrogram": torch.randn(batch, 12 * scale, 16)},
    "Qwen3_5": lambda config, batch, scale: {"input_ids": _ids(batch, 8 * scale), "attention_mask": _mask(batch,
        8 * scale)},
    "Qwen3_5Model": lambda config, batch, scale: _picture(batch, scale, (96,)),
    "Qwen3_5ForConditionalGeneration": lambda config, batch, scale: _picture(batch, scale, (96,)),
    "Qwen3_5MoeModel": lambda config, batch, scale: _picture(batch, scale, (96,)),
    "Qwen3_5MoeForConditionalGeneration": lambda config, batch, scale: _picture(batch, scale, (96,)),
    "PaddleOCRVL": lambda config, batch, scale: _picture(batch, scale, (3, 4, 4)),
    "MuseGlimmer": lambda config, batch, scale: _picture(batch, scale, (48,), types=False),
    "MiniCPMV4_6": lambda config, batch, scale: {
        "input_ids": _marked(batch, 1, 4 * scale), "pixel_values": torch.randn(1, 3, 4, batch * 64),
        "target_sizes": torch.tensor([[4, 4]] * batch, dtype=torch.int32)},
    "Qwen3ASR": lambda config, batch, scale: _sound(batch, 13 * scale, 4, 100 * scale),
    "MusicFlamingo": lambda config, batch, scale: _sound(batch, 4, 4 * scale, 16),
}  # fmt: skip
"""Inputs of the classes that take more than one tensor of a usual name, or of another size."""
