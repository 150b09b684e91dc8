"""What a Task holds without holding it whole in memory: texts in one buffer, page images opened one at a time.

Both are plain read-only sequences, which a Task uses like lists; they differ in the memory that a million items take.
"""

from __future__ import annotations

import hashlib
import io
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from maxsim_eval.errors import DataError, MissingPackageError

if TYPE_CHECKING:
    from PIL.Image import Image


class PackedTexts(Sequence[str]):
    """Texts as UTF-8 in one buffer and their ends: 8 bytes a text beside its own.

    A Python string costs 57 bytes beside its characters, and one dash outside Latin-1 doubles those. Indexing makes the string
    anew each time. Equal to any sequence of the same strings.
    """

    def __init__(self, texts: Sequence[str] = ()) -> None:
        self._buffer, self._ends = bytearray(), array("q", [0])
        for text in texts:
            self.append(text)

    def append(self, text: str) -> None:
        """Add one text; half a surrogate pair, which JSON can hold, is kept."""
        self._buffer += text.encode("utf-8", "surrogatepass")
        self._ends.append(len(self._buffer))

    @property
    def nbytes(self) -> int:
        """Bytes of texts and ends."""
        return len(self._buffer) + self._ends.itemsize * len(self._ends)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def _text(self, index: int) -> str:
        return self._buffer[self._ends[index] : self._ends[index + 1]].decode("utf-8", "surrogatepass")

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._text(row) for row in range(*index.indices(len(self)))]
        return self._text(range(len(self))[index])

    def __iter__(self) -> Iterator[str]:
        return (self._text(row) for row in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(mine == text for mine, text in zip(self, other))

    __hash__ = None  # type: ignore[assignment]  # it can grow

    def __repr__(self) -> str:
        return f"PackedTexts({len(self)} texts, {self.nbytes} bytes)"


_FORMATS = ("PNG", "JPEG")


class Pages(Sequence["Image"]):
    """Page images, each read and decoded whenever it is asked for, and not kept.

    Args:
        names: what to call each image in messages, in order.
        read: place of a name in `names` -> the bytes of its image file.
        rows: places in `names` that this view holds; default all.
    """

    def __init__(self, names: Sequence[str], read: Callable[[int], bytes], rows: Sequence[int] | None = None) -> None:
        self._names, self._read = names, read
        self._rows: Sequence[int] = range(len(names)) if rows is None else rows

    def select(self, rows: Sequence[int]) -> Pages:
        """The images at these places, as lazy as before."""
        return Pages(self._names, self._read, [self._rows[row] for row in rows])

    def item_parts(self, index: int) -> list[bytes]:
        """What the content hash is taken over: the image file's own bytes, so that nothing is decoded for it."""
        return [b"image file", hashlib.sha256(self._read(self._rows[index])).digest()]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Image: ...
    @overload
    def __getitem__(self, index: slice) -> Pages: ...
    def __getitem__(self, index: int | slice) -> Image | Pages:
        if isinstance(index, slice):
            return Pages(self._names, self._read, self._rows[index])
        row = self._rows[index]
        return _decode(self._names[row], self._read(row))

    def __repr__(self) -> str:
        return f"Pages({len(self)} images)"


def _decode(name: str, data: bytes) -> Image:
    """Raises DataError: bytes that are no whole image; the message names the page. MissingPackageError: no Pillow."""
    try:
        import PIL.Image
    except ImportError:
        raise MissingPackageError("opening page images", "pillow", "encoders") from None
    try:
        with PIL.Image.open(io.BytesIO(data), formats=_FORMATS) as image:  # decoders of other formats never run
            image.load()
            return image
    except PIL.UnidentifiedImageError:
        raise DataError(
            f"{name}: not a whole image (neither PNG nor JPEG); {len(data)} bytes, need a PNG or JPEG file"
        ) from None
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
        raise DataError(f"{name}: not a whole image ({error}); {len(data)} bytes, need a PNG or JPEG file") from error


def take(items: Sequence[Any], rows: Sequence[int]) -> Sequence[Any]:
    """The items at `rows`: a lazy view of lazy ones, else a list."""
    return items.select(rows) if isinstance(items, Pages) else [items[row] for row in rows]
