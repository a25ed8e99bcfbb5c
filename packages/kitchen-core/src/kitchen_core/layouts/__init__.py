"""Byte orders of other toolkits, as pure functions to and from the canonical tensors of our formats.

One module per dialect, each both ways; nothing here reads files or knows checkpoints.
"""
