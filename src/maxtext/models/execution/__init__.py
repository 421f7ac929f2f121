"""From configuration keys to an `ExecutionConfig`: how a model runs on a mesh.

`execution.py` composes the parts, which have one file each. Nothing here changes a `DecoderSpec`.
"""
