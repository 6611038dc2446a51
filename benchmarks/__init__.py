"""Research scripts that measure what the README and the model cards state; no part of the wheel."""
