"""Logging: what a library user captures, and that the console of a command keeps its text, order and streams."""

import io
import logging
import os
import re
import subprocess
import sys

import pytest

from maxtext.logs import ON_STDERR, ConsoleHandler, setup_logging, write_now
from tests.flags import flags

TINY = [
  "steps=2",
  "dataset_type=synthetic",
  "base_emb_dim=16",
  "base_num_query_heads=2",
  "base_num_kv_heads=2",
  "head_dim=8",
  "base_mlp_dim=16",
  "base_num_decoder_layers=1",
  "vocab_size=64",
  "max_target_length=16",
  "per_device_batch_size=1",
  "run_name=a",
  "base_output_directory=out",
  "enable_checkpointing=false",
  "muon_beta=0.9",
]

CONSOLE = """\
maxtext: warning: muon_beta=0.9 has no effect without opt_type=muon. (An error with --strict.)
default: 3,888 parameters on 1 cpu (one device), 1 x 16 tokens a step, in out/a
step 1/2  loss 4.4081  grad norm 1.87  lr 3e-05  TIME s  RATE tokens/s
step 2/2  loss 4.0618  grad norm 1.74  lr 1.65e-05  TIME s  RATE tokens/s
maxtext: finished 2 steps in TIME s.
report: out/a/report.html
"""

# A program that has set up no logging, or its own.
LIBRARY = """
import logging
from maxtext.weights.resolve import resolve_source
if {own}:
  logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
resolve_source(None, {{"muon_beta": 0.9, "dataset_type": "synthetic"}}, False)
print(logging.getLogger("maxtext").handlers)
"""


def run(*command: str, **kwargs) -> str:
  done = subprocess.run(
    [sys.executable, *command], text=True, stdout=subprocess.PIPE, env=os.environ | flags(), check=True, **kwargs
  )
  return done.stdout


def test_the_console_of_a_command_is_byte_for_byte_as_written_here(tmp_path):
  out = run("-m", "maxtext.cli", "train", *TINY, cwd=tmp_path, stderr=subprocess.STDOUT)
  out = re.sub(r"in \d+ s\.", "in TIME s.", re.sub(r"[\d.]+ s  [\d,]+ tok", "TIME s  RATE tok", out))
  assert out == CONSOLE


@pytest.mark.parametrize("own", [False, True])
def test_a_library_user_sees_warnings_and_no_handler_is_added(own):
  warning = "maxtext: warning: muon_beta=0.9 has no effect without opt_type=muon. (An error with --strict.)\n"
  shown = f"WARNING maxtext.weights.resolve: {warning}" if own else warning
  assert run("-c", LIBRARY.format(own=own), stderr=subprocess.STDOUT) == f"{shown}[]\n"


def test_a_library_user_captures_records_and_keeps_the_console(monkeypatch, capsys):
  logger, kept = logging.getLogger("maxtext"), io.StringIO()
  monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(kept)])
  setup_logging()
  logging.getLogger("maxtext.data.dataloader").warning("data: ended")
  assert kept.getvalue() == "data: ended\n"
  assert capsys.readouterr() == ("", "")


def test_records_go_to_the_stream_that_they_name(monkeypatch, capsys):
  logger = logging.getLogger("maxtext")
  monkeypatch.setattr(logger, "handlers", [ConsoleHandler()])
  logging.getLogger("maxtext.a").info("100% on stdout")
  logging.getLogger("maxtext.b").info("on stderr", extra=ON_STDERR)
  assert capsys.readouterr() == ("100% on stdout\n", "on stderr\n")


def test_a_signal_within_a_write_may_write_itself():
  """As Ctrl-C does while a line is written: Python's buffer raises there."""
  reader, writer = os.pipe()

  class Interrupted(io.RawIOBase):
    signals = 1

    def writable(self):
      return True

    def fileno(self):
      return writer

    def write(self, data):
      if self.signals:
        self.signals -= 1
        with pytest.raises(RuntimeError, match="reentrant"):
          buffered.write(b"x" * 100_000)
        write_now(stream, "the handler's\n")
      return os.write(writer, data)

  buffered = io.BufferedWriter(Interrupted())
  stream = io.TextIOWrapper(buffered, line_buffering=True)
  write_now(stream, "the line\n")
  os.close(writer)
  with os.fdopen(reader) as found:
    assert {"the line\n", "the handler's\n"} <= set(found.readlines())


def test_a_program_without_the_stream_says_nothing(monkeypatch):
  """As where it is closed before the start (`2>&-`): Python has None in its place."""
  monkeypatch.setattr(sys, "stderr", None)
  record = logging.LogRecord("maxtext", logging.INFO, "", 0, "text", (), None)
  record.console = "stderr"
  ConsoleHandler().emit(record)


def test_modules_of_jax_log_where_the_user_asks(tmp_path):
  command = ["-m", "maxtext", "train", *TINY[:-1], "jax_debug_log_modules=jax._src.interpreters.pxla, absent"]
  errors = run(*command, cwd=tmp_path, stderr=subprocess.STDOUT)
  assert re.search(r"DEBUG \S+ \S+ jax._src.interpreters.pxla:\d+: Compiling jit\(train_step\)", errors)
  assert "dispatch" not in errors, "other modules do not"
