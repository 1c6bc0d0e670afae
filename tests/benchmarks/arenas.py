"""What memory methods of dynamic sizes get planned: ExecuTorch's, ours, ours with declared sizes, and what is needed.

    python tests/benchmarks/arenas.py [--only NAME...] [--json FILE]

The largest alone is what the same delegates take for one of the largest sizes: the most of several. Of fixed sizes,
XNNPACK takes more operators at once, whose memory is its own and not in any arena. ExecuTorch's C++ Module then runs
the file at the smallest, a middle and the largest sizes, forth and back, with eager's numbers, and has to refuse more.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from latency_models import llama_model
from lowering_models import Cached, Call
from torch import nn
from torch.export import Dim, ExportedProgram, export

from exir_lowering import LoweringOptions, lower, plan

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import device_client
import joint_models

Sizes = tuple[int, ...]

CLIENT = r"""
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <string>
using namespace executorch::extension;
using executorch::aten::ScalarType;

static long peak() {  // getrusage would count that of the process that started this one
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (long size; word == "VmHWM:" && status >> size) return size;
  return 0;
}

// client FILE OUTPUT: a call for each line "TENSORS (l|f RANK SIZES... FILE)..."; prints peaks in KiB, or errors.
int main(int, char** words) {
  Module module(words[1], Module::LoadMode::File);
  if (module.load_method("forward") != executorch::runtime::Error::Ok) return 2;
  std::printf("%ld\n", peak());
  for (int count, rank; std::cin >> count;) {
    std::vector<executorch::runtime::EValue> inputs;
    std::vector<TensorPtr> kept;
    while (count--) {
      std::string type, path;
      std::cin >> type >> rank;
      std::vector<executorch::aten::SizesType> sizes(rank);
      size_t bytes = type == "l" ? 8 : 4;
      for (auto& size : sizes) std::cin >> size, bytes *= size;
      std::cin >> path;
      std::vector<uint8_t> data(bytes);
      std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(data.data()), bytes);
      const auto scalar = type == "l" ? ScalarType::Long : ScalarType::Float;
      kept.push_back(make_tensor_ptr(sizes, std::move(data), {}, {}, scalar));
      inputs.emplace_back(kept.back());
    }
    auto outputs = module.execute("forward", inputs);
    if (!outputs.ok()) {
      std::printf("error %d\n", static_cast<int>(outputs.error()));
    } else {
      const auto& tensor = (*outputs)[0].toTensor();
      std::ofstream(words[2], std::ios::binary).write(tensor.const_data_ptr<char>(), tensor.nbytes());
      std::printf("%ld\n", peak());
    }
    std::fflush(stdout);
  }
}
"""


@dataclass(frozen=True)
class Case:
    """A model, the sizes that it is exported for, and the largest ones that it gets."""

    module: Callable[[], nn.Module]
    inputs: Callable[..., tuple[torch.Tensor, ...]]
    dims: Mapping[str, tuple[int, int]]
    axes: Sequence[Mapping[int, str]]
    largest: Sequence[Sizes]
    run: Sequence[Sizes]  # in C++: smallest, middle, largest; then more than declared
    bounds: Mapping[str, int] = field(default_factory=dict)
    sizes: Sequence[Mapping[str, int]] | None = None
    example: Sizes = ()  # no size of it above one that is measured alone; if there is none, one in the middle

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.module().eval().requires_grad_(False)

    def export(self, at: Sizes | None = None) -> ExportedProgram:
        """Export it for any sizes, or for these."""
        model = self.build()
        if at is not None:
            return export(model, self.inputs(*at))
        dims = {name: Dim(name, min=low, max=high) for name, (low, high) in self.dims.items()}
        shapes = tuple({axis: dims[name] for axis, name in one.items()} for one in self.axes)
        middle = (low + (low + high) // 8 * 2 for low, high in self.dims.values())
        example = self.inputs(*(self.example or middle))
        later = {"prefer_deferred_runtime_asserts_over_guards": True}  # else torch.export refuses to pad to windows
        wrapped = isinstance(model, Call)  # whose inputs are one argument
        return export(model, example, dynamic_shapes=(shapes,) if wrapped else shapes, **later)


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
        max_target_positions=448, max_source_positions=1500, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
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
        ((128, 128), (256, 64)),
        ((32, 32), (100, 60), (128, 128), (1024, 512)),
        bounds={"height*width": 128 * 128},
        example=(48, 56),
    ),
    "text to speech": Case(
        lambda: Call(joint_models.Speech(), lambda m, x: m(x)),
        lambda length: (torch.randint(0, 50, (1, length)),),
        {"length": (2, 400)},
        ({1: "length"},),
        ((400,),),
        ((2,), (100,), (400,), (401,)),
        bounds={"u0": 3200},
    ),
    "Kokoro-like": Case(
        lambda: Call(joint_models.Kokoro(), lambda m, x: m(x)),
        lambda length: (torch.randint(0, 50, (1, length)),),
        {"length": (2, 400)},
        ({1: "length"},),
        ((100,),),
        ((2,), (30,), (100,), (400,)),
        bounds={"length": 100, "u0": 800},
    ),
    "decoder with a cache": Case(
        lambda: Cached(llama_model(), heads=4, width=64, length=256),
        lambda tokens: (torch.randint(0, 8000, (1, tokens)), torch.arange(tokens)),
        {"tokens": (2, 255)},
        ({1: "tokens"}, {0: "tokens"}),
        ((32,),),
        ((2,), (9,), (32,), (255,)),
        bounds={"tokens": 32},
    ),
    "Whisper decoder": Case(
        _whisper,
        lambda batch, tokens, frames: (torch.randint(0, 1000, (batch, tokens)), torch.randn(batch, frames, 64)),
        {"batch": (1, 16), "tokens": (2, 448), "frames": (2, 1500)},
        ({0: "batch", 1: "tokens"}, {0: "batch", 1: "frames"}),
        ((16, 8, 1500), (1, 448, 1500)),
        ((1, 2, 2), (4, 8, 700), (16, 8, 1500), (16, 448, 1500)),
        sizes=[{"batch": 16, "tokens": 8}, {"batch": 1}],
    ),
    "BERT": Case(
        _bert,
        _texts,
        {"batch": (1, 128), "seq": (2, 512)},
        ({0: "batch", 1: "seq"},) * 2,
        ((128, 16), (4, 512)),
        ((1, 2), (16, 60), (128, 16), (128, 512)),
        sizes=[{"batch": 128, "seq": 16}, {"batch": 4, "seq": 512}],
    ),
    "detector": Case(
        lambda: Call(joint_models.Detector(32), lambda m, x: m(x)),
        _image,
        {"height": (32, 4096), "width": (32, 4096)},
        ({2: "height", 3: "width"},),
        ((1024, 1024), (4096, 256)),
        ((32, 32), (500, 700), (1024, 1024), (4096, 1024)),
        bounds={"height*width": 1024 * 1024},
    ),
    "decoder": Case(
        lambda: Call(llama_model(), lambda m, x: m(input_ids=x, use_cache=False).logits),
        lambda batch, tokens: (torch.randint(0, 100, (batch, tokens)),),
        {"batch": (1, 16), "tokens": (2, 512)},
        ({0: "batch", 1: "tokens"},),
        ((16, 32), (1, 512)),
        ((1, 2), (3, 100), (16, 32), (16, 512)),
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
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return type(error).__name__


def _in_cpp(program: ExportedProgram, case: Case, client: Path) -> str:
    """Run the file in C++ forth and back; return by how much the peak resident memory has grown after each size."""
    buffer = lower(program, "xnnpack", options=LoweringOptions(bounds=case.bounds), sizes=case.sizes).emit().buffer
    model, folder = case.build(), client.parent
    (folder / "model.pte").write_bytes(buffer)
    *fitting, beyond = case.run
    command = [client, folder / "model.pte", folder / "output"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdin and process.stdout
        loaded, peaks = int(process.stdout.readline()), []
        for sizes in (*fitting, beyond, *reversed(fitting)):
            inputs, words = case.inputs(*sizes), []
            for number, tensor in enumerate(inputs):
                tensor.numpy().tofile(path := folder / f"input{number}")
                words += ["l" if tensor.dtype == torch.long else "f", tensor.dim(), *tensor.shape, path]
            print(len(inputs), *words, file=process.stdin, flush=True)
            said = process.stdout.readline().strip()
            if sizes == beyond:
                assert said.startswith("error"), f"{sizes} ran"
                continue
            expected = model(*inputs).numpy()
            found = np.fromfile(folder / "output", np.float32).reshape(expected.shape)
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3, err_msg=f"{sizes}")
            peaks.append(int(said) - loaded)
        process.stdin.close()
    return " / ".join(f"{peak * 1024 / 1e6:,.1f}" for peak in peaks[: len(fitting)]) + " MB"


def measure(case: Case, client: Path) -> dict[str, int | str]:
    """Return bytes, or an error, for each column."""
    program = case.export()
    row: dict[str, int | str] = {"upstream": _tried(lambda: _upstream(program))}
    row["ours"] = _tried(lambda: _planned(program))
    row["declared"] = _tried(lambda: _planned(program, case))
    alone = [replace(case, sizes=[dict(zip(case.dims, at, strict=True))]) for at in case.largest]
    row["needed"] = max((_planned(program, one) or 0 for one in alone), default=0) or "-"
    data = replace(case, bounds={name: most for name, most in case.bounds.items() if name == "u0"}, sizes=None)
    row["fixed"] = _tried(lambda: max(_planned(case.export(at), data) or 0 for at in case.largest))
    row["cpp"] = _in_cpp(program, case, client)
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
    client = device_client.build(Path(tempfile.mkdtemp()), CLIENT)
    print("| model | ExecuTorch | ours | ours, declared | the largest alone | ratio | as fixed sizes | C++, grown by |")
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.only:
        rows[name] = row = measure(CASES[name], client)
        numbers = row["declared"], row["needed"]
        ratio = f"{numbers[0] / numbers[1]:.2f}" if all(isinstance(one, int) for one in numbers) else "-"
        *shown, fixed, grown = map(_show, row.values())
        print(f"| {name} | {' | '.join(shown)} | {ratio} | {fixed} | {grown} |", flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
