"""A model family of your own: two local layers, then a global one without positions, and a norm after every branch.

  python examples/custom_family.py

A family is data: a spec of blocks, and a table of weight names for Hugging Face. Registered from outside the package it
is known to this process; the same text as `models/families/swan.py` makes it known to every command.
"""

from types import SimpleNamespace

import maxtext
from maxtext.layers.attention import QueryKeyNorm
from maxtext.models import standard
from maxtext.models.build import register_family
from maxtext.models.hugging_face import READS, STANDARD, HuggingFace
from maxtext.models.spec import DecoderSpec, cycles
from maxtext.models.weight_table import Weight


def spec(config: maxtext.MaxTextConfig) -> DecoderSpec:
  """The decoder that the keys of a run describe."""
  norm = standard.norm(config)
  near = standard.attention(config, window=config.sliding_window_size, qk_norm=QueryKeyNorm(norm))
  far = standard.attention(config, rope=None, gated=True)
  layers = tuple(
    standard.block(config, mixer, mixer_post_norm=norm, feed_forward_post_norm=norm) for mixer in (near, near, far)
  )
  return standard.decoder(config, cycles(layers, config.base_num_decoder_layers))


gate = {f"{standard.LAYER}/mixer/gate/weight": Weight("model.layers.{layer}.self_attn.g_proj.weight", transposed=True)}
swan = SimpleNamespace(
  spec=spec,
  WEIGHTS=standard.WEIGHTS | standard.SANDWICH | gate,
  HUGGING_FACE=HuggingFace("SwanForCausalLM", "swan", {**STANDARD, "window": "sliding_window_size"}, READS),
)
register_family("swan", swan)

config = maxtext.load_config(
  run_name="swan",
  decoder_block="swan",
  base_emb_dim=32,
  base_mlp_dim=64,
  base_num_decoder_layers=5,
  base_num_query_heads=4,
  base_num_kv_heads=2,
  head_dim=8,
  sliding_window_size=8,
  vocab_size=64,
  max_target_length=16,
  per_device_batch_size=8,
  dataset_type="synthetic",
  dtype="float32",
  learning_rate=1e-2,
  steps=12,
)
maxtext.train(config)
print("weights with Hugging Face's names in", maxtext.convert("runs/swan", "runs/swan/hf"))
