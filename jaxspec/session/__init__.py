"""Decodes the rows of a batch: prompts into rows, rounds, and texts out of them."""
