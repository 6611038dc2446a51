"""Heads of Kangaroo: network, files, drafter, method."""
