"""The processes of one run: joining them, what they agree on, starting and supervising them, and being asked to end."""
