"""Look-ups in several steps and sums of three numbers, whose answers have no step in between.

The other families write each step, so that a token needs one look-up or one operation, which a few layers can do. Here
a token needs all of them at once: the word 4 to 8 look-ups away, or the result of two operations. Shorter chains are
among the questions, because a model learns them first.
"""

from __future__ import annotations

import random

from training.data.tasks.task import ANIMALS, COLORS, NAMES, PLACES, THINGS, Task

MOST_STEPS = 8
LARGEST = 99
_WORDS = (NAMES, THINGS, ANIMALS, COLORS, PLACES)


def make(chance: random.Random) -> Task:
    """Draws a ring of words with questions about it, or a list of sums, with equal probability."""
    return chance.choice((_ring, _sums))(chance)


def _ring(chance: random.Random) -> Task:
    """Makes a list of pairs, each word once as a first word and once as a second, and asks for later words.

    The words form a ring of 10 to 14 words, longer than any chain, so that no chain meets its beginning.
    """
    words = chance.sample([word for words in _WORDS for word in words], chance.randint(10, 14))
    pairs = [f"{word}: {words[(place + 1) % len(words)]}" for place, word in enumerate(words)]
    chance.shuffle(pairs)
    asked, answers = [], ""
    # Half of the questions need 4 to 8 steps.
    for place in chance.sample(range(len(words)), 6):
        steps = chance.choice((chance.randint(1, 3), chance.randint(4, MOST_STEPS)))
        asked.append(f"{words[place]} {steps}")
        answers += f"\n{asked[-1]}: {words[(place + steps) % len(words)]}"
    listed = "\n".join(pairs)
    return Task(f"{listed}\nSteps: {', '.join(asked)}", answers, listed)


def _sums(chance: random.Random) -> Task:
    """Makes 6 sums and differences of three numbers, with results from 2 to `LARGEST`."""
    lines: list[str] = []
    results: list[int] = []
    while len(lines) < 6:
        one, two, three = (chance.randint(2, chance.choice((30, LARGEST))) for _ in range(3))
        first, second = chance.choice("+-"), chance.choice("+-")
        result = one + (two if first == "+" else -two) + (three if second == "+" else -three)
        if 2 <= result <= LARGEST:
            lines.append(f"{one} {first} {two} {second} {three}")
            results.append(result)
    listed = "\n".join(lines)
    answers = "".join(f"\n{line} = {result}" for line, result in zip(lines, results, strict=True))
    return Task(f"{listed}\nResults:", answers, listed)
