"""An environment for a library that pins other versions than ours: made from the package registry, torch and the rest are ours.

Only what differs is installed, without dependencies; everything else is found in the running environment through a `.pth` file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import NoReturn

import pytest

# colpali-engine imports torchvision, whose wheel of the registry may be built for another torch than the one here; nothing of what
# it registers with torch is used.
NO_REGISTRATION = 'import sys, types; sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))'
REQUIREMENTS = {
    "pylate": (
        "pylate==1.6.0",
        "sentence-transformers==5.3.0",
        "transformers==5.3.0",
        "huggingface-hub==1.33.0",
        "tokenizers==0.22.2",
        "accelerate==1.15.0",
        "httpx==0.28.1",
        "httpcore==1.0.9",
        "ujson==5.12.0",
        "fastkmeans==0.5.0",
        "fast-plaid==1.4.6.2110",
    ),
    "sentence-transformers 6.0": ("sentence-transformers==6.0.0",),
    "sentence-transformers 6.1": ("sentence-transformers==6.1.0",),
    "mteb": ("mteb==2.26.24", "polars==2.1.0", "polars-runtime-32==2.1.0", "ir_datasets==0.6.3", "lxml==6.1.3", "lz4==4.4.5"),
    "colpali_engine": ("colpali-engine==0.3.18", "peft==0.20.0", "accelerate==1.15.0", "torchvision==0.28.0"),
}
UNREACHABLE = ("(from versions: none)", "ConnectionError", "Temporary failure", "Read timed out")


class UnreachableError(RuntimeError):
    """The package registry gave nothing."""


def without_registry(library: str, error: UnreachableError) -> NoReturn:
    """Skip the test, or fail it where MAXSIM_REQUIRE_REGISTRY=1 says that the registry is there."""
    if os.environ.get("MAXSIM_REQUIRE_REGISTRY") == "1":
        pytest.fail(f"MAXSIM_REQUIRE_REGISTRY=1, but no {library} from the package registry: {error}", pytrace=False)
    pytest.skip(f"no {library} from the package registry: {error}")


def environment(library: str, folder: Path) -> Path:
    """The Python of a new environment in `folder` in which the library can be imported."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, capture_output=True, timeout=120)
    python = folder / "bin" / "python"
    options = ("-q", "--no-deps", "--no-compile", "--disable-pip-version-check")
    _from_registry([sys.executable, "-m", "pip", "--python", str(python), "install", *options, *REQUIREMENTS[library]])
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    # After the environment's own folder, so that its versions win.
    (packages / "zz_ours.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{NO_REGISTRATION}\n", encoding="utf-8")
    return python


def source(library: str, folder: Path) -> Path:
    """The library's source distribution, unpacked in `folder`: its own tests are there."""
    options = ("-q", "--no-deps", "--disable-pip-version-check", "--no-binary", ":all:", "-d", str(folder))
    _from_registry([sys.executable, "-m", "pip", "download", *options, REQUIREMENTS[library][0]])
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def _from_registry(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode and any(word in done.stderr for word in UNREACHABLE):
        raise UnreachableError(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-3000:]


def run(python: Path, *arguments: str, cwd: Path, path: list[Path], **more: str) -> subprocess.CompletedProcess[str]:
    """A command of that environment, with folders of ours put first and `more` variables."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1", **more}
    return subprocess.run([str(python), *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)
