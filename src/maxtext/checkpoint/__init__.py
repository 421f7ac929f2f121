"""What a run keeps, and how it comes back: one state, the data's position and a record of both, in atomic steps.

It knows pytrees, names and folders, and no trainer.
"""
