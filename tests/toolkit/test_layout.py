"""The layout's promises: no import hazard, a light import, everything packaged, nothing that only fits one machine."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "sentence_transformers", "datasets", "beir", "pandas", "scipy", "h5py", "triton")


def python(*arguments: str, cwd: Path) -> str:
    """Standard output of a fresh interpreter; it must succeed."""
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tracked() -> list[Path]:
    """Files that git tracks or would track."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = [git, "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip(f"git does not list this checkout: {listed.stderr.decode().strip()}")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def packages() -> dict[str, Path]:
    """Every package of both distributions: name -> folder."""
    found = {}
    for source, name in ((ROOT, "maxsim_eval"), (ROOT / "kernels", "maxsim_kernels")):
        for init in sorted((source / name).rglob("__init__.py")):
            found[".".join(init.parent.relative_to(source).parts)] = init.parent
    return found


def test_data_and_source_folders_are_no_packages() -> None:
    for folder in ("kernels", "datasets", "tests", "notebooks", "embeddings_cache"):
        assert (ROOT / folder).is_dir()
        assert not (ROOT / folder / "__init__.py").exists(), f"{folder}/__init__.py would make it importable"


def test_the_command_runs_from_any_folder(tmp_path: Path) -> None:
    for script, cwd in (("evaluate.py", ROOT), (str(ROOT / "evaluate.py"), tmp_path)):
        text = python(script, "--help", cwd=cwd)
        assert "compare" in text
        assert "gate" in text
    assert not list(tmp_path.iterdir())


def test_beside_our_folders_the_real_packages_are_imported() -> None:
    # What `python evaluate.py` does to the path, then what the encoders and loaders import after it.
    code = """if True:
        import importlib.util, json, runpy, sys
        sys.path.insert(0, sys.argv[1])                    # as Python itself puts the script's folder there
        sys.argv = ["evaluate.py", "--help"]
        try:
            runpy.run_path("evaluate.py", run_name="__main__")
        except SystemExit:
            pass
        import datasets
        origin = {"datasets": datasets.__file__, "has Dataset": hasattr(datasets, "Dataset")}
        for name in ("kernels", "evaluate", "tests", "notebooks"):
            spec = importlib.util.find_spec(name)
            origin[name] = None if spec is None else [spec.origin, *(spec.submodule_search_locations or [])]
        print("FOUND" + json.dumps(origin))
    """
    found = json.loads(python("-c", code, str(ROOT), cwd=ROOT).split("FOUND")[1])
    assert found.pop("has Dataset")
    assert Path(found.pop("datasets")).parent.parent.name in ("site-packages", "dist-packages")
    for name, places in found.items():
        inside = [place for place in places or [] if place and Path(place).resolve().parent == ROOT]
        assert not inside, f"{name} is taken from the checkout: {inside}"


def ended(*words: str | Path, cwd: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a fresh interpreter."""
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


def test_a_second_checkout_does_not_run_the_first(tmp_path: Path) -> None:
    other = tmp_path / "other"
    for package in ("maxsim_eval", "kernels/maxsim_kernels"):
        (other / package).mkdir(parents=True)
        (other / package / "__init__.py").touch()
    shutil.copy(ROOT / "evaluate.py", other)
    code, out, err = ended(other / "evaluate.py", "--version", cwd=other)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert str(other / "evaluate.py") in err
    assert str(ROOT / "kernels" / "maxsim_kernels") in err
    assert f"make install` in {other}" in err
    code, out, err = ended(ROOT / "evaluate.py", "--version", cwd=other)
    assert code == 0, err
    assert re.search(rf"^maxsim-eval \d\S* \({re.escape(str(ROOT / 'maxsim_eval'))}\)$", out, re.MULTILINE)
    assert re.search(rf"^maxsim-kernels \d\S* \({re.escape(str(ROOT / 'kernels' / 'maxsim_kernels'))}\)$", out, re.MULTILINE)


def test_a_bare_checkout_says_what_to_run(tmp_path: Path) -> None:
    code, out, err = ended("-S", ROOT / "evaluate.py", "demo", cwd=tmp_path)  # without what is installed
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("error: maxsim_kernels is not installed for ")
    assert "make install" in err


def test_the_command_does_nothing_when_it_is_imported() -> None:
    before = list(sys.path)
    names = runpy.run_path(str(ROOT / "evaluate.py"), run_name="evaluate")
    assert sys.path == before
    assert "main" not in names
    assert "here" not in names


def test_imports_are_light_and_touch_no_gpu(tmp_path: Path) -> None:
    code = """if True:
        import json, sys
        import maxsim_eval, maxsim_eval.cli, maxsim_eval.data.cards
        toolkit = sorted(set(sys.argv[1:]) & set(sys.modules))
        roots = [place for place in sys.path if place]
        import maxsim_kernels
        import torch
        kernels = sorted({"triton", "transformers", "h5py", "pandas"} & set(sys.modules))
        started = torch.cuda.is_initialized()
        print(json.dumps([toolkit, roots, kernels, started, maxsim_kernels.__all__]))
    """
    toolkit, roots, kernels, started, public = json.loads(python("-c", code, *HEAVY, cwd=tmp_path))
    assert toolkit == [], "importing the toolkit and its command line pulls in heavy packages"
    assert kernels == [], "importing maxsim_kernels pulls in more than torch"
    assert started is False
    assert {"maxsim", "maxsim_reference", "stream_topk", "Packed"} <= set(public)
    assert str(ROOT) not in roots, "the installation puts the whole checkout on every process's path"


def test_every_package_is_in_the_distribution() -> None:
    for folder, own in ((ROOT, "maxsim_eval"), (ROOT / "kernels", "maxsim_kernels")):
        settings = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        assert settings["tool"]["setuptools"]["packages"] == sorted(name for name in packages() if name.split(".")[0] == own)
        assert set(importlib.metadata.packages_distributions()[own]) == {settings["project"]["name"]}
    commands = importlib.metadata.entry_points(group="console_scripts", name="maxsim-eval")
    assert [command.value for command in commands] == ["maxsim_eval.cli:main"]


def test_packaged_data_is_reachable() -> None:
    for package in ("maxsim_eval", "maxsim_kernels"):
        assert importlib.resources.files(package).joinpath("py.typed").is_file()
    toolkit = importlib.resources.files("maxsim_eval")
    tomllib.loads(toolkit.joinpath("thresholds.toml").read_text(encoding="utf-8"))
    for name in ("beir/scifact.toml", "demo/small.toml"):
        assert tomllib.loads(toolkit.joinpath("data", "cards", *name.split("/")).read_text(encoding="utf-8"))


def test_both_distributions_have_one_version() -> None:
    """The toolkit requires the operator of the same commit."""
    projects = [
        tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"] for folder in (ROOT, ROOT / "kernels")
    ]
    toolkit, operator = projects
    assert toolkit["version"] == operator["version"]
    assert f"maxsim-kernels=={operator['version']}" in toolkit["dependencies"]
    assert {re.split(r"[><=;]", name)[0].strip() for name in operator["dependencies"]} == {"torch", "triton", "numpy"}


@pytest.mark.slow
@pytest.mark.parametrize(("source", "own"), [(".", "maxsim_eval"), ("kernels", "maxsim_kernels")])
def test_a_wheel_holds_code_and_data(source: str, own: str, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path / "source"
    for file in tracked():
        target = copy / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    python("-c", code, str(tmp_path), cwd=copy / source)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = set()
    for name, folder in packages().items():
        if name.split(".")[0] != own:
            continue
        kinds = (".py", ".toml", ".json", ".html", ".css", ".js", ".md", ".txt")
        inside = [file for file in folder.rglob("*") if file.suffix in kinds or file.name == "py.typed"]
        expected |= {f"{name.replace('.', '/')}/{file.relative_to(folder).as_posix()}" for file in inside}
    assert held == expected


def test_nothing_mentions_one_machine() -> None:
    places = ("work", "tmp/w", "home/[a-z]+", "root", "Users/[a-z]+")  # without slashes: this file is searched too
    pattern = re.compile("|".join(rf"(?<![\w.*/}}-])/{place}/" for place in places))
    for file in tracked():
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found = pattern.search(text)
        assert not found, f"{file.relative_to(ROOT)} mentions {found and found.group()}"


def test_no_tracked_leftovers() -> None:
    bad = [file.name for file in tracked() if file.suffix in (".tmp", ".pyc", ".orig", ".rej") or file.name == ".DS_Store"]
    assert bad == []
    for folder in ("datasets", "embeddings_cache"):
        assert [file.name for file in tracked() if file.parent == ROOT / folder] == ["README.md"]
