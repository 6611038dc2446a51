"""Linear probes of early exits: training examples, fit, evaluation."""
