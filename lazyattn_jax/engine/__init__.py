"""Requests, scheduling, work lists, jitted steps and sampling: everything between text and pool."""
