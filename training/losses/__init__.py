"""What training minimises, as pure functions."""
