"""The costs of steps, the work of drafts, the times of rounds, and the speed-ups that follow from them."""
