"""Attention over a paged KV pool with the position correction inside the kernel."""
