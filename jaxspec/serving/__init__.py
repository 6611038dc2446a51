"""Serves other programs: the HTTP server, batch files, Ray and lm-evaluation-harness.

The decoder imports nothing of this package. `ray` and `lm_eval` need the package that they are named after.
"""
