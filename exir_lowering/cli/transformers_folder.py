"""The folder of a transformers model becomes programs: its class, its weights, and inputs by its own conventions."""

from __future__ import annotations

import inspect
import json
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from exir_lowering.cli.models import export
from exir_lowering.cli.output import first_line, say
from exir_lowering.errors import InputError, LoweringError, did_you_mean, explained, few

_TEXT, _CACHE, _SAMPLES = 512, 1024, 160_000
"""Memory is planned for the longest input. Where a model takes longer ones: tokens, a cache of them, ten seconds."""


def export_folder(folder: Path, task: str | None) -> dict[str, ExportedProgram]:
    """Return the methods of the model in a folder; InputError if it, or the task, is none that transformers knows."""
    model = load_folder(folder, task)
    with _explaining(who := repr(str(folder))):
        if model.can_generate() and not model.config.is_encoder_decoder and model.main_input_name == "input_ids":
            return _export_decoder(who, model)
        return {"forward": _export(who, model, *_draw(model))}


def load_folder(folder: Path, task: str | None) -> Any:
    """Return the model in a folder, in float32; InputError if it, or the task, is none that transformers knows."""
    who = repr(str(folder))
    try:
        import transformers
    except ImportError as error:
        raise InputError(f"{who}: the folder of a transformers model needs `pip install transformers`.") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if (folder / "adapter_config.json").is_file():
        raise InputError(f"{who}: it has an adapter, whose file names another model. Merge them first, and save that.")
    with _explaining(who):
        json.loads((folder / "config.json").read_text(), object_hook=_check_named)
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return _load(who, folder, config, _find_class(who, transformers, config, task)).float().eval()


def _explaining(who: str) -> AbstractContextManager[None]:
    def explain(error: Exception) -> InputError:
        return InputError(
            f"{who}: transformers cannot load or export it: {type(error).__name__}: {first_line(error)[:800]}. A "
            "function of yours can make the model and its inputs instead: MODEL.py:FUNCTION."
        )

    return explained(explain, LoweringError)


def _check_named(found: dict[str, Any]) -> dict[str, Any]:
    """Refuse a configuration that names a kernel or a quantiser, which transformers would download or import."""
    for key, value in found.items():
        if key == "quantization_config" and value:
            raise InputError("config.json has quantization_config, expected a model that is not quantised yet.")
        if key.endswith("_implementation") and value not in (None, "eager", "sdpa", "batched_mm", "grouped_mm"):
            raise InputError(f"config.json has {key} = {str(value)[:100]!r}, expected eager or sdpa: remove it.")
    return found


def _find_class(who: str, transformers: Any, config: Any, task: str | None) -> Any:
    """Return the class that the task, or else the configuration, stands for."""
    named = (config.architectures or []) if task is None else [task]
    found = getattr(transformers, named[0], None) if len(named) == 1 and str(named[0]).isidentifier() else None
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    if task is None:
        raise InputError(
            f"{who}: its config.json names {' and '.join(named) or 'no class'}, expected one class of transformers. "
            "Give --task, such as --task text-classification, or a class, such as --task BertModel."
        )
    from transformers.pipelines import PIPELINE_REGISTRY

    known = PIPELINE_REGISTRY.get_supported_tasks()
    if task not in known:
        otherwise = f" Known: {', '.join(known)}; and classes of transformers, such as BertModel."
        raise InputError(f"--task {task!r}: transformers has no such task.{did_you_mean(task, known, otherwise)}")
    return PIPELINE_REGISTRY.check_task(task)[1]["pt"][0]


def _load(who: str, folder: Path, config: Any, kind: Any) -> Any:
    """Return the model with the folder's weights; those that are missing are random, and it is said."""
    if not [*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin")]:
        say(f"Warning: {who} has no weights, only a configuration: the weights are random.", error=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    model, found = kind.from_pretrained(
        folder, config=config, local_files_only=True, trust_remote_code=False, output_loading_info=True
    )
    if missing := sorted(found["missing_keys"]):
        say(f"Warning: {who} has no weights for {few(missing, 3)}: these are random.", error=True)
    return model


def _draw(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return inputs by the model's conventions, and which of their sizes vary."""
    config, main, taken = model.config, model.main_input_name, inspect.signature(model.forward).parameters
    image = getattr(config, "vision_config", config)
    texts = [name for name in ("input_ids", "attention_mask") if main == "input_ids" and name in taken]
    texts += ["decoder_input_ids"] * bool(config.is_encoder_decoder)
    inputs = {name: torch.ones(1, 8, dtype=torch.long) for name in texts}
    if main == "pixel_values" or (image is not config and "pixel_values" in taken):
        size = getattr(image, "image_size", None) or 224
        sides = [size, size] if isinstance(size, int) else size
        inputs["pixel_values"] = torch.randn(1, getattr(image, "num_channels", 3), *sides)
    elif main == "input_features":
        inputs[main] = torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions)
    elif main == "input_values":
        inputs[main] = torch.randn(1, _SAMPLES)
    ends = {name: "decoder_length" if "decoder" in name else "length" for name in texts}
    longest = _longest(model, _TEXT)
    return inputs, {name: {1: Dim(ends[name], min=2, max=longest)} if name in ends else None for name in inputs}


def _longest(model: Any, most: int) -> int:
    """Return how long a text may be."""
    text = model.config.get_text_config()
    return min(most, getattr(text, "max_position_embeddings", getattr(text, "max_target_positions", most)))


def _export(who: str, model: Any, inputs: dict[str, torch.Tensor], shapes: dict[str, Any]) -> ExportedProgram:
    """Export through transformers' exporter, where the installed version has one."""
    model.config.use_cache = False
    sizes = (f"{name} {[*value.shape] if shapes[name] is None else '[1, length]'}" for name, value in inputs.items())
    longest = f", length at most {_longest(model, _TEXT)}" if any(shapes.values()) else ""
    say(f"Note: {who}: {type(model).__name__} with {', '.join(sizes)}{longest}.", error=True)
    try:
        from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter

        exporter: Any = DynamoExporter()
    except ImportError:
        return export(who, model, (), inputs, shapes)
    found = exporter.export(model, inputs, DynamoConfig(dynamic_shapes=shapes))
    return found if isinstance(found, ExportedProgram) else found.program  # by the version of transformers


def _export_decoder(who: str, model: Any) -> dict[str, ExportedProgram]:
    """Return two programs that share a cache: `forward` takes a prompt of any length, `step` a token."""
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    if not hasattr(model.config.get_text_config(), "num_attention_heads"):
        raise InputError(
            f"{who}: {type(model).__name__} has no attention, expected a decoder with a KV cache. Recurrent models are "
            "written with torch's scan, or exported for each length: see docs/guides/recurrent-models.md."
        )
    longest = _longest(model, _CACHE)
    model.generation_config.update(cache_implementation="static")
    cached = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=longest).model.eval()
    about = f"{type(model).__name__} with a cache of {longest} tokens: forward takes a prompt, step one token"
    say(f"Note: {who}: {about}, each with the position at which it begins.", error=True)
    tokens, start = torch.ones(1, 8, dtype=torch.long), torch.tensor([0])
    prompt, token = ({"input_ids": given, "cache_position": start} for given in (tokens, tokens[:, :1]))
    shapes = {"input_ids": {1: Dim("length", min=2, max=longest - 1)}, "cache_position": None}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "While compiling, we found certain side effects")
        return {
            "forward": export(who, cached, (), prompt, shapes, strict=True),
            "step": export(who, cached, (), token, None, strict=True),
        }
