"""The `hf:<id or path>` encoder: token embeddings of any transformer that `AutoModel` loads, as late interaction uses them.

A text's tokens are the last hidden states of its word pieces, special tokens and padding dropped, each L2-normalised in
float32. Nothing is trained for MaxSim here: it is a baseline on real contextual embeddings, and a source of realistic
inputs. Code inside a checkpoint is never run (`trust_remote_code=False`), and weights are read without pickle's powers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import torch

from maxsim_eval.encoders.checkpoints import find_checkpoint, require_weights
from maxsim_eval.encoders.model_encoder import ModelEncoder, dtype_name, require, sort_kinds
from maxsim_eval.encoders.refused_items import surrogates_named
from maxsim_eval.encoders.text_batches import Read
from maxsim_eval.encoders.token_texts import piece_texts
from maxsim_eval.encoders.unpadded import before_first, first_position
from maxsim_eval.encoders.word_pieces import MANY, Pieces, fast_pieces, margins, some_of
from maxsim_eval.errors import UsageError
from maxsim_eval.types import Role
from maxsim_kernels import Packed

CODE_VERSION = 1
MAX_DOCUMENT_TOKENS = 256
MAX_QUERY_TOKENS = 64


class HfEncoder(ModelEncoder):
    """Contextual token embeddings of a Hugging Face checkpoint, L2-normalised (see the module's docstring).

    Configuration and tokenizer are read at once, so that a wrong name fails before any work; the weights are loaded by the
    first `encode`, so that a full cache needs none of them.

    Args:
        model: folder of a checkpoint, or a hub id, the latter optionally with `@revision`.
        revision: branch, tag or commit of a hub id; the commit it means is recorded.
        options: of `ModelEncoder`. max_query_tokens and max_document_tokens count the prompt but no special tokens; default
            64 and 256, or what the model's positions allow. Prompts default to none.

    Raises:
        MissingPackageError: transformers is not installed.
        DataError: no such folder or model, no network, a checkpoint that cannot be read.
        UsageError: an option out of range, or a model that has no encoder-only form.
    """

    def __init__(self, model: str, *, revision: str | None = None, **options: Any) -> None:
        named = f"hf:{model}"
        require("transformers", named, "transformers")
        self._checkpoint = find_checkpoint(named, model, revision)
        if (
            self._checkpoint.folder / "adapter_config.json"
        ).is_file():  # with peft installed it would be applied, and the cache key would not show it
            raise self._checkpoint.refused(
                "adapter_config.json: an adapter beside or without its model; need a whole checkpoint"
            )
        super().__init__(f"hf:{self._checkpoint.shown}", **options)
        self.revision = self._checkpoint.revision
        self._config = self._load("AutoConfig", "configuration")
        if getattr(self._config, "is_encoder_decoder", False):
            kind = self._config.model_type
            raise UsageError(f"{named}: a {kind} model has encoder and decoder; need an encoder or a decoder")
        self._tokenizer = self._load("AutoTokenizer", "tokenizer")
        self.dim = int(self._config.get_text_config().hidden_size)
        self.max_tokens: dict[str, int] = {
            "query": self._limit("query", MAX_QUERY_TOKENS),
            "document": self._limit("document", MAX_DOCUMENT_TOKENS),
        }
        self._model: Any = None
        self._ids: int | None = None  # token ids that the weights have embeddings for; None: not known

    def _load(self, loader: str, what: str, **options: Any) -> Any:
        folder = self._checkpoint.weights() if what == "weights" else self._checkpoint.folder
        with self._checkpoint.loading(what):
            import transformers

            return getattr(transformers, loader).from_pretrained(
                str(folder), trust_remote_code=False, local_files_only=True, **options
            )

    def _limit(self, role: Role, default: int) -> int:
        """Tokens kept of a text: what was asked or the default, within the model's positions."""
        config, special = self._config.get_text_config(), self._tokenizer.num_special_tokens_to_add()
        reads = self._model_max_length()
        positions = getattr(config, "max_position_embeddings", None) or 0
        if positions > 0:  # else the architecture has no such limit
            reads = min(int(positions) - before_first(config), reads)
        room = reads - special
        if room < 1:
            raise self._checkpoint.refused(
                f"it reads {reads} tokens (model_max_length of tokenizer_config.json, positions of config.json), which leaves none to "
                f"a text beside its {special} special ones; need {special + 1} or more"
            )
        asked = self.asked_tokens[role]
        if asked is not None and asked > room:
            raise UsageError(f"max_{role}_tokens: got {asked}, but {self.name} reads at most {room} tokens of a text")
        return min(asked or default, room)

    def _model_max_length(self) -> int:
        """The tokenizer's limit; without one in its files, a number that no text reaches."""
        length = self._tokenizer.model_max_length
        try:
            return int(length)
        except (TypeError, ValueError, OverflowError) as error:
            reason = f"tokenizer_config.json: model_max_length is {length!r}, need a whole number"
            raise self._checkpoint.refused(reason) from error

    def fingerprint(self, role: Role) -> dict[str, Any]:
        """Everything but the texts that decides the embeddings of this role."""
        facts = {
            "code": CODE_VERSION,
            "model": self.name,
            "revision": self.revision,
            "layer": "last",
            "special_tokens": "dropped",
            "normalize": True,
            "prompt": self.prompts[role] or "",
            "dtype": dtype_name(self.dtype),
            "max_tokens": self.max_tokens[role],
        }
        if self.model_dtype != torch.float32:  # absent else, so that caches made before it was an option are found
            facts["model_dtype"] = dtype_name(self.model_dtype)
        return facts

    def encode(self, items: Sequence[Any], role: Role) -> Packed:
        """Encode texts: `Packed` `[tokens, dim]` on the CPU, one row per text; an empty text gives an empty row.

        Raises:
            UsageError: an item that is not text, or no memory even for one text at a time.
            DataError: weights that are missing, damaged or those of another architecture; a text with a lone surrogate; embeddings that
                are not finite.
        """
        kinds = sort_kinds(items, self.name)
        if kinds["page"]:
            raise UsageError(f"{self.name} reads text; item {kinds['page'][0]} is a page image")
        with self.reading, self._checkpoint.loading("tokenizer", "used"), surrogates_named(self.name, items):
            listed = self._listed([str(item) for item in items], role)
        if kinds["text"]:
            self._loaded_model()  # the model tells whether texts are padded, and how many ids there are
        blank = np.setdiff1d(np.arange(len(items)), kinds["text"])  # such a text has no token, even where there is a prompt
        with self._checkpoint.loading("tokenizer", "used"):
            pieces, special = listed()
        return self.texts.run(self._read(pieces, special, blank), self.dim, self._forward)

    def token_texts(self, item: Any, role: Role) -> list[str]:
        """The word piece of each token of a text, in order: what the tokenizer alone says, no weights are read."""
        if sort_kinds([item], self.name)["text"] == []:
            return []
        with self._checkpoint.loading("tokenizer", "used"):
            (ids,), (special,) = self._tokenize([item], role)
        return piece_texts(self._tokenizer, [one for one, flag in zip(ids, special) if not flag])

    def _tokenize(self, texts: Sequence[str], role: Role) -> tuple[list[list[int]], list[list[int]]]:
        if not texts:
            return [], []
        encoded = self._tokenizer(
            [f"{self.prompts[role] or ''}{text}" for text in texts],
            truncation=True,
            max_length=self.max_tokens[role] + self._tokenizer.num_special_tokens_to_add(),
            padding=False,
            return_attention_mask=False,
            return_special_tokens_mask=True,
        )
        return encoded["input_ids"], encoded["special_tokens_mask"]

    def _listed(self, texts: list[str], role: Role) -> Callable[[], tuple[Pieces, np.ndarray]]:
        """A function that gives all pieces, and a `[sum]` bool of special ones; a faster way is taken where it gives the same."""
        if len(texts) > MANY:
            some = some_of(texts)
            asked, special = self._tokenize([texts[row] for row in some], role)
            around = margins(special)
            if around is not None and sum(around) == self._tokenizer.num_special_tokens_to_add():
                prompted = [f"{self.prompts[role] or ''}{text}" for text in texts]
                found = fast_pieces(self._tokenizer, prompted, some, asked, self.reading, self.readers)
                if found is not None:
                    return lambda: _with_margins(found, *around)
        ids, special = self._tokenize(texts, role)
        return lambda: (Pieces.of(ids), np.fromiter(chain.from_iterable(special), bool))

    def _read(self, pieces: Pieces, special: np.ndarray, blank: np.ndarray) -> Read:
        """Model inputs `[n, longest]`; `kept`: pieces that are not special. Texts without these, or `blank`, get length 0."""
        pad = self._tokenizer.pad_token_id or 0  # any valid id: the attention mask hides it
        pad = 0 if self._ids is not None and pad >= self._ids else pad
        kept = pieces.laid_out(~special, fill=False)
        lengths = np.where(kept.any(1), pieces.lengths, 0)
        lengths[blank] = 0
        highest = int(pieces.ids.max(initial=-1)) if lengths.any() else -1
        if self._ids is not None and highest >= self._ids:  # else an index out of range, which on a GPU ends the process
            raise self._checkpoint.refused(
                f"its tokenizer (tokenizer.json) gives token id {highest}, and its weights have embeddings for 0 to {self._ids - 1}: "
                "they belong to different models"
            )
        features = {
            "input_ids": pieces.laid_out(pieces.ids, pad),
            "attention_mask": pieces.filled().astype(np.int64),
            "kept": kept,
        }
        return Read({name: torch.from_numpy(values) for name, values in features.items()}, lengths)

    def _forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        kept = batch.pop("kept")
        states = self._loaded_model()(**batch).last_hidden_state
        return torch.nn.functional.normalize(states.float(), dim=-1), kept

    def _loaded_model(self) -> Any:
        with self.loading:
            if self._model is not None:
                return self._model
            model, info = self._load(
                "AutoModel",
                "weights",
                config=self._config,
                dtype=self.model_dtype,
                weights_only=True,
                output_loading_info=True,
            )
            require_weights(self._checkpoint, info["missing_keys"])
            with suppress(NotImplementedError, AttributeError):  # some architectures do not tell their input embeddings
                self._ids = int(model.get_input_embeddings().weight.shape[0])
            self._model = model.to(self.device).eval()
            self.texts.first_position = first_position(model, self.device, self.model_dtype)
            return self._model


def _with_margins(pieces: Pieces, before: int, behind: int) -> tuple[Pieces, np.ndarray]:
    """Pieces, and a `[sum]` bool: the first `before` and the last `behind` pieces of each text are special."""
    ends = np.cumsum(pieces.lengths)
    place = np.arange(len(pieces.ids))
    begin, end = np.repeat(ends - pieces.lengths, pieces.lengths), np.repeat(ends, pieces.lengths)
    return pieces, (place < begin + before) | (place >= end - behind)
