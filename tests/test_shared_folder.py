"""A run whose hosts do not share its folder ends within seconds, and says which do not see it."""

import socket
import sys

import pytest

from tests.support import TINY
from tests.test_agreement import ended, free_port, start

pytestmark = [pytest.mark.mesh, pytest.mark.slow]
KEYS = TINY | {"steps": 2, "base_num_decoder_layers": 1, "per_device_batch_size": 2, "enable_checkpointing": True,
               "run_name": "run", "enable_tensorboard": False}  # fmt: skip


@pytest.mark.parametrize("shared", [True, False])
def test_two_hosts(tmp_path, shared):
  """A relative folder, in two working folders or in one, is what a path is on hosts that mount it or do not."""
  homes = [tmp_path / name for name in (("a", "a") if shared else ("a", "b"))]
  words = [f"{key}={value}" for key, value in (KEYS | {"base_output_directory": "out"}).items()]
  command, port = [sys.executable, "-m", "maxtext.cli", "train", *words], free_port()
  for home in homes:
    home.mkdir(exist_ok=True)
  codes, said = ended([start(command, index, port, cwd=home) for index, home in enumerate(homes)], 300)
  if shared:
    assert codes == [0, 0], said
    assert [path.name for path in (tmp_path / "a/out/run").glob(".shared-*")] == []
    return
  assert codes == [1, 1], said
  for text in said:
    assert "is not one folder for all hosts of this run. What process 0 writes there is not seen within 10 s by" in text
    assert f"by process 1 ({socket.gethostname()}). Name a folder on storage that all hosts mount" in text
    assert "Traceback" not in text
