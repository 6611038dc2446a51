"""The text: read, split, tokenised, packed."""
