"""Linear probes of early exits: gathered, fitted, judged."""
