"""Ahead-of-time compilation of a model and a method for accelerators that this machine does not have."""
