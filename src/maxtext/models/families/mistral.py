"""Mistral 7B: as the Llamas; version 0.1 has a sliding window, later ones a longer base of rotary positions."""

from maxtext.models import standard

spec = standard.dense
WEIGHTS = standard.WEIGHTS
