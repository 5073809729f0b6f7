"""Attention over the pool for TPUs, in Pallas Mosaic TPU."""
