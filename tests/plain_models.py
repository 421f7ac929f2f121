"""Reference models that nobody else has, in plain torch from their descriptions, with nothing of ours.

Each is a table of tensors, named and laid out as a Hugging Face file would be, and a function from them to logits.
"""

import torch


def narrow_experts_tensors(layers=2, vocab=128, width=48, narrow=20, heads=4, kv_heads=2, dim=16, experts=8, hidden=24):
  """A decoder whose layers have one residual around attention and experts, which work in a narrower space."""
  layer = {
    "input_layernorm.weight": (width,),
    "self_attn.q_proj.weight": (heads * dim, width),
    "self_attn.k_proj.weight": (kv_heads * dim, width),
    "self_attn.v_proj.weight": (kv_heads * dim, width),
    "self_attn.q_norm.weight": (dim,),
    "self_attn.k_norm.weight": (dim,),
    "self_attn.o_proj.weight": (narrow, heads * dim),
    "post_attention_layernorm.weight": (narrow,),
    "mlp.gate.weight": (experts, narrow),
    "mlp.out_proj.weight": (width, narrow),
  }
  for e in range(experts):
    layer |= {f"mlp.experts.{e}.{name}_proj.weight": (hidden, narrow) for name in ("gate", "up")}
    layer[f"mlp.experts.{e}.down_proj.weight"] = (narrow, hidden)
  outside = {
    "model.embed_tokens.weight": (vocab, width),
    "model.norm.weight": (width,),
    "lm_head.weight": (vocab, width),
  }
  return outside | {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}


def narrow_experts(tensors, tokens, layers=2, heads=4, kv_heads=2, dim=16, chosen=2, theta=1e6, epsilon=1e-6):
  """x + out(experts(norm(attention(norm(x))))), layer after layer."""
  x = tensors["model.embed_tokens.weight"][tokens]
  for i in range(layers):
    own = {name.split(f"layers.{i}.")[1]: t for name, t in tensors.items() if f"layers.{i}." in name}
    y = _attention(own, _rms(x, own["input_layernorm.weight"], epsilon), heads, kv_heads, dim, theta, epsilon)
    y = _experts(own, _rms(y, own["post_attention_layernorm.weight"], epsilon), chosen)
    x = x + y @ own["mlp.out_proj.weight"].T
  return _rms(x, tensors["model.norm.weight"], epsilon) @ tensors["lm_head.weight"].T


def _rms(x, scale, epsilon):
  y = x.float()
  return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype) * scale


def _attention(own, x, heads, kv_heads, dim, theta, epsilon):
  rows, length, _ = x.shape

  def head(name, count):
    return (x @ own[f"self_attn.{name}_proj.weight"].T).reshape(rows, length, count, dim).transpose(1, 2)

  q = _turn(_rms(head("q", heads), own["self_attn.q_norm.weight"], epsilon), theta)
  k = _turn(_rms(head("k", kv_heads), own["self_attn.k_norm.weight"], epsilon), theta)
  k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, head("v", kv_heads)))
  scores = (q @ k.transpose(-1, -2)).float() * dim**-0.5
  later = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
  weights = scores.masked_fill(later, -torch.inf).softmax(-1).to(x.dtype)
  return (weights @ v).transpose(1, 2).reshape(rows, length, -1) @ own["self_attn.o_proj.weight"].T


def _turn(x, theta):
  half = x.shape[-1] // 2
  angle = torch.arange(x.shape[-2])[:, None] * theta ** (-torch.arange(half) / half)
  cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
  a, b = x[..., :half], x[..., half:]
  return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _experts(own, x, chosen):
  scores = (x @ own["mlp.gate.weight"].T).float().softmax(-1)
  best, which = scores.topk(chosen, -1)
  best = (best / best.sum(-1, keepdim=True)).to(x.dtype)
  y = torch.zeros_like(x)
  for e in range(scores.shape[-1]):
    gate, up, down = (own[f"mlp.experts.{e}.{name}_proj.weight"].T for name in ("gate", "up", "down"))
    out = (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down
    y = y + out * (best * (which == e)).sum(-1, keepdim=True)
  return y


MODELS = {"narrow_experts": (narrow_experts_tensors, narrow_experts)}
