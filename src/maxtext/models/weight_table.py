"""How a family's Hugging Face weights correspond to its parameters."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Weight:
  """One parameter's name and layout in a Hugging Face file.

  Attributes:
    name: the tensor's name; `{layer}` counts the stacked layers of the parameter.
    transposed: the file holds [out, in]; ours is [in..., out...], the same numbers transposed and reshaped.
  """

  name: str
  transposed: bool = False
