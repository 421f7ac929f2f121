"""Names of the specification; what they run is elsewhere (`cli/forwarding.py`)."""
