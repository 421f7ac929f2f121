"""Qwen 3, dense: queries and keys are normed head by head before they are turned."""

from maxtext.models import standard

spec = standard.dense
WEIGHTS = standard.WEIGHTS
