"""The one progress bar of a path, or of encoding: documents, gigabytes or tokens a second and what is left, over all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from maxsim_eval.bars import Bar
from maxsim_eval.printing import printable
from maxsim_eval.processes.world import World


class Progress:
    """Counts what this rank did; on the leader a bar on stderr shows all ranks together, with finished units of earlier runs.

    Every other rank tells the leader its counts by its `note`. Whether the disk is slow is judged by the leader's own times.
    """

    SLOW = "waiting for the disk"

    def __init__(self, name: str, documents: int, restored: int, world: World, quiet: bool) -> None:
        self.name, self.world, self.restored = name, world, restored
        self.documents = self.size = 0
        self._spent = [0.0, 0.0]  # seconds at the disk, and in all
        self.began = time.monotonic()
        self.bar = self._bar(documents, quiet or not world.leader)
        self._tell()

    def _bar(self, documents: int, hidden: bool) -> Bar:
        return Bar(
            total=documents,
            initial=self.restored,
            desc=printable(self.name),
            unit="doc",
            unit_scale=True,
            disable=hidden,
            leave=False,
        )

    def _rate(self, a_second: float) -> str:
        return f"{a_second / 1e9:.2f} GB/s"

    def tick(self, documents: int, size: int) -> None:
        """Count a scored block, its tokens' bytes in `size`; a failure of another rank is raised here."""
        self.documents += documents
        self.size += size
        self._tell()
        self.show()
        self.world.check()

    def spent(self, disk: float, total: float) -> None:
        """Count the seconds of a part: `total`, and those of it at the `disk`; if these are more than half, the bar says so."""
        self._spent = [self._spent[0] + disk, self._spent[1] + total]

    @property
    def _pace(self) -> str:
        disk, total = self._spent
        return f", {self.SLOW}" if total > 0 and disk > total / 2 else ""

    def _tell(self) -> None:
        self.world.note = f"{self.restored} {self.documents} {self.size} {self.name}"

    def show(self) -> None:
        """Draw the bar anew, now and then."""
        if self.bar.disable:
            return
        restored, documents, size = self.restored, self.documents, self.size
        for note in self.world.notes():
            parts = note.split(" ", 3)
            if parts[-1] == self.name:
                restored, documents, size = restored + int(parts[0]), documents + int(parts[1]), size + int(parts[2])
        self._draw(restored, documents, size)

    def _draw(self, restored: int, documents: int, size: int) -> None:
        self.bar.initial = restored
        seconds = max(time.monotonic() - self.began, 1e-9)
        self.bar.set_postfix_str(self._rate(size / seconds) + self._pace, refresh=False)
        self.bar.update(restored + documents - self.bar.n)

    def __enter__(self) -> Self:
        self.world.idle = self.show
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> Any:
        self.world.idle = None
        self.bar.close()


class EncodeProgress(Progress):
    """The bar of encoding: its sizes are tokens, and it stays. `name` tells this filling of the cache from every other."""

    SLOW = "the disk is slower than the model"

    def __init__(
        self, name: str, documents: int, restored: int, world: World, quiet: bool, *, label: str, unit: str = "documents"
    ) -> None:
        self.label, self.unit = label, unit
        super().__init__(name, documents, restored, world, quiet)

    def _bar(self, documents: int, hidden: bool) -> Bar:
        return Bar(
            total=documents, initial=self.restored, desc=printable(self.label) or None, unit=f" {self.unit}", disable=hidden
        )

    def _rate(self, a_second: float) -> str:
        return f"{a_second:,.0f} tokens/s"

    def settle(self, counts: Sequence[Sequence[Any]]) -> None:
        """Draw the end: every rank's documents and tokens, by rank (what follows them is not looked at).

        What ranks told before may be half a second old.
        """
        self.documents, self.size = (sum(count[part] for count in counts) for part in (0, 1))
        self._draw(self.restored, self.documents, self.size)
