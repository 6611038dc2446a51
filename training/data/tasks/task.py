"""One task, and the words that several families share."""

from __future__ import annotations

import dataclasses

_words = str.split

NAMES = _words(
    "Tim Sam Lily Tom Sue Ben Mia Max Anna Jack Sara Lucy Amy Bob Jane Emma Mark Sally Leo Kate Billy Molly Joe Ella "
    "Fred Rose Jill John Mary Lucas Nina Peter Ruby Zoe Kim Jim Sarah Grace Toby Polly"
)
# No word begins with a vowel, so that "a" stands before any, also before one that an edit puts there.
THINGS = _words(
    "ball car doll kite box hat book cake bike boat flower toy drum truck spoon shoe stone key bell cup stick shell"
)
ANIMALS = _words("dog cat bird frog bear fox fish duck mouse rabbit lion pig cow horse monkey goat")
COLORS = _words("red blue green yellow pink purple white black brown gray")
PLACES = _words("park garden kitchen school forest river house shop farm beach barn hall")


@dataclasses.dataclass(frozen=True)
class Task:
    """A question and its only right answer.

    Attributes:
      prompt: what is read; it ends without a space.
      completion: what is to be written after it; it begins with a space or a line of its own.
      origin: what is asked, without what makes no difference to it, such as names: of tasks with the same origin,
        either all are held out or none is.
    """

    prompt: str
    completion: str
    origin: str
