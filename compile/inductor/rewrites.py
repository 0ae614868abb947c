"""The rewrites of exported programs before Inductor compiles them, in their order. Each works in place. The last one is
not here: where a program is compiled, `layers.outline_layers` makes one operator of layers that are alike."""

from collections.abc import Collection

from torch.export import ExportedProgram

from ...kernels.native import load_library
from ..precision import Precision
from .complex_products import split_complex
from .exact import keep_dimensions, multiply_at_once, use_exact
from .gpu_rewrites import count_ranks, join_layers, join_writes
from .gpu_writes import lower_writes
from .norms import fuse_norms, use_roots
from .packed_weights import pack_weights
from .stored_program import Packed
from .turned_layers import use_linear
from .written_out import write_out

EXACT = (
    use_linear,  # linear layers that are written as weight @ x^T: those, which the packing knows
    split_complex,  # products of complex numbers: those of their parts
    use_roots,  # x ** -0.5: a root
    fuse_norms,  # an RMS norm of many ops: one
    write_out,  # products of a few terms, standard deviations, means of other dimensions: sums of elements
    keep_dimensions,  # sums and means: a form that the next one knows
    use_exact,  # functions and reductions: ours, with the same bits in any company
    multiply_at_once,  # an activation and its gate: one op
)


def make_exact(exported: ExportedProgram) -> None:
    """Give each element of a CPU program one result."""
    load_library()
    for rewrite in EXACT:
        rewrite(exported)


def rewrite_for_cpu(exported: Collection[ExportedProgram], precision: Precision) -> list[Packed]:
    """Rewrite programs over the same weights -> the weights that were packed."""
    for program in exported:
        make_exact(program)
    return pack_weights(exported, precision)  # linear layers, experts and embeddings: ours, over packed weights


def rewrite_for_gpu(exported: Collection[ExportedProgram], precision: Precision) -> list[Packed]:
    """Rewrite programs over the same weights -> the weights that were joined or became something else. A text stays the
    same, but for the rounding of products and of weights, if `precision` asks for that."""
    lower_writes()
    for program in exported:
        use_linear(program)
    packed = join_layers(exported, precision)  # layers of one x: one product
    for program in exported:
        count_ranks(program)  # the order of candidates: fewer launches
        join_writes(program)  # a layer's keys and values: one write, which keeps the strides of the caches
    return packed
