"""Reinforcement learning: prompts with answers, rollouts by the engine, rewards, advantages, and the run."""
