"""Hub ids against a hub cache on disk: which commit a name means, what is recorded, what is said without network."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_checkpoints as tiny
from maxsim_eval.encoders.checkpoints import Checkpoint, find_checkpoint
from maxsim_eval.encoders.hf import HfEncoder
from maxsim_eval.encoders.names import COLBERTV2, COLBERTV2_REVISION, get_encoder
from maxsim_eval.errors import DataError, MissingPackageError, UsageError

FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture
def hub(checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put a tiny checkpoint into a hub cache under an id and a commit."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def put(hub_id: str, commit: str, layout: str = "stanford", **refs: str) -> Path:
        store = tmp_path / "hub" / f"models--{hub_id.replace('/', '--')}"
        (store / "refs").mkdir(parents=True, exist_ok=True)
        for name, target in refs.items():
            (store / "refs" / name).write_text(target)
        return Path(shutil.copytree(checkpoint_of(layout), store / "snapshots" / commit))

    return put


def test_a_name_means_one_commit_which_is_recorded(hub: Callable[..., Path], checkpoint_of: Callable[[str], Path]) -> None:
    hub("org/tiny", FIRST, main=FIRST, v1=SECOND)
    hub("org/tiny", SECOND)
    names = {"org/tiny": FIRST, "org/tiny@v1": SECOND, f"org/tiny@{SECOND}": SECOND}
    for name, commit in names.items():
        encoder = get_encoder(f"multi-vector:{name}")
        assert (encoder.name, encoder.revision) == ("multi-vector:org/tiny", commit)
        assert encoder.fingerprint("query")["revision"] == commit
    assert get_encoder("multi-vector:org/tiny", revision="v1").revision == SECOND
    packed = get_encoder("multi-vector:org/tiny").encode(["cat"], "document")
    expected = get_encoder(f"multi-vector:{checkpoint_of('stanford')}").encode(["cat"], "document")
    assert torch.equal(packed.values, expected.values)


def test_a_moving_branch_gives_another_key_but_no_mixed_files(hub: Callable[..., Path]) -> None:
    old = hub("org/tiny", FIRST, main=FIRST)
    encoder = get_encoder("multi-vector:org/tiny")
    hub("org/tiny", SECOND, "pylate", main=SECOND)
    assert get_encoder("multi-vector:org/tiny").revision == SECOND
    assert encoder.encode(["cat"], "query").lengths.tolist() == [12], "still the commit that was recorded"
    assert encoder.revision == old.name


def test_colbertv2_and_colpali_are_names_of_checkpoints(hub: Callable[..., Path]) -> None:
    hub(COLBERTV2, COLBERTV2_REVISION, main=FIRST)
    hub(COLBERTV2, FIRST, "pylate")
    encoder = get_encoder("colbertv2")
    assert (encoder.name, encoder.revision, encoder.dim) == ("colbertv2", COLBERTV2_REVISION, 8)
    assert encoder.fingerprint("query")["model"] == COLBERTV2
    assert encoder.encode(["cat"], "query").lengths.tolist() == [12]
    for other in (get_encoder("colbertv2@main"), get_encoder("colbertv2", revision=FIRST)):
        assert (other.name, other.revision) == ("colbertv2", FIRST)
        assert other.encode(["cat"], "query").lengths.tolist() == [10]
    hub("vidore/colpali-v1.2-hf", SECOND, "colpali", main=SECOND)
    pages = get_encoder("colpali")
    assert (pages.name, pages.revision) == ("colpali", SECOND)
    assert pages.encode(tiny.pages(), "document").dtype == torch.bfloat16
    assert pages.fingerprint("document")["model_dtype"] == "bfloat16"


def test_hf_reads_the_hub_the_same_way(hub: Callable[..., Path]) -> None:
    folder = hub("org/bert", FIRST, "pylate", main=FIRST)
    encoder = HfEncoder("org/bert")
    assert (encoder.name, encoder.revision) == ("hf:org/bert", FIRST)
    expected = HfEncoder(str(folder)).encode(["two cats"], "query")
    assert torch.equal(encoder.encode(["two cats"], "query").values, expected.values)


@pytest.mark.parametrize("name", ["colbertv2", "colpali", "gve", "multi-vector:org/model", "hf:org/model"])
def test_without_network_or_weights_the_options_are_named(name: str, hub: Callable[..., Path]) -> None:
    with pytest.raises(DataError) as caught:
        get_encoder(name)
    for part in (f"encoder {name}", "evaluate.py import", "--encoder lexical", "hf download", ":/path/to/"):
        assert part in str(caught.value)


def test_other_network_errors_are_one_error_too(hub: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import httpx

    def refuse(*_: Any, **__: Any) -> str:
        raise httpx.ProxyError("407\nproxy")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(DataError, match=r"configuration could not be loaded: 407 proxy\. Options"):
        get_encoder("multi-vector:org/model")


def test_a_snapshot_without_configuration(hub: Callable[..., Path]) -> None:
    (hub("org/tiny", FIRST, main=FIRST) / "config.json").unlink()
    with pytest.raises(DataError, match=r"encoder multi-vector:org/tiny: config.json is missing\. Options"):
        get_encoder("multi-vector:org/tiny")


def test_revisions_that_contradict_or_mean_nothing(tmp_path: Path, checkpoint_of: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match="two revisions, 'v1' in its name and 'v2' as an option"):
        get_encoder("multi-vector:org/tiny@v1", revision="v2")
    with pytest.raises(UsageError, match="two revisions, that of its name and 'v2'"):
        get_encoder("colbertv2@v1", revision="v2")
    with pytest.raises(UsageError, match="of a folder; only models of the hub have revisions"):
        get_encoder(f"multi-vector:{checkpoint_of('stanford')}", revision="v1")
    with pytest.raises(UsageError, match="need an id or a path after the colon"):
        get_encoder("multi-vector:")
    for name in ("colbertv2@", "gve@"):
        with pytest.raises(UsageError, match=r"need .*@<branch, tag or commit>"):
            get_encoder(name)


def test_weights_are_asked_for_by_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_of: Callable[[str], Path]
) -> None:
    """Safetensors first; pickles only of the folders that have none; code only where it was asked for."""
    asked: list[list[str]] = []
    folder = Path(shutil.copytree(checkpoint_of("pylate"), tmp_path / FIRST))
    (folder / "1_Dense" / "model.safetensors").unlink()

    def snapshot(hub_id: str, *, revision: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert hub_id == "org/tiny"
        assert revision == ("main" if not asked else FIRST), "once the commit is known, nothing else is asked for"
        assert "onnx*/*" in ignore_patterns
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    found = find_checkpoint("multi-vector:org/tiny", "org/tiny")
    assert not any("safetensors" in pattern or "bin" in pattern or "py" in pattern for pattern in asked[0])
    assert found.weights() == folder
    assert "*.safetensors" in asked[1]
    assert [pattern for pattern in asked[2] if pattern not in asked[1]] == ["1_Dense/*.bin", "1_Dense/*.bin.index.json"]
    found.weights(code=True)
    assert "*.py" in asked[3]
    assert "*.py" not in asked[2]


def test_a_missing_image_library_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingPackageError, match=r"encoder gve:org/model needs the package 'pillow'"):
        get_encoder("gve:org/model")
    with (
        pytest.raises(MissingPackageError, match=r"encoder x needs the package 'pillow'"),
        Checkpoint("x", "x", "r", Path(), None).loading("weights"),
    ):
        raise ImportError("ColPaliProcessor requires the PIL library but it was not found")
