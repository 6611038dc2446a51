"""Heads of DFlash: network, files, drafter, method."""
