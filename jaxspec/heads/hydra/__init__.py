"""Heads of Hydra and Hydra++: network, files, drafter, method."""
