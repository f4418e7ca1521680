"""What an operator is: one table for `lean()` and for compiled code.

An operator's schema and tags say most: a view shows its argument's memory, an operator tagged `pointwise`
computes element by element, and one that draws random numbers or writes into an argument is never called
again. `OPERATORS` lists the others, by name. Its kinds:

    view     has no memory of its own
    fused    computes element by element: a compiler puts it into the kernel that reads the result
    reduced  reads as a fused one does, and writes its result to memory
    pass     is a kernel of its own, at the speed of memory
    window   as pass, but reads several values for each result: rebuilt where products are
    product  is priced by its operations too, as it has many per byte
    empty    returns memory without contents, which a compiler leaves out
    once     is never called again: random numbers, collectives, writes into arguments
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal, NamedTuple

Kind = Literal["view", "fused", "reduced", "pass", "window", "product", "empty", "once"]
VIEW, ONCE, CHEAP, SUM, PRODUCT = range(5)
"""What a rebuild by calls counts, as `Kind` in rules.h."""
_COUNTS = {"view": VIEW, "once": ONCE, "empty": ONCE, "product": PRODUCT, "window": PRODUCT}


class Operator(NamedTuple):
    """One row of the table. Positions count the arguments of the schema.

    `formula`: how to count its operations. `writes`: arguments that it writes although its schema does not
    say so, if the argument at `gate` is true. `adds`: it adds tensors of the result's size, as a residual
    connection does. `fills`: it works in place and never reads what was there. `moves`: it only moves
    elements, so that any two calls give the same bits, and none is tried first. `instead`: an operator that
    computes its first result from its other results. `sources`: that operator's arguments, each an argument
    of this call (a number), a result of it (a string) or None. torch's batch norm has none: its result is its
    input times a scale plus a shift, which follow from its statistics. `act`: the name under which leannorm's
    norms compute it, too, so that a norm and what follows may be rebuilt by one call.
    """

    kind: Kind
    formula: Literal["", "matrix", "convolution", "attention"] = ""
    writes: tuple[int, ...] = ()
    gate: int = -1
    adds: bool = False
    fills: bool = False
    moves: bool = False
    instead: str = ""
    sources: tuple[int | str | None, ...] = ()
    act: str = ""

    @property
    def counts(self) -> int:
        """As what a rebuild counts it."""
        return SUM if self.adds else _COUNTS.get(self.kind, CHEAP)


_Sizes = Sequence[int]


def operations(formula: str, left: _Sizes, right: _Sizes, out: _Sizes, transposed: bool = False) -> int:
    """Multiplications and additions of a product of tensors of these sizes; `transposed`: the convolution."""
    if formula == "convolution":
        return 2 * prod(left if transposed else out) * prod(right[1:])
    if formula == "matrix":
        return 2 * prod(out) * left[-1]
    return 4 * prod(left) * right[-2] if formula == "attention" else 0


def _rows(kind: Kind, names: str, space: str = "aten", **fields: object) -> dict[str, Operator]:
    return {f"{space}::{name}": Operator(kind, **fields) for name in names.split()}  # type: ignore[arg-type]


_CHANNEL = "leannorm::channel_normalize"

OPERATORS: dict[str, Operator] = {
    **_rows("product", "mm bmm addmm baddbmm _scaled_mm linear _grouped_mm", formula="matrix"),
    **_rows("product", "convolution _convolution", formula="convolution"),
    **_rows(
        "product",
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention"
        " _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
        formula="attention",
    ),
    **_rows("window", "max_pool2d_with_indices max_pool3d_with_indices"),
    **_rows(
        "pass",
        "avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d"
        " upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_trilinear3d"
        " _softmax _log_softmax native_layer_norm native_group_norm",
    ),
    **_rows("pass", "cat constant_pad_nd embedding index_select roll flip", moves=True),
    **_rows(
        "reduced",
        "sum mean amax amin max min var var_mean std any all prod argmax argmin logsumexp norm",
    ),
    **_rows(
        "fused",
        "_to_copy to copy full full_like zeros zeros_like ones ones_like new_zeros new_ones"
        " arange scalar_tensor native_dropout_backward gelu gelu_backward silu silu_backward"
        " threshold_backward sigmoid_backward tanh_backward glu",
    ),
    **_rows(
        "fused",
        "clone where masked_fill index gather _unsafe_index lift_fresh_copy slice_scatter select_scatter"
        " triu tril repeat expand_copy",
        moves=True,
    ),
    **_rows("fused", "add sub add_ sub_", adds=True),
    **_rows("fused", "copy_ fill_ zero_", fills=True),
    **_rows("fused", "relu relu_", act="relu"),
    **_rows(
        "pass",
        "native_batch_norm _native_batch_norm_legit",
        writes=(3, 4),
        gate=5,
        instead=_CHANNEL,
    ),
    **_rows("pass", "cudnn_batch_norm miopen_batch_norm", writes=(3, 4), gate=5),
    **_rows(
        "pass",
        "_low_memory_max_pool_with_offsets _low_memory_max_pool2d_with_offsets",
        space="prims",
    ),
    **_rows("reduced", "sum var prepare_softmax_online xor_sum amax amin", space="prims"),
    **_rows("fused", "convert_element_type iota _low_memory_max_pool_offsets_to_indices fma", space="prims"),
    **_rows("view", "broadcast_in_dim", space="prims"),
    **_rows("view", "_unsafe_view _reshape_alias reshape detach alias lift_fresh"),
    **_rows("empty", "empty_like"),
    **_rows(
        "once",
        "empty empty_strided new_empty new_empty_strided empty_permuted set_ resize_ resize_as_ detach_"
        " _local_scalar_dense _resize_output_",
    ),
    **_rows(
        "pass",
        "channel_moments channel_normalize constants_of row_forward row_gated_forward",
        space="leannorm",
    ),
    "leannorm::channel_forward": Operator("pass", instead=_CHANNEL, sources=(0, "1", "3", 1, 2, 3, 5, 7)),
    "leannorm::channel_forward_tracked_": Operator(
        "pass", instead=_CHANNEL, sources=(0, "1", "3", 1, 2, 3, 5, None)
    ),
}
_IN_ANY_ORDER = (
    "index_add index_copy index_put _unsafe_index_put _index_put_impl put scatter scatter_add scatter_reduce"
    " index_reduce cumsum bincount histc kthvalue median nanmedian max_unpool2d max_unpool3d"
    " nll_loss_forward nll_loss2d_forward"
    # gradients, which a pass calls where it differentiates something itself
    " convolution_backward embedding_dense_backward _embedding_bag_backward _ctc_loss_backward"
    " avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward"
    " adaptive_max_pool2d_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward"
    " fractional_max_pool2d_backward fractional_max_pool3d_backward"
    " upsample_linear1d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward"
    " upsample_trilinear3d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward"
    " reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward"
    " replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward"
    " grid_sampler_2d_backward grid_sampler_3d_backward"
    " _scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward"
    " _scaled_dot_product_cudnn_attention_backward"
)
VARYING = tuple(_rows("once", _IN_ANY_ORDER))
"""On a device, these operators and their in-place forms add or write in any order, and so do transposed
convolutions. Equal calls may then give different bits, unless torch uses deterministic algorithms, whose list
in torch's documentation this follows."""
