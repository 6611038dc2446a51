"""Makes the papers' tables from exact counts of greedy texts: `python -m benchmarks.papers asd|adaspeed|s2d`.

Each module but `counts` measures a paper: `measure(bench)` returns `counts.Counts`, and `PAPER` has the paper's figures
and claims. The tables are a function of these counts alone.
"""
