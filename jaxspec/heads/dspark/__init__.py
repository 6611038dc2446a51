"""Heads of DSpark, by their differences from DFlash: network, files, drafter, method."""
