"""How much arithmetic a model asks for, by the usual count."""

from maxtext.models.model import Model


def train_flops_per_token(model: Model, length: int) -> float:
  """Floating-point operations per token of a train step, recomputation not counted.

  Six for each weight that takes part in a product (two forward, four backward), which leaves out the input embedding
  unless it is the head too; and for attention 12 x heads x head_dim x (length / 2) per layer, or the window where it is
  shorter, since a query sees half of a causal sequence on average.
  """
  structs = model.params | model.buffers
  weights = sum(a.size for path, a in structs.items() if path.endswith("/weight"))
  if model.spec.tied:
    weights += structs["embedding/table"].size
  attention = sum(
    group.repeats * 12 * block.mixer.attention_width * _seen(block.mixer.window, length)
    for group in model.spec.groups
    for block in group.cycle
  )
  return 6.0 * weights + attention


def _seen(window: int | None, length: int) -> float:
  return min(window or length, length / 2)
