"""The closed list of torch's operators that a file may have executed: they only compute results.

A file is data, but registered operators also map, write, seed and wait for other machines. One has to qualify

* by name: ATen's core and pointwise operators, as torch tags them, the composites and views that exported programs
  contain (`_COMPOSITES`, `_VIEWS`), and the few namespaces that are written for such programs (`_NAMESPACES`); and
* by schema: it writes to none of its arguments, and takes only tensors, numbers and lists of them, and text only if the
  text selects a mode (`_MODES`).

A list of forbidden operators would be wrong with the next release of torch, or the next library that registers some.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import import_module

import torch

from exir_lowering._upstream.operators import Argument, Operator, defining, find_operator
from exir_lowering.graphs.operators.functions import split_words

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
        torch.int64, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    )
}  # fmt: skip
"""The element types that a payload may name: those of dense tensors. Quantised types can crash the process."""


_COMPOSITES = split_words(
    """
    __lshift__ _assert_async _assert_scalar _assert_tensor_metadata _conj _euclidean_dist _fft_c2c _is_all_true
    _is_any_true _logcumsumexp _native_batch_norm_legit_functional _prelu_kernel _safe_softmax _trilinear _unsafe_index
    _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate _unsafe_view _upsample_bicubic2d_aa
    _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d absolute
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d addbmm addmv
    addr affine_grid_generator all aminmax any arange arccos arccosh arcsin arcsinh arctan arctan2 arctanh argsort
    argwhere as_strided_scatter atleast_1d atleast_2d atleast_3d avg_pool1d baddbmm bernoulli bilinear
    binary_cross_entropy binary_cross_entropy_with_logits block_diag bucketize cartesian_prod cdist channel_shuffle
    column_stack complex concat concatenate contiguous conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d cosine_similarity count_nonzero cov cross cross_entropy_loss cummax cummin cumprod
    cumulative_trapezoid diag diag_embed diagflat diagonal_scatter diff divide dot dropout dstack einsum empty_like
    empty_permuted expm1 eye fake_quantize_per_channel_affine fake_quantize_per_channel_affine_cachemask
    fake_quantize_per_tensor_affine fake_quantize_per_tensor_affine_cachemask fft_fft fft_fft2 fft_fftn fft_fftshift
    fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn fill fix
    fliplr flipud floor_divide full full_like frobenius_norm ger glu greater greater_equal grid_sampler
    grid_sampler_3d group_norm hamming_window hann_window hardswish hinge_embedding_loss hstack huber_loss im2col
    index_add index_copy index_fill index_put index_reduce inner inverse isclose isin isreal kl_div kron kthvalue
    l1_loss layer_norm less less_equal lift lift_fresh linalg_cross linalg_det linalg_inv linalg_inv_ex linalg_matmul
    linalg_matrix_norm linalg_norm linalg_vecdot linalg_vector_norm linear linspace log_sigmoid log_sigmoid_forward
    log_softmax logcumsumexp logspace logsumexp margin_ranking_loss masked_fill masked_select matmul max
    max_pool1d max_pool1d_with_indices max_pool2d max_pool3d mean median meshgrid min mse_loss msort multiply mv
    nanmean nanmedian nansum native_channel_shuffle negative new_empty new_empty_strided new_full new_ones new_zeros
    nll_loss nll_loss2d nll_loss2d_forward nll_loss_forward norm not_equal numel ones ones_like outer pad
    pairwise_distance pixel_shuffle pixel_unshuffle polar prelu prod rand_like randint randint_like randn_like
    repeat_interleave replication_pad1d rms_norm roll rot90 row_stack rsub scaled_dot_product_attention scatter
    searchsorted silu smooth_l1_loss soft_margin_loss softmax sort special_digamma special_erf special_erfc
    special_erfinv special_exp2 special_expit special_expm1 special_gammaln special_i0 special_log1p special_log_softmax
    special_logit special_logsumexp special_ndtr special_psi special_round special_sinc special_softmax special_xlogy
    stack std std_mean subtract sum sum_to_size sym_constrain_range sym_constrain_range_for_size take take_along_dim
    tensordot tile to trace trapezoid trapz tril tril_indices triu triu_indices true_divide type_as
    unique_consecutive unsafe_chunk unsafe_split unsafe_split_with_sizes upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d var var_mean vdot
    vstack where zero zeros zeros_like
    """
)
"""Other operators of exported programs: those that Edge dialect does not decompose, or is asked to keep whole."""

_VIEWS = split_words(
    """
    _conj_copy _neg_view _neg_view_copy adjoint alias_copy as_strided_copy broadcast_tensors broadcast_to chunk conj
    detach detach_copy diagonal_copy dsplit expand_as expand_copy flatten hsplit imag lift_fresh_copy mH mT moveaxis
    movedim narrow narrow_copy numpy_T permute_copy ravel real reshape reshape_as resolve_conj resolve_neg select_copy
    slice_copy split split_copy split_with_sizes_copy squeeze squeeze_copy swapaxes swapdims t t_copy tensor_split
    transpose transpose_copy unbind unbind_copy unflatten unfold unfold_copy unsqueeze_copy view_as view_as_complex
    view_as_complex_copy view_as_real view_as_real_copy view_copy vsplit
    """
)
"""Views and their copies; torch's tag includes some that do not check their bounds, such as _reshape_alias_copy."""

_UNCHECKED = frozenset({"_adaptive_avg_pool2d_backward", "_pdist_backward", "embedding_dense_backward"})
"""Core operators whose kernels use sizes or indices unchecked, and so may access any memory."""

_ENDLESS = ("mvlgamma", "polynomial")
"""Parts of the names of pointwise operators whose number of steps per element is one of their arguments."""

_MODES = split_words(
    "ord approximate assert_msg equation indexing mode norm padding reduce reduction rounding_mode side"
)
"""Arguments whose text selects a mode."""

_TYPES = split_words(
    """
    Tensor Optional[Tensor] List[Tensor] List[Optional[Tensor]] number Optional[number] List[number]
    Optional[List[number]] int Optional[int] List[int] Optional[List[int]] float Optional[float] List[float]
    Optional[List[float]] bool Optional[bool] List[bool] Optional[Device] Device Optional[Generator] Generator
    """
)
"""Types of arguments; dtypes and layouts are ints. A file can only name the CPU, and no generator."""

_NAMESPACES = frozenset({"quantized_decomposed"})  # namespaces that are on the list as a whole

_OTHERS = dict.fromkeys(
    ("torchao.choose_qparams_affine.default", "torchao.dequantize_affine.default", "torchao.quantize_affine.default"),
    "torchao.quantization",
)
"""What torchao's quantised programs call, and what registers it."""

_TAGS = frozenset({torch.Tag.core, torch.Tag.pointwise})


def find(name: str) -> Operator | None:
    """Return an operator of the list ("aten.add.Tensor"), None if it is not on the list, or not registered here."""
    operator = _find_registered(name)
    if operator is None or not _named(name, operator) or not _schema_is_pure(name, operator.arguments):
        return None
    return operator


def why_not(name: str) -> str:
    """Return why an operator is not found, as a clause that starts with its name."""
    operator = _find_registered(name)
    if operator is None:
        return f"{name} is not registered in this process"
    written = [argument.name for argument in operator.arguments if argument.written]
    if written:
        return f"{name} writes to {', '.join(written)}"
    return f"{name} is not on the closed list of operators that are known to only compute"


def _find_registered(name: str) -> Operator | None:
    namespace, _, rest = name.partition(".")
    base, _, overload = rest.partition(".")
    for _ in defining(namespace):
        found = find_operator(namespace, base, overload)
        if found is not None:
            return found
    if name in _OTHERS:
        with suppress(ImportError):
            import_module(_OTHERS[name])
        return find_operator(namespace, base, overload)
    return None


def _schema_is_pure(name: str, arguments: Iterable[Argument]) -> bool:
    modes = name.partition(".")[0] != "aten"  # each operator of other namespaces is known by name
    return not any(
        argument.written
        or not (
            argument.type in _TYPES
            or (argument.type in ("str", "Optional[str]") and (modes or argument.name in _MODES))
        )
        for argument in arguments
    )


def _named(name: str, operator: Operator) -> bool:
    namespace, _, rest = name.partition(".")
    base = rest.partition(".")[0]
    if namespace != "aten":
        return namespace in _NAMESPACES or name in _OTHERS
    if base in _UNCHECKED or any(part in base for part in _ENDLESS) or (base.endswith("_") and base not in _COMPOSITES):
        return False
    return base in _COMPOSITES or base in _VIEWS or not _TAGS.isdisjoint(operator.tags)
