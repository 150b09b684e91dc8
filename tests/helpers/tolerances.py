"""The one tolerance table of the operator tests. Every number has its reason; a test never writes its own.

Most tests need none of these: inputs on a grid of 1/8 (inputs.py) make every product and sum exact in FP32, whatever the
order of the additions, so scores, argmax and gradients are compared bit for bit.
"""

from __future__ import annotations

import torch

# The contract's own bound, times sum_i ||Q_i|| * max_j ||D_j||. FP32 sums of d <= 1000 products stay far inside it; one
# rounding to bf16 (2^-9 = 2e-3) or fp16 (2^-12 = 2.4e-4) of a product, a maximum or a sum is far outside.
SCORE = 2e-6

# The same bound where documents are INT8 or FP8 and the truth is FP64 on the dequantised values: integer products are exact
# (|sum| < 2^24 for d <= 1040), what remains is one rounding per scale factor.
SCORE_QUANTIZED = SCORE

# Affine codes cost a second term, offset * sum(q), which may cancel against scale * <q, codes>: the same bound, but the
# document's norm is taken as ||scale * codes|| + ||offset * 1||, the two parts that are really added.
SCORE_AFFINE = SCORE

# Scores of the reference asked for float64: a few hundred float64 roundings (1.1e-16 each).
REFERENCE_FLOAT64 = 1e-13

# Gradients: accumulated in FP32 (the bound's 2e-6, times the sum of |terms|), then rounded once to the input's dtype: half a
# unit in the last place, and one whole unit where the FP32 sum fell on the other side of a rounding boundary.
GRADIENT = 2e-6
GRADIENT_ROUNDING = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
# Smallest spacing of each dtype, for gradients that land among its subnormals.
GRADIENT_FLOOR = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}

# Chamfer distance, relative to the float64 value of the same float32 points, translated by +1000 included (the brief's
# number): differences of float32 coordinates are exact there, squares and means cost some 1e-7.
CHAMFER = 1e-5
# Its gradient is a mean of differences p - q; relative to the largest entry.
CHAMFER_GRADIENT = 1e-5

# Rounding to the nearest code: half a step; 1e-3 of a step for the float32 division x / scale near a tie (127 * 2^-24 steps)
# and for the code's own float32 product.
INT8_STEPS = 0.5 + 1e-3
# Affine codes cover 255 steps from a rounded offset: the FP16 rounding of the scale (2^-11 of 127.5 steps each side) and of
# the offset (2^-11 of itself, added in the test) may push the extreme value past the last code.
AFFINE_STEPS = 0.5 + 127.5 * 2.0**-11 + 1e-3
# FP16 rounding, relative: of a scale or an offset.
HALF_ROUNDING = 2.0**-11
# Scales below this are FP16 subnormals (or zero), whose relative rounding is unbounded: half of the smallest, absolute.
HALF_FLOOR = 2.0**-25

# FP8 e4m3: 3 mantissa bits round by at most 2^-4 relative; below 2^-6 (times the scale) the spacing is 2^-9, half of it 2^-10.
FP8_RELATIVE = 2.0**-4 * (1 + 1e-3)
FP8_FLOOR_STEPS = 2.0**-10 * (1 + 1e-3)

# Storage of FP16 tokens against INT8 codes with one FP16 scale a token at d = 128: 256 / 130 bytes, the paper's 1.97.
STORAGE_RATIO = 256 / 130
