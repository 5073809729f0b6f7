"""Benchmarks: ``python -m lazyattn_jax.bench``."""
