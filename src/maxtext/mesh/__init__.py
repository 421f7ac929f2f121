"""Where arrays live: device meshes, named topologies, and the table from named dimensions to mesh axes."""
