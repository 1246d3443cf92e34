"""Column kernels (sorting networks) and distances as machine code, generated as LLVM IR.

The kernels read rows of numbers in memory. The package does not depend on rules, torch or servers.
"""

from phocas.kernels.blocks import BLOCK_COLUMNS, spread
from phocas.kernels.calls import (
    PreparedCall,
    combine,
    draw_normals,
    marks,
    mix_reduce,
    prepare,
    radii,
    reduce,
    values,
)
from phocas.kernels.columns import PLAIN_MEAN, Window, scale_for
from phocas.kernels.distances import granule_columns
from phocas.kernels.masking import add_tail, cleaned, tail, tail_squares
from phocas.kernels.masses import LARGEST_TOTAL, Masses, Weighing
from phocas.kernels.memory import (
    OutlierMask,
    Rows,
    aligned,
    compute_dtype,
    half_supported,
    row_steps,
    row_table,
    tallies_of,
)
from phocas.kernels.mixes import SparseMix
from phocas.kernels.sums import (
    origin_sums,
    packed_sums,
    pair_matrix,
    pair_sums,
    sign_counts,
    square_sums,
)
from phocas.kernels.tails import tail_square_sums
from phocas.kernels.target import instructions
from phocas.kernels.threads import address, get_num_threads, set_num_threads

__all__ = [
    "BLOCK_COLUMNS",
    "LARGEST_TOTAL",
    "PLAIN_MEAN",
    "Masses",
    "OutlierMask",
    "PreparedCall",
    "Rows",
    "SparseMix",
    "Weighing",
    "Window",
    "add_tail",
    "address",
    "aligned",
    "cleaned",
    "combine",
    "compute_dtype",
    "draw_normals",
    "get_num_threads",
    "granule_columns",
    "half_supported",
    "instructions",
    "marks",
    "mix_reduce",
    "origin_sums",
    "packed_sums",
    "pair_matrix",
    "pair_sums",
    "prepare",
    "radii",
    "reduce",
    "row_steps",
    "row_table",
    "scale_for",
    "set_num_threads",
    "sign_counts",
    "spread",
    "square_sums",
    "tail",
    "tail_square_sums",
    "tail_squares",
    "tallies_of",
    "values",
]
