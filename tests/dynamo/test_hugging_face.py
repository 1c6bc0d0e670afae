"""The ways in which transformers and accelerate take a model or a backend for it: what works, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate.state
import pytest
import torch
import transformers
from accelerate import Accelerator
from compile_support import assert_near, clean, state
from torch._dynamo import register_backend
from transformers import CompileConfig, TrainingArguments

from exir_lowering.dynamo import backend, reports

__all__ = ["clean"]

OPTIONS = {"partitioners": "reference", "fallback": None}


@pytest.fixture(autouse=True)
def _no_accelerator() -> Iterator[None]:
    """Forget accelerate's settings, which it has once per process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@register_backend(name="own_of_test_hugging_face")
def _own(module: torch.fx.GraphModule, inputs: list[Any], mode: str | None = None) -> Callable[..., Any]:
    return backend(module, inputs, options=OPTIONS)


def _compiled_in_place(model: torch.nn.Module) -> torch.nn.Module:
    model.compile(backend="exir_lowering", options=OPTIONS)
    return model


def _ran() -> set[str]:
    assert all(method.delegated for report in reports() for _, one in report.reports for method in one.methods)
    return {report.backend for report in reports()}


class Trainer(transformers.Trainer):
    """Keeps the losses."""

    losses: list[float]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def _train(folder: Path, change: Callable[[torch.nn.Module], torch.nn.Module], **settings: Any) -> tuple[Any, Any]:
    """Train and evaluate a classifier with dropout, with accumulated gradients; return the losses and the weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=50, problem_type="single_label_classification", **sizes)
    model = transformers.BertForSequenceClassification(config)
    ids = torch.randint(0, 50, (16, 8), generator=torch.Generator().manual_seed(0))
    examples = [{"input_ids": one, "labels": one.sum() % 2} for one in ids]
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    steps = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
    arguments = TrainingArguments(str(folder), use_cpu=True, learning_rate=1e-2, **quiet, **steps, **settings)
    trainer = Trainer(change(model), arguments, train_dataset=examples, eval_dataset=examples)
    trainer.losses = []
    trainer.train()
    return [*trainer.losses, trainer.evaluate()["eval_loss"]], state(model)


def test_trainer_with_a_model_that_is_compiled_in_place(tmp_path: Path) -> None:
    losses, weights = _train(tmp_path, _compiled_in_place)
    assert _ran() == {"exir_lowering"}
    eager_losses, eager_weights = _train(tmp_path, lambda model: model)
    assert len(losses) == 9
    assert_near(losses, eager_losses)
    assert_near(weights, eager_weights)


def _steps(change: Callable[[torch.nn.Module], torch.nn.Module]) -> tuple[list[float], dict[str, torch.Tensor]]:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(4, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).tanh()

    torch.manual_seed(0)
    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=2), Model()
    changed = change(model)
    prepared, optimizer = accelerator.prepare(changed, torch.optim.AdamW(changed.parameters(), lr=1e-2))
    losses = []
    for _ in range(6):
        with accelerator.accumulate(prepared):
            loss = (prepared(torch.randn(4, 4)) - 1).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, state(model)


@pytest.mark.parametrize("where", ["in place", "around"])
def test_accelerator_with_a_compiled_model(where: str) -> None:
    around = torch.compile(backend="exir_lowering", options=OPTIONS)
    got = _steps(_compiled_in_place if where == "in place" else around)
    assert _ran() == {"exir_lowering"}
    assert_near(got, _steps(lambda model: model))


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
    assert _ran() == {"exir_lowering"}
    assert torch.equal(got, model.generate(ids, **how))
