"""Flax NNX models and their checkpoint loaders."""
