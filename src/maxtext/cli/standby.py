"""Waits, with all that a run imports, for a line of JSON that says what to run: `python -m maxtext.cli.standby`."""

import json
import os
import signal
import sys

from maxtext.cli.main import main
from maxtext.cli.platform import leave_out_absent_accelerators, quiet_libraries
from maxtext.distributed.heartbeat import start_heartbeat


def _stand_by() -> int:
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  start_heartbeat()
  leave_out_absent_accelerators(os.environ)
  quiet_libraries(os.environ)
  import maxtext.checkpoint.local
  import maxtext.checkpoint.restore
  import maxtext.checkpoint.writer
  import maxtext.rl.run  # noqa: F401

  request = json.loads(sys.stdin.readline() or "null")
  if request is None:
    return 0
  os.environ |= request["environment"]
  return main(request["arguments"])


if __name__ == "__main__":
  sys.exit(_stand_by())
