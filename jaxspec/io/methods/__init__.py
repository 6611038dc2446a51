"""Files that belong to drafting methods.

- `method_files`: skip plans, the numbers of ASD, probes, thresholds.
- `asd_numbers`: defaults and ranges of the numbers of ASD.
- `acceptance_file`: acceptance rates that the training of a head measured.
- `cost_files`: measured step costs in the user's cache.
- `vocabulary_file`: the frequent tokens of a model.
"""
