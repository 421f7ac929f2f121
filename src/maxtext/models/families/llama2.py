"""Llama 2, 3, 3.1 and 3.3: pre-norm, grouped-query attention, half-split rotary positions, gated feed-forward."""

from maxtext.models import standard

spec = standard.dense
WEIGHTS = standard.WEIGHTS
