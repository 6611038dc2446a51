"""Training losses, as pure functions."""
