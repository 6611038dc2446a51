"""A list of labelled words, then the same words again, asked for in another order.

Nothing but look-ups, a dozen in one answer: what a small model must be able to do before it answers questions about
facts, and does not learn from them alone, where one token in ten is looked up.
"""

from __future__ import annotations

import random

from training.data.tasks.task import ANIMALS, COLORS, NAMES, PLACES, THINGS, Task

MOST = 14


def make(chance: random.Random) -> Task:
    """Draws a list of 2 to 14 words with a word beside each, and asks for all of them in another order."""
    keys, values = chance.sample((NAMES, THINGS, ANIMALS, COLORS, PLACES, range(2, 100)), 2)
    count = min(chance.randint(2, MOST), len(keys), len(values))
    label = dict(zip(chance.sample(keys, count), chance.sample(values, count), strict=True))
    asked = chance.sample(list(label), count)
    lines = "\n".join(f"{key}: {value}" for key, value in label.items())
    order = ", ".join(map(str, asked))
    return Task(f"{lines}\nIn this order: {order}", "".join(f"\n{key}: {label[key]}" for key in asked), lines)
