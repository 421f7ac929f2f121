"""Atomic writes of files and folders, on disks and in object stores."""
