"""Sharding: device meshes, named topologies, and the rules from logical axes to mesh axes."""
