"""The `gve` encoder: Granite Vision Embedding, pages and text queries, by the checkpoint's own code.

`ibm-granite/granite-vision-3.3-2b-embedding` brings its model and processor as Python files. They are run only where the
user says so (`trust_remote_code`), at a pinned commit. Nothing of them is used but the interface that the
model card shows: `AutoModel` and `AutoProcessor` with `trust_remote_code=True`; `processor.process_images(pages)` and
`processor.process_queries(texts)` give a mapping of tensors; `model(**batch)` gives L2-normalised embeddings
`[n, tokens, 128]` that are exactly zero at masked positions. The card's own versions are transformers 4.50 with
torchvision: with another version that code may not load, and the message then says what it raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from maxsim_eval.encoders.checkpoints import find_checkpoint, require_weights
from maxsim_eval.encoders.model_encoder import Kind, ModelEncoder, dtype_name, require, sort_kinds
from maxsim_eval.encoders.refused_items import surrogates_named
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.types import Role
from maxsim_kernels import Packed

CODE_VERSION = 1
MODEL = "ibm-granite/granite-vision-3.3-2b-embedding"
REVISION = "cee615db64d89d1552a4ee39c50f25c0fc5c66ca"  # the commit that mteb's model registry pins
DIM = 128  # the model card's


class GveEncoder(ModelEncoder):
    """Granite Vision Embedding (see the module's docstring).

    Args:
        model: folder of the checkpoint, or a hub id, the latter optionally with `@revision`.
        revision: of a hub id; default for the public model: a pinned commit.
        trust_remote_code: run the checkpoint's own code. Needed to encode, not to use embeddings that are cached.
        options: of `ModelEncoder`; dtype defaults to the model card's float16. The processor decides prompts and lengths.

    Raises:
        MissingPackageError: transformers or pillow is not installed.
        DataError: no such folder or model, or no network.
        UsageError: an option out of range, or one that means nothing here.
    """

    def __init__(
        self,
        model: str = MODEL,
        *,
        name: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        dtype: str = "float16",
        **options: Any,
    ) -> None:
        named = name or f"gve:{model}"
        require("transformers", named, "transformers")
        require("PIL", named, "pillow")
        pinned = REVISION if model == MODEL and revision is None else revision
        self._checkpoint = find_checkpoint(named, model, pinned, wide=True)
        super().__init__(name or f"gve:{self._checkpoint.shown}", dtype=dtype, **options)
        for option in ("max_query_tokens", "max_document_tokens", "query_prompt", "document_prompt"):
            if options.get(option) is not None:
                raise UsageError(f"{option}: got {options[option]!r}, but the processor of {self.name} decides that itself")
        self.revision = self._checkpoint.revision
        width = self._checkpoint.settings("config.json").get("emb_dim_doc", DIM)
        self.dim = width if isinstance(width, int) and width > 0 else DIM
        self._trusted = trust_remote_code
        self._model: Any = None
        self._processor: Any = None

    def fingerprint(self, role: Role) -> dict[str, Any]:
        """Everything but the items that decides the embeddings of this role."""
        return {
            "code": CODE_VERSION,
            "model": self._checkpoint.shown,
            "revision": self.revision,
            "dtype": dtype_name(self.dtype),
            "model_dtype": dtype_name(self.model_dtype),
        }

    def encode(self, items: Sequence[Any], role: Role) -> Packed:
        """Encode pages, or texts of queries: `Packed` `[tokens, dim]` on the CPU, one row per item; an empty text: none.

        Pages are converted to RGB (palettes looked up, an alpha channel dropped).

        Raises:
            UsageError: the checkpoint's code is not trusted, texts as documents, or no memory even for one item.
            DataError: code or weights that cannot be loaded, or that give something else than the interface says.
        """
        kinds = sort_kinds(items, self.name)
        if kinds["text"] and role == "document":
            raise UsageError(f"{self.name} reads page images as documents; item {kinds['text'][0]} is a text")
        rows = [torch.empty(0, self.dim)] * len(items)
        kind: Kind
        for kind, places in kinds.items():
            if not places:
                continue
            self._load()

            def forward(batch: list[int], kind: Kind = kind) -> list[torch.Tensor]:
                if kind == "text":
                    with surrogates_named(self.name, items):
                        ready = self._processor.process_queries([items[at] for at in batch])
                else:  # outside the lock: images are prepared while the GPU works
                    ready = self._processor.process_images([items[at].convert("RGB") for at in batch])
                with self.running:
                    return self._forward(ready, len(batch))

            for place, tokens in self.in_batches(kind, items, places, forward):
                rows[place] = tokens
        return self.hand_out(rows, self.dim)

    def _forward(self, batch: Mapping[str, Any], items: int) -> list[torch.Tensor]:
        """Tokens of each item of a processed batch, padding dropped."""
        moved = {key: value.to(self.device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
        found = self._model(**moved)
        if not isinstance(found, torch.Tensor) or found.dim() != 3 or (len(found), found.shape[2]) != (items, self.dim):
            got = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise DataError(f"{self.name}: the model gave {got}, need embeddings [{items}, tokens, {self.dim}]")
        mask = moved.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.shape == found.shape[:2]:
            kept = mask.bool()
        else:  # of a page the model hands on a part of the tokens only; masked ones are exactly zero
            kept = found.ne(0).any(dim=-1)
        return [tokens[keep] for tokens, keep in zip(found, kept)]

    def _load(self) -> None:
        with self.loading:
            if self._model is None:
                self._read()

    def _read(self) -> None:
        if not self._trusted:
            raise UsageError(
                f"encoder {self.name}: its checkpoint {self._checkpoint.shown} at {self.revision} brings Python code of its own, "
                "which is not run without --trust-remote-code. Read it first, or import embeddings computed elsewhere "
                "(evaluate.py import)."
            )
        classes = self._checkpoint.settings("config.json").get("auto_map") or {}
        elsewhere = sorted(str(place) for place in classes.values() if "--" in str(place))
        if elsewhere:
            raise self._checkpoint.refused(
                f"config.json: its code lies in another repository ({elsewhere[0]}), which no commit pins"
            )
        folder = self._checkpoint.weights(code=True)
        with self._checkpoint.loading("weights"):
            from transformers import AutoModel, AutoProcessor

            model, info = AutoModel.from_pretrained(
                str(folder),
                trust_remote_code=True,
                local_files_only=True,
                dtype=self.model_dtype,
                weights_only=True,
                output_loading_info=True,
            )
            self._processor = AutoProcessor.from_pretrained(str(folder), trust_remote_code=True, local_files_only=True)
        require_weights(self._checkpoint, info["missing_keys"])
        self._model = model.to(self.device).eval()
