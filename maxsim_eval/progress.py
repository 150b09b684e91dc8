"""The one progress bar of a path: documents a second, gigabytes a second and what is left, over all ranks."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from tqdm import tqdm

from maxsim_eval.distributed import World


class Progress:
    """Counts what this rank did; on the leader a bar on stderr shows the whole, finished units of earlier runs as already there.

    Every other rank tells the leader its counts by its `note`.
    """

    def __init__(self, name: str, documents: int, restored: int, world: World, quiet: bool) -> None:
        self.name, self.world, self.restored = name, world, restored
        self.documents = self.size = 0
        self.began = time.monotonic()
        hidden = quiet or not world.leader
        self.bar = tqdm(total=documents, initial=restored, desc=name, unit="doc", unit_scale=True, disable=hidden, leave=False)
        self._tell()

    def tick(self, documents: int, size: int) -> None:
        """Count a scored block, its tokens' bytes in `size`; a failure of another rank is raised here."""
        self.documents += documents
        self.size += size
        self._tell()
        self.show()
        self.world.check()

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
        self.bar.initial = restored
        seconds = max(time.monotonic() - self.began, 1e-9)
        self.bar.set_postfix_str(f"{size / seconds / 1e9:.2f} GB/s", refresh=False)
        self.bar.update(restored + documents - self.bar.n)

    def __enter__(self) -> Progress:
        self.world.idle = self.show
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> Any:
        self.world.idle = None
        self.bar.close()
