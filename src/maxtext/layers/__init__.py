"""Building blocks of models. They take a small spec (what) and an `ExecutionConfig` (how), never the configuration."""
