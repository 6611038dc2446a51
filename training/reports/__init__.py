"""What is measured, written down and drawn."""
