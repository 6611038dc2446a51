"""Serves other programs: the HTTP server, batch files and lm-evaluation-harness.

The decoder imports nothing of this package. `lm_eval` needs the package that it is named after.
"""
