"""A program in a real pseudo-terminal, and what is on its screen."""

import fcntl
import os
import re
import select
import struct
import subprocess
import termios
import time


class Terminal:
  """Starts a command with a terminal of so many columns as its controlling one.

  Attributes:
    output: the bytes that were written so far, as text.
  """

  def __init__(self, command, columns, **kwargs):
    self._leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    attributes = termios.tcgetattr(follower)
    attributes[3] |= termios.NOFLSH  # else Ctrl-C discards what was written and not yet read here
    termios.tcsetattr(follower, termios.TCSANOW, attributes)
    self.columns, self.output = columns, ""
    self.process = subprocess.Popen(
      command, stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
      preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0), **kwargs,
    )  # fmt: skip
    os.close(follower)

  def wait_for(self, pattern, seconds=120.0):
    """Reads until the output has this pattern, or until the program has closed the terminal."""
    deadline = time.monotonic() + seconds
    while not (found := re.search(pattern, self.output)):
      assert time.monotonic() < deadline, self.output
      if not self._read():
        break
    return found

  def press(self, keys):
    os.write(self._leader, keys.encode())

  def wait(self, seconds=120.0):
    """Reads to the end; returns the exit code."""
    self.wait_for(r"\Z(?!)", seconds)
    os.close(self._leader)
    return self.process.wait(30)

  def _read(self):
    if not select.select([self._leader], [], [], 1.0)[0]:
      return True
    try:
      read = os.read(self._leader, 65536)
    except OSError:  # the terminal is gone when its last process is
      return False
    self.output += read.decode(errors="replace")
    return bool(read)

  def drawn(self):
    """The texts of the status line, in order; the terminal may echo a Control-C in the midst of one."""
    return re.findall(r"\r\x1b\[K([^\r\n\x1b]+)\r(?!\n)", self.output.replace("^C", ""))

  def screen(self):
    """The lines as they stand in the end, wrapped where the terminal wraps; the last one has the cursor."""
    rows, column = [""], 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|.", self.output, re.DOTALL):
      if part == "\r":
        column = 0
      elif part == "\n":
        rows.append("")
      elif part == "\x1b[K":
        rows[-1] = rows[-1][:column]
      else:
        assert len(part) == 1, f"the terminal is told {part!r}"
        if column == self.columns:
          rows.append("")
          column = 0
        rows[-1] = rows[-1][:column].ljust(column) + part + rows[-1][column + 1 :]
        column += 1
    return rows
