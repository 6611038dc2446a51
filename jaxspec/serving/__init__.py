"""Serves other programs: the HTTP server and batch files.

The decoder imports nothing of this package.
"""
