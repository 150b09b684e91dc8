"""The `hf:<id or path>` encoder: token embeddings of any transformer that `AutoModel` loads, as late interaction uses them.

A text's tokens are the last hidden states of its word pieces, special tokens and padding dropped, each L2-normalised, in
float32. Nothing is trained for MaxSim here: it is a baseline on real contextual embeddings, and a source of realistic
inputs. Code inside a checkpoint is never run (`trust_remote_code=False`), and weights are read without pickle's powers.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from maxsim_eval.errors import DataError, MissingPackageError, UsageError
from maxsim_eval.types import Role
from maxsim_kernels import Packed, pack

CODE_VERSION = 1
MAX_DOCUMENT_TOKENS = 256
MAX_QUERY_TOKENS = 64
BATCH_SIZE = 32
_GENERIC = {"model", "models", "checkpoint", "snapshot", "main", "transformer", "0_transformer"}
_TOKENIZER_FILES = ("*token*.json", "vocab.*", "merges.txt", "*.model", "special_tokens_map.json", "*.tiktoken")


def _checkpoint_files(folder: Path) -> list[Path]:
    """Files of a local checkpoint that decide its embeddings: config, tokenizer, and the weights that would be read."""
    names = {folder / "config.json"}
    for pattern in (*_TOKENIZER_FILES, "*.safetensors", "*.safetensors.index.json"):
        names.update(folder.glob(pattern))
    if not any(folder.glob("*.safetensors")):
        names.update(folder.glob("*.bin"))
    return sorted(path for path in names if path.is_file())


def checkpoint_revision(folder: Path) -> str:
    """`sha256-` and 32 hex characters over names and contents of a local checkpoint's files."""
    digest = hashlib.sha256()
    for path in _checkpoint_files(folder):
        with open(path, "rb") as handle:
            content = hashlib.file_digest(handle, "sha256").hexdigest()
        digest.update(f"{path.name}\0{content}\n".encode())
    return f"sha256-{digest.hexdigest()[:32]}"


def _options(model: str) -> str:
    return (
        f"Options: give the folder of a downloaded checkpoint (--encoder hf:/path/to/{model.rsplit('/', 1)[-1]}), "
        "download it where there is network access (hf download <id> --local-dir <folder>), import embeddings computed "
        "elsewhere (evaluate.py import), or use --encoder lexical, which needs no weights."
    )


def _looks_like_path(model: str) -> bool:
    return model.startswith((".", "~", "/", "\\")) or model.count("/") > 1 or Path(model).expanduser().exists()


class HfEncoder:
    """Contextual token embeddings of a Hugging Face checkpoint, float32, L2-normalised (see the module's docstring).

    Configuration and tokenizer are read at once, so that a wrong name fails before any work; the weights are loaded by the
    first `encode`, so that a full cache needs none of them.

    Args:
        model: folder of a checkpoint, or a hub id, the latter optionally with `@revision`.
        device: where the model runs; None or "auto": the first GPU if there is one, else the CPU. Results are on the CPU.
        batch_size: texts in one forward pass; halved, with one warning, when memory runs out.
        max_query_tokens, max_document_tokens: tokens kept (special ones not counted), the first ones; default 64 and 256,
            or what the model's positions allow.

    Raises:
        MissingPackageError: transformers is not installed.
        DataError: no such folder or model, no network, a checkpoint that cannot be read.
        UsageError: an option out of range, or a model that has no encoder-only form.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str | None = None,
        batch_size: int = BATCH_SIZE,
        max_query_tokens: int | None = None,
        max_document_tokens: int | None = None,
    ) -> None:
        try:
            import transformers  # noqa: F401
        except ImportError as error:
            raise MissingPackageError("the hf: encoder", "transformers", "encoders") from error
        if batch_size < 1:
            raise UsageError(f"batch_size: got {batch_size}, need 1 or more")
        self._model_name, self._hub_revision = model, None
        self._folder = self._find_folder(model)
        if self._folder is None and "@" in model:
            self._model_name, _, self._hub_revision = model.rpartition("@")
        config = self._load("AutoConfig", "configuration")
        if getattr(config, "is_encoder_decoder", False):
            raise UsageError(f"hf:{model}: a {config.model_type} model has encoder and decoder; need an encoder or a decoder")
        self._config = config
        self.revision = self._revision()
        self.name = f"hf:{self._shown_name()}"
        self._tokenizer = self._load("AutoTokenizer", "tokenizer", revision=getattr(config, "_commit_hash", None))
        self.dim = int(config.get_text_config().hidden_size)
        self.max_tokens: dict[str, int] = {
            "query": self._limit("max_query_tokens", max_query_tokens, MAX_QUERY_TOKENS),
            "document": self._limit("max_document_tokens", max_document_tokens, MAX_DOCUMENT_TOKENS),
        }
        self.device = _device(device)
        self.batch_size = batch_size
        self._model: Any = None
        self._halving_said = False

    def _find_folder(self, model: str) -> Path | None:
        if not model:
            raise UsageError("encoder 'hf:': need an id or a path after the colon, for example hf:/path/to/checkpoint")
        if not _looks_like_path(model):
            return None
        folder = Path(model).expanduser()
        if not folder.is_dir():
            raise DataError(f"encoder hf:{model}: there is no such folder. {_options(model)}")
        if not (folder / "config.json").is_file():
            raise DataError(f"encoder hf:{model}: {folder / 'config.json'} is missing: not a checkpoint. {_options(model)}")
        return folder.resolve()

    def _shown_name(self) -> str:
        """The hub id, or the folder's own name: never the machine's path, so that a moved checkpoint finds its cache."""
        if self._folder is None:
            return self._model_name
        generic = self._folder.name.lower() in _GENERIC
        return f"{self._folder.parent.name}/{self._folder.name}" if generic else self._folder.name

    def _revision(self) -> str:
        if self._folder is not None:
            return checkpoint_revision(self._folder)
        return str(getattr(self._config, "_commit_hash", None) or self._hub_revision or "unknown")

    def _load(self, loader: str, what: str, revision: str | None = None, **options: Any) -> Any:
        import transformers
        from safetensors import SafetensorError

        location = str(self._folder or self._model_name)
        if self._folder is None:
            options["revision"] = revision or self._hub_revision or "main"
        try:
            return getattr(transformers, loader).from_pretrained(
                location, trust_remote_code=False, local_files_only=self._folder is not None, **options
            )
        except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            reason = reason if len(reason) <= 300 else reason[:300] + "..."
            raise DataError(
                f"encoder hf:{self._model_name}: its {what} could not be loaded: {reason} {_options(self._model_name)}"
            ) from error

    def _limit(self, option: str, asked: int | None, default: int) -> int:
        """Tokens kept of a text: what was asked or the default, within the model's positions."""
        if asked is not None and asked < 1:
            raise UsageError(f"{option}: got {asked}, need 1 or more")
        positions = getattr(self._config.get_text_config(), "max_position_embeddings", None) or self._tokenizer.model_max_length
        room = min(int(positions), int(self._tokenizer.model_max_length)) - self._tokenizer.num_special_tokens_to_add()
        if asked is not None and asked > room:
            raise UsageError(f"{option}: got {asked}, but {self.name} reads at most {room} tokens of a text")
        return min(asked or default, room)

    def fingerprint(self, role: Role) -> dict[str, Any]:
        """Everything but the texts that decides the embeddings of this role."""
        return {
            "code": CODE_VERSION,
            "model": self.name,
            "revision": self.revision,
            "layer": "last",
            "special_tokens": "dropped",
            "normalize": True,
            "prompt": "",
            "dtype": "float32",
            "max_tokens": self.max_tokens[role],
        }

    def prepare(self, documents: Sequence[Any]) -> None:
        """Nothing: the embeddings do not depend on the corpus."""

    def encode(self, items: Sequence[Any], role: Role) -> Packed:
        """Encode texts: `Packed` float32 `[tokens, dim]` on the CPU, one row per text; an empty text gives an empty row.

        Raises:
            UsageError: an item that is not text, or no memory even for one text at a time.
            DataError: weights that are missing, damaged or those of another architecture.
        """
        for number, item in enumerate(items):
            if not isinstance(item, str):
                raise UsageError(f"{self.name} reads text; item {number} is a {type(item).__name__}")
        rows: list[torch.Tensor] = [torch.empty(0, self.dim)] * len(items)
        ids, special = self._tokenize(items, role)
        order = [i for i in range(len(items)) if not all(special[i])]
        order.sort(key=lambda i: (-len(ids[i]), i))  # similar lengths share a batch; the longest first, to fail early
        start = 0
        while start < len(order):
            batch = order[start : start + self.batch_size]
            hidden = self._forward([ids[i] for i in batch])
            if hidden is None:
                continue  # out of memory: the batch size was halved, the same texts again
            for row, i in zip(hidden, batch):
                keep = torch.tensor([not flag for flag in special[i]])
                rows[i] = torch.nn.functional.normalize(row[: len(ids[i])][keep], dim=-1)
            start += len(batch)
        return pack(rows, dim=self.dim)

    def _tokenize(self, items: Sequence[str], role: Role) -> tuple[list[list[int]], list[list[int]]]:
        if not items:
            return [], []
        encoded = self._tokenizer(
            list(items),
            truncation=True,
            max_length=self.max_tokens[role] + self._tokenizer.num_special_tokens_to_add(),
            padding=False,
            return_attention_mask=False,
            return_special_tokens_mask=True,
        )
        return encoded["input_ids"], encoded["special_tokens_mask"]

    def _forward(self, ids: list[list[int]]) -> torch.Tensor | None:
        """Last hidden states `[batch, longest, dim]` float32 on the CPU; None after halving the batch size."""
        model = self._loaded_model()
        longest = max(len(row) for row in ids)
        pad = self._tokenizer.pad_token_id or 0  # any valid id: the attention mask hides it
        tokens = torch.tensor([row + [pad] * (longest - len(row)) for row in ids])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
        try:
            with torch.inference_mode():
                output = model(input_ids=tokens.to(self.device), attention_mask=mask.to(self.device))
                return output.last_hidden_state.float().cpu()
        except RuntimeError as error:  # torch.OutOfMemoryError is one; CPU allocators raise it bare
            if not _out_of_memory(error):
                raise
            self._halve(len(ids), longest, error)
            return None

    def _halve(self, texts: int, longest: int, error: RuntimeError) -> None:
        if texts == 1:
            raise UsageError(
                f"{self.name}: out of memory on {self.device} with one text of {longest} tokens; lower "
                "max_document_tokens or choose another device"
            ) from error
        self.batch_size = texts // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not self._halving_said:
            self._halving_said = True
            warnings.warn(
                f"{self.name}: out of memory on {self.device} with {texts} texts at once; continuing with "
                f"{self.batch_size}, and fewer where needed",
                RuntimeWarning,
                stacklevel=4,  # the caller of encode
            )

    def _loaded_model(self) -> Any:
        if self._model is None:
            model, info = self._load(
                "AutoModel",
                "weights",
                revision=getattr(self._config, "_commit_hash", None),
                config=self._config,
                dtype=torch.float32,
                weights_only=True,
                output_loading_info=True,
            )
            missing = sorted(key for key in info["missing_keys"] if "pooler" not in key)  # the pooler is never used
            if missing:
                raise DataError(
                    f"{self.name}: {len(missing)} weights are missing, first {missing[0]!r}: random numbers would take their "
                    f"place. The weight file belongs to another architecture than config.json says. {_options(self._model_name)}"
                )
            self._model = model.to(self.device).eval()
        return self._model


def _device(device: str | None) -> torch.device:
    if device in (None, "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(str(device))
    except RuntimeError:
        raise UsageError(f"device: got {device!r}, need auto, cpu, cuda or cuda:<number>") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device: got {device!r}, but this torch sees no GPU; use --device cpu")
    return chosen


def _out_of_memory(error: RuntimeError) -> bool:
    signs = ("out of memory", "not enough memory", "can't allocate")  # CUDA; the CPU allocator of torch, new and old
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error).lower() for sign in signs)
