"""Trained heads: small networks that draft from the target's hidden states, one folder for each kind."""
