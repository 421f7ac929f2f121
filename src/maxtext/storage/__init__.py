"""Files and folders that are whole or not there, on disks and in object stores."""
