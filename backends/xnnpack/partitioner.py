"""ExecuTorch's XNNPACK backend under one name, with its options."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, get_args

from exir_lowering import InputError, Partitioner
from exir_lowering.backends.xnnpack.constraints import mend
from exir_lowering.partitioners.supports.support import suggest

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
    from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS
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
    wanted = (precisions,) if isinstance(precisions, str) else precisions
    named = isinstance(wanted, Collection) and wanted and all(one in get_args(Precision) for one in wanted)
    if wanted is not None and not named:
        allowed = ", ".join(get_args(Precision))
        raise InputError(f"xnnpack(precisions={precisions!r}): expected one or several of {allowed}.")
    if operators is not None and (isinstance(operators, str) or not isinstance(operators, Collection) or not operators):
        raise InputError(f'xnnpack(operators={operators!r}): expected a list of names, such as ["aten.linear"].')
    known: dict[Any, list[Any]] = {}
    for config in ALL_PARTITIONER_CONFIGS:
        namespace = _NAMESPACES.get(config.target_name.partition(".")[0], "aten")
        for name in (config.target_name, config.target_name.rpartition(".")[0]):
            known.setdefault(f"{namespace}.{name}", []).append(config)
    for operator in operators or ():
        if not isinstance(operator, str) or operator not in known:
            hint = suggest(str(operator), known, f" They are {', '.join(sorted(known))}.")
            raise InputError(
                f"xnnpack(operators=...): XNNPACK's partitioner does not know {operator!r}. Expected a namespace and "
                f"one of its operators.{hint}"
            )
    partitioner = XnnpackPartitioner(
        configs=None if operators is None else list(dict.fromkeys(one for name in operators for one in known[name])),
        config_precisions=None if wanted is None else [ConfigPrecisionType[name.upper()] for name in wanted],
        **flags,
    )
    chosen = partitioner.target_partitioner_configs
    for name, config in chosen.items():
        mend(config, together=(name,) if per_op_mode else chosen)
    made: Partitioner = partitioner
    return made
