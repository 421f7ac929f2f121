"""What hangs on the loop from outside."""
