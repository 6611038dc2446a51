"""Loads models and drafts to their devices."""
