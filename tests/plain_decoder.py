"""The tiny Llama as plain NumPy, written from the papers and apart from `maxtext.layers`, with what keys can add to it.

Parameters are a flat dict of the model's own paths; everything is float64, one sequence at a time.
"""

import numpy as np

HEADS, KV_HEADS, DIM = 4, 2, 8


def forward(params, tokens, positions, documents, moba=None, streams=None, engram=None):
  """Tokens [S] to normed hidden states [S,E]."""
  x = params["embedding/table"][tokens]
  if streams:
    x = np.repeat(x[:, None], streams[0], axis=1)
  for number, own in enumerate(layers_of(params)):
    if "memory/table" in own:
      x = x + memory(own, number, x, tokens, documents, **engram)
    x = layer(own, x, positions, documents, moba, streams)
  if streams:
    x = x.mean(1)
  return rms(x) * params["final_norm/scale"]


def layers_of(params):
  """The parameters of each layer, from first to last."""
  for group in range(len({name.split("/")[1] for name in params if name.startswith("groups/")})):
    own = {n.split("/", 4)[4]: v for n, v in params.items() if n.startswith(f"groups/{group}/layers/0/")}
    for number in range(len(own["mixer_norm/scale"])):
      yield {name: value[number] for name, value in own.items()}


def memory(own, number, x, tokens, documents, bases, heads, dim, span, seed):
  """SiLU(conv(norm(v))) + v, where v is the value of looked-up rows times a gate: how alike their key and x are."""
  longest, S = len(bases) + 1, len(tokens)
  odd = np.random.default_rng(seed + 10007 * number).integers(0, 2**31, size=longest, dtype=np.uint32) * 2 + 1
  rows, taken, sizes = [], set(), []
  for base in bases:
    size = base
    for _ in range(heads):
      while size in taken or any(size % d == 0 for d in range(2, size)):
        size += 1
      taken.add(size)
      sizes.append(size)
  for s in range(S):
    found = []
    for length in range(2, longest + 1):
      mixed = 0
      for back in range(length):
        known = s >= back and documents[s - back] == documents[s]
        mixed ^= (int(tokens[s - back]) + 1) * int(odd[back]) % 2**32 if known else 0
      for head in range(heads):
        place = (length - 2) * heads + head
        found.append(own["memory/table"][sum(sizes[:place]) + mixed % sizes[place]])
    rows.append(np.concatenate(found))
  rows, streams = np.stack(rows), x.reshape(S, -1, x.shape[-1])
  assert rows.shape[1] == len(bases) * heads * dim
  key = np.einsum("sm,mne->sne", rows, own["memory/key/weight"]) + own["memory/key/bias"]
  query = rms(rms(streams) * own["memory/norm/scale"]) * own["memory/query_norm/scale"]
  alike = (rms(key) * own["memory/key_norm/scale"] * query).sum(-1, keepdims=True) / np.sqrt(x.shape[-1])
  gate = sigmoid(np.sign(alike) * np.sqrt(np.abs(alike)))
  value = gate * (rows @ own["memory/value/weight"] + own["memory/value/bias"])[:, None]
  normed, mixed = rms(value) * own["memory/value_norm/scale"], np.zeros_like(value)
  for s in range(S):
    for i in range(span):
      before = s - (span - 1 - i) * longest
      if before >= 0 and documents[before] == documents[s]:
        mixed[s] += own["memory/convolution/weight"][i] * normed[before]
  return (mixed * sigmoid(mixed) + value).reshape(x.shape)


def layer(own, x, positions, documents, moba=None, streams=None):
  def attend(y):
    return attention(own, rms(y) * own["mixer_norm/scale"], positions, documents, moba)

  def feed(y):
    y = rms(y) * own["feed_forward_norm/scale"]
    gate = y @ own["feed_forward/gate/weight"]
    return (gate / (1 + np.exp(-gate)) * (y @ own["feed_forward/up/weight"])) @ own["feed_forward/down/weight"]

  for branch, name in ((attend, "mixer_streams"), (feed, "feed_forward_streams")):
    x = x + branch(x) if streams is None else hyper_connected(own, name, x, branch, streams[1])
  return x


def hyper_connected(own, name, x, branch, iterations):
  """x [S,N,E]: H_res x + H_post^T F(H_pre x), with H_res made doubly stochastic by Sinkhorn and Knopp."""
  S, n, _ = x.shape
  whole = x.reshape(S, -1)
  whole = whole / np.sqrt((whole**2).mean(-1, keepdims=True) + 1e-6)
  whole = whole * own[f"{name}/scale"].reshape(-1)
  found = whole @ own[f"{name}/product/weight"].reshape(whole.shape[1], -1)
  alpha = own[f"{name}/gain"]
  pre = sigmoid(alpha[0] * found[:, :n] + own[f"{name}/read_bias"])
  post = 2 * sigmoid(alpha[1] * found[:, n : 2 * n] + own[f"{name}/write_bias"])
  mix = np.exp(alpha[2] * found[:, 2 * n :].reshape(S, n, n) + own[f"{name}/mix_bias"])
  for _ in range(iterations):
    mix = mix / mix.sum(1, keepdims=True)
    mix = mix / mix.sum(2, keepdims=True)
  y = branch((pre[:, :, None] * x).sum(1))
  return mix @ x + post[:, :, None] * y[:, None]


def attention(own, x, positions, documents, moba):
  S = len(x)
  q, k, v = (np.einsum("se,ehd->shd", x, own[f"mixer/{n}/weight"]) for n in ("query", "key", "value"))
  q, k = rotated(q, positions), rotated(k, positions)
  out = np.zeros((S, HEADS, DIM))
  for head in range(HEADS):
    keys, values = k[:, head // 2], v[:, head // 2]
    logits = q[:, head] @ keys.T * DIM**-0.5
    for s in range(S):
      seen = (documents == documents[s]) & (np.arange(S) <= s)
      if moba:
        seen &= best_blocks(q[s, head], keys, positions, documents, s, *moba)
      weights = np.where(seen, np.exp(logits[s] - logits[s][seen].max()), 0)
      out[s, head] = weights / weights.sum() @ values
  return np.einsum("shd,hde->se", out, own["mixer/out/weight"])


def best_blocks(query, keys, positions, documents, s, size, count):
  """Keys of the own block and of the past blocks whose mean key has the largest product with the query."""
  block = positions // size
  own = documents == documents[s]
  past = [b for b in range(block[s]) if (own & (block == b)).any()]
  score = {b: query @ keys[own & (block == b)].mean(0) for b in past}
  kept = sorted(past, key=score.__getitem__)[len(past) - min(count - 1, len(past)) :]
  return own & np.isin(block, [block[s], *kept])


def mtp(params, number, hidden, next_tokens, positions, documents):
  """Module `number`: M [RMSNorm(Emb(next)); RMSNorm(h)] through a layer, then its norm."""
  own = {n.removeprefix(f"mtp/{number}/"): v for n, v in params.items() if n.startswith(f"mtp/{number}/")}
  tokens = rms(params["embedding/table"][next_tokens]) * own["token_norm/scale"]
  joined = np.concatenate([tokens, rms(hidden) * own["hidden_norm/scale"]], axis=-1) @ own["join/weight"]
  inside = {n.removeprefix("stack/layers/0/"): v[0] for n, v in own.items() if n.startswith("stack/")}
  return rms(layer(inside, joined, positions, documents)) * own["norm/scale"]


def rotated(x, positions):
  turns = 500000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
  keep = np.clip((32 * turns / (2 * np.pi) - 1) / 3, 0, 1)
  angle = positions[:, None, None] * turns * ((1 - keep) / 8 + keep)
  a, b = np.split(x, 2, axis=-1)
  return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def rms(x):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))
