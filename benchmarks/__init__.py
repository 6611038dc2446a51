"""Research scripts for the measurements in the README and the model cards; not a part of the wheel."""
