"""Rewards of programs: `reward_functions=[code]` runs what an answer says with the tests of its task."""

import json
import logging
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from maxtext.configs import ConfigError
from maxtext.rl.code_sandbox import ISOLATED, OTHER_USER
from maxtext.rl.reward_process import MOST_PROCESSES

_LOG = logging.getLogger(__name__)
_SANDBOX = str(Path(__file__).with_name("code_sandbox.py"))
_START_SECONDS = 60.0  # to start Python on a busy machine; the limit of the program counts from there
_VARIABLES = {"PATH": os.defpath, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


class CodeRunner:
  """Runs programs, each in a process of its own with limits (`code_sandbox.py`).

  Args:
    seconds: for a program with its tests.
    memory: bytes, of each process.
    extract_answer: what the marks of a solution hold; None where there are none.

  Raises:
    ConfigError: this machine cannot isolate programs, or not run Python in isolation.
  """

  def __init__(self, seconds: float, memory: int, extract_answer: Callable[[str], str | None]) -> None:
    self._seconds, self._memory, self._extract_answer = seconds, memory, extract_answer
    self.failures = 0
    isolation, is_passed = self._run("import collections, math, random", "")
    if isolation not in (ISOLATED, OTHER_USER):
      raise ConfigError(
        "reward_functions=[code] runs programs in namespaces of users, which this machine does not permit, or as root, "
        "by a user of their own: permit user namespaces (sysctl user.max_user_namespaces), or leave it out."
      )
    if not is_passed:
      raise ConfigError(
        f"reward_functions=[code]: a program that imports modules of Python does not pass. code_memory_gb may be too "
        f"small, code_timeout too short, or {sys.prefix} not readable for other users."
      )
    if isolation == OTHER_USER:
      _LOG.warning(
        "maxtext: reward_functions=[code]: this machine permits no namespaces, so programs, by a user of their own, "
        "have the network, and read what all users may."
      )

  def __call__(self, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """1 for each completion whose program passes the tests, which are the answer of its task."""
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_PROCESSES)) as pool:
      return list(pool.map(self._reward, completions, answers))

  def _reward(self, completion: str, tests: str) -> float:
    code = find_code(completion)
    code = self._extract_answer(completion) if code is None else code
    return float(code is not None and self.passes(code, tests))

  def passes(self, code: str, tests: str) -> bool:
    """Whether the tests run to their end after the code. A program that could not be started has failed, and is counted
    in `failures`."""
    try:
      isolation, is_passed = self._run(code, tests)
      problem = "" if isolation in (ISOLATED, OTHER_USER) else "it could not be isolated, or Python did not start"
    except OSError as error:
      problem, is_passed = str(error), False
    if problem:
      self.failures += 1
      _LOG.warning(f"maxtext: reward_functions=[code]: a program was not run: {problem}.")
    return is_passed

  def _run(self, code: str, tests: str) -> tuple[bytes, bool]:
    """How the program was isolated, and whether it passed."""
    word = secrets.token_hex()
    given = {"code": code, "tests": tests, "seconds": self._seconds, "bytes": self._memory, "word": word}
    reads, writes = os.pipe()
    thrown_away = tempfile.TemporaryDirectory(prefix="maxtext-code-", ignore_cleanup_errors=True)
    with thrown_away as folder, open(reads, "rb") as status:
      try:
        subprocess.run(
          [sys.executable, "-I", _SANDBOX, str(writes)],
          input=json.dumps(given).encode(),
          stdout=subprocess.DEVNULL,
          stderr=subprocess.DEVNULL,
          pass_fds=[writes],
          timeout=self._seconds + _START_SECONDS,
          start_new_session=True,
          cwd=folder,
          env=_VARIABLES | {"HOME": folder, "TMPDIR": folder},
          check=False,
        )
      except subprocess.TimeoutExpired:
        return b"", False
      finally:
        os.close(writes)
      said = os.read(status.fileno(), 1000)
    return said[:1], said[1:] == word.encode()


def find_code(completion: str) -> str | None:
  """The last block of Python that is fenced by ```; None if there is none."""
  parts = completion.split("```")
  for block in reversed(parts[1:-1:2]):
    language, _, code = block.partition("\n")
    if language.strip().lower() in ("python", "py", "python3"):
      return code
  return None
