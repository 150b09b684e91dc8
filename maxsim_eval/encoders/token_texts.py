"""What tokens stand for: word pieces by a tokenizer, patches of a page by a processor. Nothing is embedded here."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from maxsim_eval.types import PatchGrid

PATCH = "<patch>"  # stands for a token of a page image


def piece_texts(tokenizer: Any, ids: Sequence[int], *, image: int | None = None) -> list[str]:
    """The text of each token id: what the tokenizer makes of this piece alone, or the piece itself where that is blank."""
    pieces = tokenizer.convert_ids_to_tokens(list(ids))
    texts = []
    for number, piece in zip(ids, pieces, strict=True):
        text = PATCH if number == image else str(tokenizer.convert_tokens_to_string([piece]))
        texts.append(text if text.strip() else str(piece))
    return texts


def processor_ids(processor: Any, item: Any) -> list[int]:
    """Token ids of a text or page image, as a processor of pages gives them for it alone, padding dropped."""
    batch = processor(text=[item]) if isinstance(item, str) else processor(images=[item.convert("RGB")])
    ids, mask = list(batch["input_ids"][0]), list(batch["attention_mask"][0])
    return [int(number) for number, kept in zip(ids, mask, strict=True) if kept]


def image_token(processor: Any) -> int | None:
    """The id that stands for a patch of a page."""
    found = getattr(processor, "image_token_id", None)
    return found if isinstance(found, int) else None


def processor_grid(processor: Any, page: Any) -> PatchGrid | None:
    """The grid of a page's patches and the token it begins at; None where the processor does not say, or it is not in one piece.

    Sizes are read as sentence-transformers reads them for its own heat maps.
    """
    from sentence_transformers.multi_vector_encoder.interpretability import get_n_patches

    image = image_token(processor)
    try:
        columns, rows = get_n_patches(SimpleNamespace(processor=processor), page.size)
    except (NotImplementedError, ValueError):  # split pages, or nothing known about this processor
        return None
    places = [place for place, number in enumerate(processor_ids(processor, page)) if number == image]
    grid = PatchGrid(rows, columns, places[0] if places else 0)
    return grid if places == list(range(grid.first, grid.first + grid.patches)) else None
