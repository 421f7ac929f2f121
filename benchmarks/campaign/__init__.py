"""Faults, by the thousand: what is done to a run, a save, a conversion or a server, and what came of it.

`python -m benchmarks.campaign FAULT` continues a campaign from what `results.json` says was counted before.
"""
