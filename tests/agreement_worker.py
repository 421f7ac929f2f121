"""Two processes that join once and compare many things of which process 1 has another; process 0 says what it found.

python -m tests.agreement_worker FOLDERS KEY...     FOLDERS (a,b) hold the data of each; one key differs at a time
"""

import json
import sys
from typing import Any

import jax

from maxtext import ConfigError, MaxTextConfig
from maxtext.distributed.agreement import agree
from maxtext.distributed.multihost import join
from maxtext.mesh.devices import make_mesh
from maxtext.training.consistency import configuration_values, data_values, step_values
from maxtext.training.program import Program
from tests.support import tiny
from tests.test_every_key import other_values

SMALL = {"base_num_decoder_layers": 1, "per_device_batch_size": 2}


def changed(config: MaxTextConfig, key: str) -> MaxTextConfig:
  """The configuration with another value of a key."""
  values = [*other_values(key), MaxTextConfig.model_fields[key].get_default(call_default_factory=True)]
  return config.model_copy(update={key: next(value for value in values if value != getattr(config, key))})


def compare(name: str, values: dict[str, str]) -> str:
  try:
    agree(name, values, 60)
  except ConfigError as error:
    return str(error)
  return ""


def program(**keys: Any) -> Program:
  own = tiny(**SMALL, **keys)
  return Program.of(own, make_mesh(own))


if __name__ == "__main__":
  folders, *keys = sys.argv[1:]
  config = tiny(**SMALL)
  join(config)
  second = jax.process_index() == 1
  found = {"nothing": compare("nothing", configuration_values(config) | step_values(program()))}
  for key in keys:
    found[key] = compare(key, configuration_values(changed(config, key) if second else config))
  found["the lowered step"] = compare("step", step_values(program(adam_b1=0.5 if second else 0.9)))
  if folders != "-":
    data = {"dataset_type": "grain", "grain_train_files": folders.split(",")[second], "tokenize_train_data": False,
            "tokenizer_path": "", "vocab_size": 1024}  # fmt: skip
    found["data"] = compare("data", data_values(next(program(**data).feed())))
  if not second:
    print(f"found {json.dumps(found)}", flush=True)
