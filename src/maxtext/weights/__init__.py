"""Weights from and to Hugging Face folders, through each family's weight table."""
