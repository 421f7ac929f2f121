"""The form of a section: a frozen group of keys that belong together."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
  """Keys are flat for the user; sections only group them for the reader."""

  model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
