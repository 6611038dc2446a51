"""Adapters of Uno: network, files, drafter, method."""
