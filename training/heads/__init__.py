"""Training of heads that draft: `python -m training.heads`."""
