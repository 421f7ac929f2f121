"""What a process that an elastic launcher started knows of the hosts of its run."""

import os

ALL_HOSTS, THIS_HOST = "MAXTEXT_HOSTS", "MAXTEXT_HOST"
"""Variables of the environment: how many hosts the whole run has, and which of them this is."""


def hosts_of_whole_run(live: int) -> int:
  """How many processes the run has when none is lost; `live` are there now."""
  text = os.environ.get(ALL_HOSTS, "")
  return max(int(text), live) if text.isdecimal() else live


def host_index(process: int) -> int:
  """Which of all hosts this is: processes are numbered anew when some are lost, and hosts are not."""
  text = os.environ.get(THIS_HOST, "")
  return int(text) if text.isdecimal() else process
