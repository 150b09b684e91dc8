"""The `multi-vector:<id or path>` encoder: late-interaction checkpoints as sentence-transformers' `MultiVectorEncoder` runs them.

Three layouts: Stanford ColBERT's (`HF_ColBERT` in config.json, `artifact.metadata`, the projection among the weights),
PyLate's and sentence-transformers' own (`modules.json`), and transformers' `...ForRetrieval` models (ColPali, ColQwen2),
which read page images. Prompts, lengths, [MASK] expansion of queries, skipped punctuation, projection and normalisation are
the checkpoint's, as that library reads them: its embeddings are handed on as they are. The library is imported, and the
weights are read, by the first `encode`. A checkpoint's own code is never run, and weights are read without pickle's powers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from maxsim_eval.encoders.checkpoints import Checkpoint, find_checkpoint, require_weights
from maxsim_eval.encoders.model_encoder import Kind, ModelEncoder, dtype_name, require, sort_kinds
from maxsim_eval.encoders.refused_items import surrogates_named
from maxsim_eval.encoders.text_batches import Read
from maxsim_eval.encoders.token_texts import image_token, piece_texts, processor_grid, processor_ids
from maxsim_eval.encoders.unpadded import first_position
from maxsim_eval.encoders.word_pieces import MANY, Pieces, fast_pieces, some_of
from maxsim_eval.errors import DataError, MissingPackageError, UsageError
from maxsim_eval.types import PatchGrid, Role
from maxsim_kernels import Packed, pack

CODE_VERSION = 1
PAGES_DTYPE_ON = {"cpu": "float32", "cuda": "bfloat16"}  # large vision models leave the range of float16
Layout = Literal["stanford", "modules", "pages"]
_USUAL_DIM = 128  # Stanford's and transformers' default, which their files may leave out
_PYLATE_DENSE = "pylate.models.Dense.Dense"  # the library reads it as its own Dense
_TOKEN_BY_TOKEN = ("Dense", "Normalize", "MultiVectorMask", "Dropout", "LayerNorm")  # modules that look at one token at a time
_MULTI_VECTOR_TYPES = ("MultiVectorEncoder", "ColBERT")  # the second is PyLate's name


@dataclass(frozen=True)
class _Facts:
    """What the small files of a checkpoint say before anything is loaded; the weights must agree with `dim`."""

    layout: Layout
    dim: int
    document_tokens: int | None


class MultiVectorEncoder(ModelEncoder):
    """Multi-vector embeddings of a late-interaction checkpoint (see the module's docstring).

    Args:
        model: folder of a checkpoint, or a hub id, the latter optionally with `@revision`.
        name: the encoder's name; default `multi-vector:` and the hub id or the folder's name.
        revision: branch, tag or commit of a hub id; the commit it means is recorded.
        options: of `ModelEncoder`. max_query_tokens and max_document_tokens count every token the model reads, special ones
            and prompt included, as ColBERT counts (`query_maxlen`, which is also the length that [MASK] fills queries to,
            and `doc_maxlen`). Prompts replace the checkpoint's own, markers such as `[unused0]` included. Pages have neither.

    Raises:
        MissingPackageError: sentence-transformers is not installed.
        DataError: no such folder or model, no network, a layout that is not one of the three, no projection layer.
        UsageError: an option out of range, or one that means nothing to this checkpoint.
    """

    def __init__(self, model: str, *, name: str | None = None, revision: str | None = None, **options: Any) -> None:
        named = name or f"multi-vector:{model}"
        require("sentence_transformers", named, "sentence-transformers>=6.2")
        require("transformers", named, "transformers")
        self._checkpoint = find_checkpoint(named, model, revision, wide=True)
        self._facts = _read_facts(self._checkpoint)
        if self._facts.layout == "pages":
            options["dtype_on"] = PAGES_DTYPE_ON
        super().__init__(name or f"multi-vector:{self._checkpoint.shown}", **options)
        self.revision = self._checkpoint.revision
        self.dim = self._facts.dim
        if self._facts.layout == "pages":
            self._require_no_page_options()
        # Only limits that are known: estimates of sizes read them.
        limit = self.asked_tokens["document"] or self._facts.document_tokens
        self.max_tokens: dict[str, int] = {} if limit is None else {"document": limit}
        self._model: Any = None

    def _require_no_page_options(self) -> None:
        asked = {f"max_{role}_tokens": value for role, value in self.asked_tokens.items()}
        for option, value in {**asked, "document_prompt": self.prompts["document"]}.items():
            if value is not None:
                raise UsageError(
                    f"{option}: got {value!r}, but the processor of {self.name} decides the tokens of queries and pages itself"
                )

    def fingerprint(self, role: Role) -> dict[str, Any]:
        """Everything but the items that decides the embeddings of this role; None: as the checkpoint has it."""
        return {
            "code": CODE_VERSION,
            "model": self._checkpoint.shown,
            "revision": self.revision,
            "prompt": self.prompts[role],
            "max_tokens": self.asked_tokens[role],
            "dtype": dtype_name(self.dtype),
            "model_dtype": dtype_name(self.model_dtype),
        }

    def encode(self, items: Sequence[Any], role: Role) -> Packed:
        """Encode texts or page images: `Packed` `[tokens, dim]` on the CPU, one row per item; an empty text gives an empty row.

        Pages are converted to RGB (palettes looked up, an alpha channel dropped).

        Raises:
            UsageError: items this checkpoint does not read, or no memory even for one of them.
            DataError: weights that are missing, damaged or without projection; a text with a lone surrogate; embeddings that are
                not finite.
        """
        kinds = sort_kinds(items, self.name)
        if kinds["text"] and role == "document" and self._facts.layout == "pages":
            raise UsageError(f"{self.name} reads page images as documents; item {kinds['text'][0]} is a text")
        if kinds["page"] and self._facts.layout == "stanford":
            raise UsageError(f"{self.name} reads text; item {kinds['page'][0]} is a page image")
        if not any(kinds.values()):
            return pack([torch.empty(0, self.dim, dtype=self.dtype)] * len(items), dim=self.dim, dtype=self.dtype)
        library = self._library()
        if kinds["page"] and not (library.supports("image") or library.supports("message")):
            raise UsageError(f"{self.name} reads text; item {kinds['page'][0]} is a page image")
        if not kinds["page"] and self._facts.layout != "pages":
            with self.reading, surrogates_named(self.name, items):
                features = self._features([items[place] for place in kinds["text"]], role)
            read = self._read(features(), np.array(kinds["text"]), len(items))
            return self.texts.run(read, self.dim, lambda batch: self._forward(batch, role))
        rows = [torch.empty(0, self.dim, dtype=self.dtype)] * len(items)
        kind: Kind
        for kind, places in kinds.items():

            def forward(batch: list[int]) -> list[torch.Tensor]:
                inputs = [item if isinstance(item, str) else item.convert("RGB") for item in (items[at] for at in batch)]
                with surrogates_named(self.name, items):
                    features = library.preprocess(inputs, prompt=self._prompt(role), task=role)  # images: no lock held
                with self.running:
                    tokens, kept = self._forward(features, role)
                    return [found[keep] for found, keep in zip(tokens, kept)]

            for place, tokens in self.in_batches(kind, items, places, forward):
                rows[place] = tokens
        return self.hand_out(rows, self.dim)

    def _read(self, found: Mapping[str, Any], places: np.ndarray, items: int) -> Read:
        """Texts as the library preprocesses them, at their places among the items; the others have no tokens."""
        tensors = {name: values for name, values in found.items() if isinstance(values, torch.Tensor)}
        shape = tensors["input_ids"].shape
        for name, values in tensors.items():
            if values.shape != shape:
                raise DataError(f"{self.name}: its {name} of texts is {list(values.shape)}, need one row a text, {list(shape)}")
        used = tensors["attention_mask"].bool()
        if "query_expansion_positions" in tensors:
            used = used | tensors["query_expansion_positions"].bool()
        left = getattr(self._library().tokenizer, "padding_side", "right") == "left"
        read = Read.of(tensors, used, left, {name: value for name, value in found.items() if name not in tensors})
        return read if len(places) == items else read.among(places, items)

    def _features(self, texts: list[str], role: Role) -> Callable[[], dict[str, Any]]:
        """A function that gives the texts as the library preprocesses them; by a faster way where it gives the same."""
        library, prompt = self._library(), self._prompt(role)
        if role == "document" and len(texts) > MANY:  # queries are few, and may be filled with [MASK]
            some = some_of(texts)
            asked = library.preprocess([texts[row] for row in some], prompt=prompt, task=role)
            ids = _unpadded(asked)
            prompted = [f"{prompt or ''}{text}" for text in texts]
            reading = (self.reading, self.readers)
            found = None if ids is None else fast_pieces(library.tokenizer, prompted, some, ids, *reading)
            if found is not None:
                return lambda: _as_preprocessed(found, asked, library.tokenizer)
        made = dict(library.preprocess(texts, prompt=prompt, task=role))
        return lambda: made

    def _forward(self, features: dict[str, Any], role: Role) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings `[b, l, d]` and which of them count, of preprocessed items, as the library's own `encode` does it."""
        moved = {name: value.to(self.device) if isinstance(value, torch.Tensor) else value for name, value in features.items()}
        found = self._library()(moved, task=role)
        return found["token_embeddings"], found["attention_mask"].bool()

    def _prompt(self, role: Role) -> str | None:
        """The text before every item: what was asked for, else the checkpoint's own by the library's rule."""
        if self.prompts[role] is not None:
            return self.prompts[role]
        return _own_prompt(self._library(), role)

    def token_texts(self, item: Any, role: Role) -> list[str] | None:
        """The word piece (or patch) of each token, in order; None where weights would have to be downloaded for it.

        Checkpoints that read pages: by their processor alone. Others: by the library, which inserts markers and [MASK] and skips
        punctuation, on weights that are on this machine.
        """
        if not any(sort_kinds([item], self.name).values()):
            return []
        if self._facts.layout == "pages":
            processor = self._own_processor()
            ids = processor_ids(processor, item)
            return piece_texts(processor.tokenizer, ids, image=image_token(processor))
        if not self._checkpoint.has_weights():
            return None
        library = self._library()
        call = library.encode_query if role == "query" else library.encode_document
        given = item if isinstance(item, str) else item.convert("RGB")
        with torch.inference_mode():
            (found,) = call([given], prompt=self.prompts[role], output_value=None, show_progress_bar=False)
        if "input_ids" not in found:
            return None
        return piece_texts(library.tokenizer, found["input_ids"][found["attention_mask"].bool()].tolist())

    def page_grid(self, page: Any) -> PatchGrid | None:
        """The grid of a page's patches, as the checkpoint's processor says; None where it does not, or other patches lie between."""
        if self._facts.layout != "pages":
            return None
        return processor_grid(self._own_processor(), page)

    def _own_processor(self) -> Any:
        with self._checkpoint.loading("processor"):
            from transformers import AutoProcessor

            return AutoProcessor.from_pretrained(str(self._checkpoint.folder), trust_remote_code=False, local_files_only=True)

    def _library(self) -> Any:
        with self.loading:
            if self._model is not None:
                return self._model
            folder = self._checkpoint.weights()
            if self._facts.layout == "stanford" and "linear.weight" not in _weight_names(self._checkpoint, folder):
                raise self._checkpoint.refused("its weights hold no 'linear.weight': the projection layer is missing")
            try:
                from sentence_transformers import MultiVectorEncoder as Library
            except ImportError as error:
                needed = "sentence-transformers>=6.2"
                raise MissingPackageError(f"encoder {self.name}", needed, "encoders") from error
            with self._checkpoint.loading("weights"):
                model = Library(
                    str(folder),
                    device=str(self.device),
                    local_files_only=True,
                    trust_remote_code=False,
                    model_kwargs={"dtype": self.model_dtype, "weights_only": True},
                )
            require_weights(self._checkpoint, _random_weights(model))
            width = model.get_embedding_dimension()
            if self._facts.dim not in (None, width):
                raise self._checkpoint.refused(
                    f"its files promise embeddings of d = {self._facts.dim}, its weights give {width}"
                )
            self._set_limits(model)
            if all(type(module).__name__ in _TOKEN_BY_TOKEN for module in list(model)[1:]):
                self.texts.first_position = first_position(getattr(model[0], "model", None), self.device, self.model_dtype)
            for module in model:
                words = getattr(module, "_skiplist_ids", None)
                if isinstance(words, torch.Tensor):  # else the host waits for the GPU at every batch, to copy them there
                    module._skiplist_ids = words.to(self.device)
            self._model = model.eval()
            return self._model

    def _set_limits(self, model: Any) -> None:
        """Put the lengths that were asked for in the place of the checkpoint's."""
        transformer = model[0]
        if not hasattr(transformer, "query_expansion"):
            if any(self.asked_tokens.values()):
                raise UsageError(f"{self.name}: its first module is a {type(transformer).__name__}, which has no token limits")
            return
        room = getattr(model.tokenizer, "model_max_length", None)
        for role, asked in self.asked_tokens.items():
            if asked is None:
                continue
            if room is not None and asked > room:
                raise UsageError(f"max_{role}_tokens: got {asked}, but {self.name} reads at most {room} tokens")
            before = self._tokens_before(model, role)
            if asked <= before:
                raise UsageError(
                    f"max_{role}_tokens: got {asked}, but {self.name} puts {before} tokens of its own (special ones, marker or prompt) "
                    f"to a text; need {before + 1} or more"
                )
        if (tokens := self.asked_tokens["document"]) is not None:
            transformer.document_length = tokens
        if (tokens := self.asked_tokens["query"]) is not None:
            expansion = transformer.query_expansion
            fixed = expansion is not None and expansion["strategy"] == "fixed"
            transformer.query_length = None if fixed else tokens  # a fixed expansion is floor and limit at once
            if expansion is not None:
                transformer.query_expansion = {**expansion, "length": tokens if fixed else min(tokens, expansion["length"])}

    def _tokens_before(self, model: Any, role: Role) -> int:
        """Tokens that a text shares its limit with: the special ones, and those of the marker or prompt before it."""
        prompt = _own_prompt(model, role) if self.prompts[role] is None else self.prompts[role]
        marker = model.tokenizer.tokenize(prompt) if prompt else []
        return int(model.tokenizer.num_special_tokens_to_add()) + len(marker)


def _own_prompt(model: Any, role: Role) -> str | None:
    """A checkpoint's own prompt, by the library's rule."""
    names = ("query",) if role == "query" else ("document", "passage", "corpus")
    own = next((name for name in names if name in model.prompts), model.default_prompt_name)
    return None if own is None else model.prompts.get(own)


def _unpadded(features: Mapping[str, Any]) -> list[list[int]] | None:
    """The token ids of each preprocessed text, without padding; None where the tensors hold more than ids."""
    tensors = {name: values for name, values in features.items() if isinstance(values, torch.Tensor)}
    types = tensors.pop("token_type_ids", None)
    if set(tensors) != {"input_ids", "attention_mask"} or (types is not None and bool(types.any())):
        return None
    return [ids[mask.bool()].tolist() for ids, mask in zip(tensors["input_ids"], tensors["attention_mask"])]


def _as_preprocessed(pieces: Pieces, asked: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Word pieces in the form of the library's preprocessing; `asked`, its own result for some of the texts, gives the rest."""
    left = getattr(tokenizer, "padding_side", "right") == "left"
    ids = torch.from_numpy(pieces.laid_out(pieces.ids, tokenizer.pad_token_id or 0, left))
    made = {"input_ids": ids, "attention_mask": torch.from_numpy(pieces.filled(left).astype(np.int64))}
    if "token_type_ids" in asked:
        made["token_type_ids"] = torch.zeros_like(ids)
    return {**asked, **made}


# Layouts ---------------------------------------------------------------------------------------------------------------


def _read_facts(checkpoint: Checkpoint) -> _Facts:
    """The layout of a checkpoint; `DataError` where its projection would be made of random numbers."""
    modules = checkpoint.read("modules.json")
    if modules is not None:
        return _module_facts(checkpoint, modules)
    if (checkpoint.folder / "adapter_config.json").is_file():
        raise checkpoint.refused(
            "adapter_config.json: an adapter without its model; need a whole checkpoint in transformers' own layout (of ColPali "
            "v1.2: vidore/colpali-v1.2-hf)"
        )
    config = checkpoint.settings("config.json")
    architectures = [str(name) for name in config.get("architectures") or []]
    if "HF_ColBERT" in architectures:
        artifact = checkpoint.settings("artifact.metadata")
        return _Facts("stanford", _number(artifact.get("dim")) or _USUAL_DIM, _number(artifact.get("doc_maxlen")))
    if any(name.endswith("ForRetrieval") for name in architectures):
        return _Facts("pages", _number(config.get("embedding_dim")) or _USUAL_DIM, None)
    raise checkpoint.refused(
        f"no late-interaction checkpoint: config.json names {', '.join(architectures) or 'no architecture'} and there is no "
        "modules.json, so there is no projection layer; hf:<id or path> gives the token embeddings of any transformer"
    )


def _module_facts(checkpoint: Checkpoint, modules: Any) -> _Facts:
    if not isinstance(modules, list) or not all(isinstance(module, dict) and "path" in module for module in modules):
        raise checkpoint.refused("modules.json holds no list of modules")
    for module in modules:
        kind = str(module.get("type", ""))
        if not kind.startswith("sentence_transformers.") and kind != _PYLATE_DENSE:
            raise checkpoint.refused(f"modules.json: module {kind!r} is code from elsewhere, which is not run")
    settings = checkpoint.settings("config_sentence_transformers.json")
    saved_as = settings.get("model_type", "SentenceTransformer")
    projections = [str(module["path"]) for module in modules if str(module.get("type", "")).endswith("Dense")]
    if not projections and saved_as != "MultiVectorEncoder":
        raise checkpoint.refused(
            f"modules.json names no Dense module and the checkpoint was saved as {saved_as}: its projection layer is missing"
        )
    if saved_as not in (*_MULTI_VECTOR_TYPES, "SentenceTransformer"):
        raise checkpoint.refused(f"it was saved as a {saved_as}; need one of {', '.join(_MULTI_VECTOR_TYPES)}")
    config = checkpoint.settings("config.json")
    dim = _number(config.get("embedding_dim")) or _number(config.get("hidden_size"))
    for path in projections:
        dense = checkpoint.settings(f"{path}/config.json")
        activation = str(dense.get("activation_function", "torch.nn.modules.linear.Identity"))
        if not activation.startswith("torch."):  # the library would put Tanh in its place and only log it
            raise checkpoint.refused(f"{path}/config.json: activation {activation!r} is code from elsewhere, which is not run")
        dim = _number(dense.get("out_features")) or dim
    transformer = checkpoint.settings("sentence_bert_config.json")
    length = settings.get("document_length") or transformer.get("document_length")
    return _Facts("modules", dim or _USUAL_DIM, _number(length))


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _weight_names(checkpoint: Checkpoint, folder: Path) -> set[str]:
    """Names of the tensors in the weight files of a folder, without reading their values."""
    from safetensors import safe_open

    names: set[str] = set()
    with checkpoint.loading("weights"):
        safe = sorted(folder.glob("*.safetensors"))
        for path in safe:
            with safe_open(path, framework="pt") as handle:
                names.update(handle.keys())
        for path in () if safe else sorted(folder.glob("*.bin")):
            names.update(torch.load(path, map_location="meta", weights_only=True))
    return names


def _random_weights(model: Any) -> list[str]:
    """Names of the transformer's weights that its checkpoint did not hold.

    The library loads the transformer without asking for what is missing. transformers marks each tensor it has read; a
    version that marked none would be refused here, never trusted.
    """
    from transformers import PreTrainedModel

    found = []
    for module in model:
        inner = getattr(module, "model", None)
        if isinstance(inner, PreTrainedModel):
            found += [name for name, weight in inner.named_parameters() if not getattr(weight, "_is_hf_initialized", False)]
    return found
