"""The route `grouped_fp16_legacy`: grouped attention as kernels without FP32 state have it, to compare with.

Scores in one tensor-core sum, probabilities in 16 bits, numerators that stay in the tensor core's accumulators, and
between splits normalised float16 partials with the logarithms of their sums. Asked for by name only.
"""

import functools

from corekern.cuda import grouped

attention = functools.partial(grouped.attention, legacy=True)
attention_state = functools.partial(grouped.attention_state, legacy=True)
plan_attention = functools.partial(grouped.plan_attention, legacy=True)
