"""Errors of the operating system that speak of storage and not of a file: it is full, it fails, it does not answer."""

import errno

OF_STORAGE = frozenset(
  getattr(errno, name)
  for name in ("ENOSPC", "EDQUOT", "EIO", "ETIMEDOUT", "ESTALE", "EROFS", "EINTR", "ENOLINK", "ECONNRESET", "ENOTCONN")
  if hasattr(errno, name)
)
"""What may go away without anything in the run being changed."""
