"""Reads, splits, tokenises and packs the training text."""
