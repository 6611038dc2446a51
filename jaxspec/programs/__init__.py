"""Compiles, stores and runs the programs of a model, and counts their memory."""
