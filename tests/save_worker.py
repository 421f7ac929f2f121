"""One process of two that saves an array of which each holds a half: good, spoilt on process 1 alone, and good again.

With losses, each step has an evaluation loss, and the rest of them are of steps that another writer saves, as after a
restart; 0 stands for no evaluation.

python -m tests.save_worker FOLDER [LOSS ...]
"""

import sys

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtext.checkpoint.metadata import Criterion
from maxtext.checkpoint.options import checkpoint_options
from maxtext.checkpoint.writer import Writer
from maxtext.distributed.multihost import join
from tests.support import tiny

config = tiny(enable_checkpointing=True, max_num_checkpoints_to_keep=1)
join(config)
halves = NamedSharding(Mesh(np.array(jax.devices()), "x"), PartitionSpec("x"))
losses = [float(loss) or None for loss in sys.argv[2:]] or [None] * 3


def save(steps):
  writer = Writer(checkpoint_options(config), epath.Path(sys.argv[1]), {})
  for step in steps:
    spoilt = step == 2 and jax.process_index() == 1
    part = np.full(4, np.nan if spoilt else step, np.float32)
    state = {"params": jax.make_array_from_callback((8,), halves, lambda _, part=part: part)}
    writer.save(step, state, {}, Criterion().score(losses[step - 1]))
    writer.wait()
    print(f"after step {step} the last is {writer.last}", flush=True)
  writer.close()


save(range(1, 4))
if losses[3:]:
  save(range(4, len(losses) + 1))
