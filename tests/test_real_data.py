"""Where real data or the package registry is required, what needs it fails without it, instead of being skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from places import ROOT


@pytest.mark.parametrize(
    ("required", "code", "said"), [("1", 1, "MAXSIM_REQUIRE_DATA=1, but there is no test data"), ("", 0, "1 skipped")]
)
def test_missing_data_fails_where_it_is_required(required: str, code: int, said: str, tmp_path: Path) -> None:
    environment = {**os.environ, "MAXSIM_TEST_DATA": str(tmp_path / "nowhere"), "MAXSIM_REQUIRE_DATA": required}
    (tmp_path / "test_it.py").write_text("def test_it(scifact_data):\n    pass\n", encoding="utf-8")
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, said in done.stdout) == (code, True), done.stdout


def test_a_ci_requires_real_data_and_the_registry() -> None:
    """The line of `.ci/run` that says so, run by a shell."""
    (line,) = [one for one in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines() if "MAXSIM_REQUIRE_DATA" in one]
    for said, value in (({"CI": "true"}, "1"), ({}, ""), ({"CI": "false"}, "")):
        script = f'set -euo pipefail\n{line}\necho "<${{MAXSIM_REQUIRE_DATA:-}}><${{MAXSIM_REQUIRE_REGISTRY:-}}>"'
        found = subprocess.run(
            ["bash", "-c", script], env={"PATH": os.environ["PATH"], **said}, capture_output=True, text=True, check=True
        )
        assert found.stdout == f"<{value}><{value}>\n"
