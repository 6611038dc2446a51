"""Measurements of a run: evaluation, metrics, curves and cards."""
