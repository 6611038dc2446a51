"""Measurements of models, methods and devices, and their commands. The decoder imports nothing of this package."""
