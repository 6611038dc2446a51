"""Turns text into requests for the compiled loop, and its tokens into text."""
