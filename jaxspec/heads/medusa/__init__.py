"""Heads of Medusa: network, files, drafter, method."""
