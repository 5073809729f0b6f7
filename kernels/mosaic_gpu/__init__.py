"""Attention over the pool for NVIDIA Hopper, in Pallas Mosaic GPU."""
