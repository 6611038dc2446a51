"""One task, and the words that several families share."""

from __future__ import annotations

import dataclasses

_words = str.split

NAMES = _words(
    "Tim Sam Lily Tom Sue Ben Mia Max Anna Jack Sara Lucy Amy Bob Jane Emma Mark Sally Leo Kate Billy Molly Joe Ella "
    "Fred Rose Jill John Mary Lucas Nina Peter Ruby Zoe Kim Jim Sarah Grace Toby Polly"
)
# Every word begins with a consonant, so that the article "a" is right before any word, also after an edit.
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
      prompt: the question; it does not end with a space.
      completion: the answer; it begins with a space or a line feed.
      origin: the question without the parts that do not matter, such as names. Tasks with the same origin are held
        out
        together.
    """

    prompt: str
    completion: str
    origin: str
