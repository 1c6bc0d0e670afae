"""Checks of arguments that torch's kernels do not check themselves.

A file chooses the arguments of its operators, and tensors are computed from inputs. These kernels use sizes or indices
unchecked, so that a wrong one crashes the process or writes beyond a tensor's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Check = Callable[[Mapping[str, Any]], None]
"""Takes arguments by name, and raises ValueError if they would crash the kernel."""


def _embedding_bag(given: Mapping[str, Any]) -> None:
    offsets, count = given["offsets"], given["indices"].numel()
    steps = torch.cat([offsets.new_zeros(1), offsets.flatten(), offsets.new_full((1,), count)]).diff()
    if bool((steps < 0).any()):
        raise ValueError(f"offsets must ascend from 0 to the number of indices, {count}")


def _batch_norm(given: Mapping[str, Any]) -> None:
    tensor = given["input"]
    if tensor.dim() < 2:
        raise ValueError(f"batch norm of a tensor of shape {list(tensor.shape)}, expected at least 2 dimensions")
    for name in ("weight", "bias", "running_mean", "running_var"):
        value = given.get(name)
        if value is not None and tuple(value.shape) != (tensor.shape[1],):
            raise ValueError(f"{name} has shape {list(value.shape)}, expected [{tensor.shape[1]}]")
    if not given.get("training", False) and (given.get("running_mean") is None or given.get("running_var") is None):
        raise ValueError("batch norm in inference needs running_mean and running_var")


def _max_pool_backward(given: Mapping[str, Any]) -> None:
    gradient, tensor, indices = given["grad_output"], given["self"], given["indices"]
    area = tensor.shape[-1] * tensor.shape[-2] if tensor.dim() >= 3 else 0
    if gradient.shape != indices.shape or tensor.shape[:-2] != indices.shape[:-2]:
        raise ValueError(f"gradients {list(gradient.shape)} and indices {list(indices.shape)} of {list(tensor.shape)}")
    if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < area):
        raise ValueError(f"indices of max pooling must be between 0 and {area - 1}")


def _division(given: Mapping[str, Any]) -> None:
    """The smallest integer has no positive counterpart: dividing it by -1 crashes the process."""
    left, right = given["self"], given["other"]
    if given.get("rounding_mode") != "trunc" or not isinstance(left, torch.Tensor):
        return
    kind = torch.result_type(left, right)
    if kind not in (torch.int32, torch.int64) or not bool((torch.as_tensor(right) == -1).any()):
        return
    if bool((left.to(kind) == torch.iinfo(kind).min).any()):
        raise ValueError(f"{torch.iinfo(kind).min} divided by -1 is out of the range of {kind}")


def _fourier(given: Mapping[str, Any]) -> None:
    shape: Sequence[int] = given["self"].shape
    dims = [dim + len(shape) if dim < 0 else dim for dim in given["dim"]]
    if not dims or len(set(dims)) < len(dims) or not all(0 <= dim < len(shape) for dim in dims):
        raise ValueError(f"the dimensions {list(given['dim'])} of a tensor of shape {list(shape)}")
    if given["dim"] != dims:
        raise ValueError(f"the dimensions {list(given['dim'])}, expected them counted from the front")
    size = given.get("last_dim_size")
    if size is not None and not 1 <= size // 2 + 1 <= shape[dims[-1]]:
        raise ValueError(f"last_dim_size {size} for {shape[dims[-1]]} frequencies")
    if 0 in shape:
        raise ValueError("a Fourier transform of an empty tensor")


CHECKS: Mapping[str, Check] = {
    "_embedding_bag": _embedding_bag,
    "_fft_c2c": _fourier,
    "_fft_c2r": _fourier,
    "_fft_r2c": _fourier,
    "_native_batch_norm_legit": _batch_norm,
    "_native_batch_norm_legit_functional": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "div": _division,
    "divide": _division,
    "max_pool2d_with_indices_backward": _max_pool_backward,
}
"""The checks, by ATen's names."""
