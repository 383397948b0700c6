"""What listeners hear, twice, late and out of order: more than the runtime does to them.

The runtime tells each completion once, and ids rise; ``publishing.Outside`` judges that. ``PublishOnCheckpoint``
must not depend on it. So here everybody publishes, and between the runtime and each publisher stands a user who
keeps words back, repeats them and mixes them up; what is public in the end is judged as ever. All of it is drawn from a
generator of its own. Rules of docs/spec/listeners.md.
"""

from __future__ import annotations

import random
from typing import Literal

from headgate.sim.product.checkpoint_publication import Outside
from headgate.sim.product.run import Run

Word = tuple[Literal["complete", "aborted"], int]
"""What is said of which checkpoint."""

KEPT_RATE = 0.25
REPEATED_RATE = 0.3


class Disorder:
    """Stands between the runtime and one publisher.

    What was said of the final checkpoint is passed on at once: no later call could make up for it.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._kept: list[Word] = []
        self._said: list[Word] = []
        self.repeated = 0
        self.overtaken = 0

    def hear(self, word: Word, *, is_last: bool) -> list[Word]:
        """Take what the runtime says; return what the publisher is notified of now."""
        if not is_last and self._rng.random() < KEPT_RATE:
            self._kept.append(word)
            return []
        self.overtaken += len(self._kept)
        words = [*self._repeated(), word, *self._shuffled(), *self._repeated()]
        self._said += [word, *self._kept]
        self._kept = []
        return words

    def between(self) -> list[Word]:
        """Return what the publisher is notified of again directly after a barrier."""
        return self._repeated()

    def _repeated(self) -> list[Word]:
        if not self._said or self._rng.random() >= REPEATED_RATE:
            return []
        self.repeated += 1
        return [self._rng.choice(self._said)]

    def _shuffled(self) -> list[Word]:
        return self._rng.sample(self._kept, len(self._kept))


class ListeningRun(Run):
    """Everybody publishes, and is informed out of order."""

    SUBJECT = "disorder"

    def _draw(self) -> None:
        self.disorders: list[Disorder] = []
        self.settings.fix_input()  # what is added would not be read
        outside = self.settings.outside
        if outside is None:
            outside = self.settings.outside = Outside(self.seed, self.tasks, self.faults, lambda: self.history)

        def disorder() -> Disorder:
            self.disorders.append(Disorder(self.rng))
            return self.disorders[-1]

        outside.disorder = disorder
