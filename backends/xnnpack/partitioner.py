"""ExecuTorch's XNNPACK backend under one name, with its options."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any, Literal, get_args

from exir_lowering import InputError, Partitioner
from exir_lowering.backends.xnnpack.constraints import mend

Precision = Literal["fp32", "static_quant", "dynamic_quant"]

# ExecuTorch's configurations have names without namespaces. These are not in aten:
_NAMESPACES = {
    "_clone_dim_order": "dim_order_ops",
    "_to_dim_order_copy": "dim_order_ops",
    "quantize_per_tensor": "quantized_decomposed",
    "dequantize_per_tensor": "quantized_decomposed",
    "choose_qparams_affine": "torchao",
    "quantize_affine": "torchao",
    "dequantize_affine": "torchao",
}
# Operators of a model that become different ones in an Edge program; for hints.
_EDGE_NAMES = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"), "convolution"),
    "batch_norm": "_native_batch_norm_legit_no_training",
}


def xnnpack(
    *,
    operators: Collection[str] | None = None,
    precisions: Precision | Collection[Precision] | None = None,
    per_op_mode: bool = False,
    force_non_static_weights_for_f32_linear: bool = False,
    enable_bf16: bool = False,
) -> Partitioner:
    """Return ExecuTorch's `XnnpackPartitioner`, which gives XNNPACK what it can execute.

    Programs of ExecuTorch's `XNNPACKQuantizer` (PT2E, static and dynamic int8) need no option. Weights that several
    methods use are in the file once; which delegates share packed weights or a workspace is a setting of the runtime.

    Args:
        operators: Take only these operators of the Edge program, such as "aten.linear" or "aten.add.Tensor", each with
            the quantisation around it and the activation that XNNPACK fuses with it. To exclude some, use `deny` of
            `exir_lowering.partitioners`.
        precisions: Take only operators that ExecuTorch's partitioner supports in one of these precisions: "fp32" (also
            float16), "static_quant", "dynamic_quant" (linear layers and convolutions). With "fp32" alone, quantised
            layers are taken as fp32, with their quantisation on the host.
        per_op_mode: Give each operator, with the quantisation around it, its own delegate.
        force_non_static_weights_for_f32_linear: Pass the weights of fp32 linear layers to the delegate in each call,
            instead of packing them when the method is loaded: for weights that change, or that two delegates would
            both pack.
        enable_bf16: Also take bfloat16; the runtime's XNNPACK has to be new enough.

    Raises:
        InputError: ExecuTorch's partitioner does not know an operator or precision, or a flag is not a bool.
    """
    from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    flags = {
        "per_op_mode": per_op_mode,
        "force_non_static_weights_for_f32_linear": force_non_static_weights_for_f32_linear,
        "enable_bf16": enable_bf16,
    }
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InputError(f"xnnpack({name}={value!r}): expected True or False.")
    partitioner = XnnpackPartitioner(
        configs=_configs(operators),
        config_precisions=[ConfigPrecisionType[name.upper()] for name in _precisions(precisions)] or None,
        **flags,
    )
    chosen = partitioner.target_partitioner_configs
    for name, config in chosen.items():
        mend(config, together=(name,) if per_op_mode else chosen)
    made: Partitioner = partitioner
    return made


def _precisions(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Collection) else ()
    if not names or not all(name in get_args(Precision) for name in names):
        raise InputError(f"xnnpack(precisions={given!r}): expected one or several of {', '.join(get_args(Precision))}.")
    return names


def _configs(operators: Any) -> list[Any] | None:
    """Return ExecuTorch's configurations for operators, None for all of them."""
    from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS

    if operators is None:
        return None
    if isinstance(operators, str) or not isinstance(operators, Collection) or not operators:
        raise InputError(f'xnnpack(operators={operators!r}): expected a list of names, such as ["aten.linear"].')
    known: dict[str, list[Any]] = {}
    for config in ALL_PARTITIONER_CONFIGS:
        for name in (config.target_name, config.target_name.rpartition(".")[0]):
            known.setdefault(f"{_NAMESPACES.get(config.target_name.partition('.')[0], 'aten')}.{name}", []).append(
                config
            )
    chosen: dict[Any, None] = {}
    for operator in operators:
        if not isinstance(operator, str) or operator not in known:
            raise InputError(
                f"xnnpack(operators=...): XNNPACK's partitioner does not know {operator!r}. Expected a namespace and "
                f"one of its operators{_near(operator, known)}"
            )
        chosen.update(dict.fromkeys(known[operator]))
    return list(chosen)


def _near(operator: object, known: Collection[str]) -> str:
    """Return the end of a sentence: the names that are close to an unknown one, or all of them."""
    if isinstance(operator, str):
        namespaces = {name.partition(".")[0] for name in known}
        names = operator.split(".")
        parts = names[1:] if names[0] in namespaces or len(names) > 2 else names
        # The namespace may be wrong or missing, and so may be the overload.
        words = [base for part in parts for base in (_EDGE_NAMES.get(part, part), f"_{part}", f"{part}_copy")]
        close = [name for word in words for name in (f"{space}.{word}" for space in namespaces) if name in known]
        close = close or difflib.get_close_matches(f"aten.{'.'.join(parts)}", known, n=3)
        if close:
            return f". Did you mean {' or '.join(map(repr, close))}?"
    return f": {', '.join(sorted(known))}."
