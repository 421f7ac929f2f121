"""One process of three: 0 sends bytes to 1, in chunks, while 2 has nothing to do with it.

python -m tests.transfer_worker SIZE CHUNK
"""

import sys

import jax
import numpy as np

from maxtext.distributed import transfer
from maxtext.distributed.multihost import join
from tests.support import tiny

size, transfer.CHUNK = map(int, sys.argv[1:])
join(tiny())
own = jax.process_index()
expected = np.resize(np.arange(251, dtype=np.uint8), size)
if own == 2:
  print("waited for nobody", flush=True)
else:
  found = transfer.receive_from(0, {1}, size, expected if own == 0 else None)
  assert np.array_equal(found, expected)
  print(f"has {size} bytes as they were", flush=True)
