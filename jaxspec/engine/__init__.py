"""Text in, text out: everything between a user and the compiled loop."""
