"""From configuration keys to execution: what runs a model on a mesh, beside what the model is.

`execution.py` composes the parts, one file each. Nothing here changes a `DecoderSpec`.
"""
