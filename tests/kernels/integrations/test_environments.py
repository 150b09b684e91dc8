"""PyLate and colpali-engine in environments of their own, made from the package registry: their files of tests run there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from library_environment import REQUIREMENTS, UnreachableError, environment, run
from places import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("library", REQUIREMENTS)
def test_in_an_environment_of_its_own(library: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is not None:
        pytest.skip(f"{library} is installed here: test_{library}.py runs in this environment")
    try:
        python = environment(library, tmp_path / "venv")
    except UnreachableError as error:
        pytest.skip(f"no {library} from the package registry: {error}")
    tests = Path(__file__).with_name(f"test_{library}.py")
    done = run(python, "-m", "pytest", "-p", "no:cacheprovider", str(tests), "-rs", cwd=ROOT, path=[ROOT / "kernels", ROOT])
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert re.search(r"^[1-9]\d* passed in ", done.stdout, re.MULTILINE), done.stdout
