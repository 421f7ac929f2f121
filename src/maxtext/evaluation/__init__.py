"""Evaluation of trained models: perplexity, tasks from files, and those of lm-eval."""
