"""What embeddings were imported from: names and SHA-256 of files and sets of files, for keys and provenance."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from maxsim_eval.bars import Bar
from maxsim_eval.hashing import canonical, feed
from maxsim_eval.importing.many_files import FileRows
from maxsim_eval.importing.tables import Imported, ImportedSide
from maxsim_eval.printing import printable
from maxsim_eval.types import Role


@dataclass(frozen=True)
class Origin:
    """What a side was made from, as keys and provenance keep it."""

    name: str
    sha256: str
    beside: dict[str, str]  # the ending of a sibling's name -> its SHA-256
    count: int


def origins_of(merged: Imported, quiet: bool) -> dict[Role, Origin]:
    """Read every file once for its SHA-256."""
    digests: dict[Path, str] = {}  # a file that holds both roles is read once
    sides = merged.sides.items()
    several = len({file for _, side in sides for file in side.files}) > len(sides) * 4
    files = [file for _, side in sides for file in side.files if file not in digests]
    with Bar(total=len(files), desc="hashing", unit="files", disable=quiet or not several, delay=1) as bar:
        for file in files:
            if file not in digests:
                digests[file] = _sha256(file, quiet or several)
            bar.update()
    return {role: _origin(side, digests) for role, side in sides}


def _origin(side: ImportedSide, digests: Mapping[Path, str]) -> Origin:
    name = Path(side.origin).name
    if not isinstance(side.rows, FileRows):
        file, *siblings = side.files
        # A npy or safetensors file may carry offsets or ids beside it: they decide the tokens as much as the file does.
        beside = {sibling.name.removeprefix(file.stem): digests[sibling] for sibling in siblings}
        return Origin(name, digests[file], beside, 1)
    # The order of the files and the ids of the rows decide which row is what; the names of chunks do not.
    digest = hashlib.sha256(canonical([len(side.files), side.ids is not None]))
    feed(digest, [digests[file].encode() for file in side.files])
    feed(digest, [text.encode() for text in side.ids or ()])
    return Origin(name, digest.hexdigest(), {}, len(side.files))


def names_and_digests(origin: Origin) -> list[tuple[str, str]]:
    """Name and SHA-256 of what a side was made from."""
    stem = Path(origin.name).stem
    return [(origin.name, origin.sha256), *((f"{stem}{ending}", digest) for ending, digest in origin.beside.items())]


def _sha256(path: Path, quiet: bool) -> str:
    digest = hashlib.sha256()
    with (
        open(path, "rb") as handle,
        Bar(
            total=path.stat().st_size, desc=f"hashing {printable(path.name)}", unit="B", unit_scale=True, disable=quiet, delay=1
        ) as bar,
    ):
        while block := handle.read(8 << 20):
            digest.update(block)
            bar.update(len(block))
    return digest.hexdigest()
