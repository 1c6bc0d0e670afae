"""What memory methods of dynamic sizes get planned: upstream's, ours, ours with declared sizes, and what is needed.

    PYTHONPATH=tests/support:tests/benchmarks python tests/benchmarks/arenas.py [--only NAME] [--json FILE]

The largest alone is what the same delegates take for one of the largest sizes: the most of several. Of fixed sizes,
XNNPACK takes more operators at once, whose memory is its own and not in any arena.
"""

from __future__ import annotations

import argparse
import gc
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import joint_models
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from latency_models import llama_model
from lowering_models import Call
from torch import nn
from torch.export import Dim, ExportedProgram, export

from exir_lowering import LoweringOptions, plan

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A model, the sizes that it is exported for, and the largest ones that it gets."""

    module: Callable[[], nn.Module]
    inputs: Callable[..., tuple[torch.Tensor, ...]]
    dims: Mapping[str, tuple[int, int]]
    axes: Sequence[Mapping[int, str]]
    largest: Sequence[Sizes]
    bounds: Mapping[str, int] = field(default_factory=dict)
    sizes: Sequence[Mapping[str, int]] | None = None

    def export(self, at: Sizes | None = None) -> ExportedProgram:
        """Export it for any sizes, or for these."""
        torch.manual_seed(0)
        model = self.module().eval()
        if at is not None:
            return export(model, self.inputs(*at))
        dims = {name: Dim(name, min=low, max=high) for name, (low, high) in self.dims.items()}
        shapes = tuple({axis: dims[name] for axis, name in one.items()} for one in self.axes)
        example = self.inputs(*((low + high) // 8 * 2 + low for low, high in self.dims.values()))
        later = {"prefer_deferred_runtime_asserts_over_guards": True}  # else torch.export refuses to pad to windows
        return export(model, example, dynamic_shapes=(shapes,), **later)


def _image(height: int, width: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(1, 3, height, width),)


def _texts(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    return torch.randint(1, 100, (batch, length)), torch.ones(batch, length, dtype=torch.long)


def _swin2sr() -> nn.Module:
    from transformers import Swin2SRConfig, Swin2SRForImageSuperResolution

    config = Swin2SRConfig(
        image_size=64, embed_dim=24, depths=[2, 2], num_heads=[2, 2], window_size=8, upscale=2, mlp_ratio=2.0
    )
    return Call(Swin2SRForImageSuperResolution(config), lambda m, x: m(pixel_values=x).reconstruction)


def _whisper() -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperDecoder

    config = WhisperConfig(
        vocab_size=1000, d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=256,
        max_target_positions=448, max_source_positions=1500,
    )  # fmt: skip
    return Call(
        WhisperDecoder(config),
        lambda m, x, heard: m(input_ids=x, encoder_hidden_states=heard, use_cache=False).last_hidden_state,
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256
    )
    return Call(BertModel(config), lambda m, x, k: m(input_ids=x, attention_mask=k).last_hidden_state)


CASES = {
    "Swin2SR": Case(
        _swin2sr,
        _image,
        {"height": (32, 1024), "width": (32, 1024)},
        ({2: "height", 3: "width"},),
        ((128, 128), (512, 32)),
        bounds={"height*width": 128 * 128},
    ),
    "text to speech": Case(
        lambda: Call(joint_models.Speech(), lambda m, x: m(x)),
        lambda length: (torch.randint(0, 50, (1, length)),),
        {"length": (2, 400)},
        ({1: "length"},),
        (),
        bounds={"u0": 3200},
    ),
    "Whisper decoder": Case(
        _whisper,
        lambda batch, tokens, frames: (torch.randint(0, 1000, (batch, tokens)), torch.randn(batch, frames, 64)),
        {"batch": (1, 16), "tokens": (2, 448), "frames": (2, 1500)},
        ({0: "batch", 1: "tokens"}, {0: "batch", 1: "frames"}),
        ((16, 8, 1500), (1, 448, 1500)),
        sizes=[{"batch": 16, "tokens": 8}, {"batch": 1}],
    ),
    "BERT": Case(
        _bert,
        _texts,
        {"batch": (1, 128), "seq": (2, 512)},
        ({0: "batch", 1: "seq"},) * 2,
        ((128, 16), (4, 512)),
        sizes=[{"batch": 128, "seq": 16}, {"batch": 4, "seq": 512}],
    ),
    "detector": Case(
        lambda: Call(joint_models.Detector(32), lambda m, x: m(x)),
        _image,
        {"height": (32, 4096), "width": (32, 4096)},
        ({2: "height", 3: "width"},),
        ((1024, 1024), (4096, 256)),
        bounds={"height*width": 1024 * 1024},
    ),
    "decoder": Case(
        lambda: Call(llama_model(), lambda m, x: m(input_ids=x, use_cache=False).logits),
        lambda batch, tokens: (torch.randint(0, 100, (batch, tokens)),),
        {"batch": (1, 16), "tokens": (2, 512)},
        ({0: "batch", 1: "tokens"},),
        ((16, 32), (1, 512)),
        sizes=[{"batch": 16, "tokens": 32}, {"batch": 1, "tokens": 512}],
    ),
}


def _planned(program: ExportedProgram, case: Case | None = None) -> int | None:
    options, sizes = (LoweringOptions(bounds=case.bounds), case.sizes) if case else (None, None)
    memory = plan(program, "xnnpack", options=options, sizes=sizes).methods[0].memory
    return None if memory is None else memory.bytes


def _upstream(program: ExportedProgram) -> int:
    manager = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
    return sum(manager.executorch_program.execution_plan[0].non_const_buffer_sizes)


def _tried(call: Callable[[], int | None]) -> int | str:
    try:
        return call() or "no plan"
    except MemoryError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"


def measure(case: Case) -> dict[str, int | str]:
    """Return bytes, or an error, for each column."""
    program = case.export()
    row: dict[str, int | str] = {"upstream": _tried(lambda: _upstream(program))}
    row["ours"] = _tried(lambda: _planned(program))
    row["declared"] = _tried(lambda: _planned(program, case))
    alone = [replace(case, bounds={}, sizes=[dict(zip(case.dims, at, strict=True))]) for at in case.largest]
    row["needed"] = max((_planned(program, one) or 0 for one in alone), default=0) or "-"
    row["fixed"] = max((_planned(case.export(at)) or 0 for at in case.largest), default=0) or "-"
    gc.collect()
    return row


def _show(value: int | str) -> str:
    return value if isinstance(value, str) else f"{value / 1e6:,.1f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = {}
    print("| model | ExecuTorch | ours | ours, declared | the largest alone | declared / alone | as fixed sizes |")
    print("|---|---|---|---|---|---|---|")
    for name in arguments.only:
        rows[name] = row = measure(CASES[name])
        numbers = row["declared"], row["needed"]
        ratio = f"{numbers[0] / numbers[1]:.2f}" if all(isinstance(one, int) for one in numbers) else "-"
        *shown, fixed = map(_show, row.values())
        print(f"| {name} | {' | '.join(shown)} | {ratio} | {fixed} |", flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
