"""The ways in which transformers takes a backend to generate with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from compile_support import clean
from torch._dynamo import register_backend
from transformers import CompileConfig

from exir_lowering.dynamo import backend, reports

__all__ = ["clean"]

OPTIONS = {"partitioners": "reference", "fallback": None}


@register_backend(name="own_of_test_hugging_face")
def _own(module: torch.fx.GraphModule, inputs: list[Any], mode: str | None = None) -> Callable[..., Any]:
    return backend(module, inputs, options=OPTIONS)


@pytest.mark.parametrize(
    "config", [{"backend": "exir_lowering", "options": OPTIONS, "mode": None}, {"backend": "own_of_test_hugging_face"}]
)
def test_generate_with_a_compile_config(config: dict[str, Any]) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes)).eval()
    ids, how = torch.randint(0, 32, (1, 5)), {"max_new_tokens": 5, "do_sample": False}
    given = CompileConfig(**config)
    given._compile_all_devices = True  # transformers compiles on GPUs, unless it is told so
    got = model.generate(ids, cache_implementation="static", compile_config=given, **how)
    assert {report.backend for report in reports()} == {"exir_lowering"}
    assert all(method.delegated for report in reports() for _, one in report.reports for method in one.methods)
    assert torch.equal(got, model.generate(ids, **how))
