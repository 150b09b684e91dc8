"""The tables and pictures of docs/atlas.md: the default grid on SciFact, with `lexical` and with MiniLM.

python -m maxsim_eval.studies.atlas_page                            prints the tables
python -m maxsim_eval.studies.atlas_page --write docs/atlas.md      puts them between their markers, and draws the pictures
python -m maxsim_eval.studies.atlas_page --measure --data-dir DIR   evaluates first (what is finished is kept), writes the JSON files
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from maxsim_eval.atlas.atlas import atlas
from maxsim_eval.atlas.judging import Atlas
from maxsim_eval.atlas.page import headline, loss_table, main_table
from maxsim_eval.atlas.picture import to_svg
from maxsim_eval.atlas.writing import read_atlas, to_json
from maxsim_eval.codecs.names import STEPS
from maxsim_eval.files import write_text
from maxsim_eval.report.markdown import cell, table
from maxsim_eval.studies.fidelity import default_encoder
from maxsim_eval.studies.scale import put

FOLDER = Path("docs/results/cpu")
COMMAND = ("python", "-m", "maxsim_eval.studies.atlas_page", "--measure")
NAMES = ("minilm", "lexical")


def json_of(name: str, folder: Path = FOLDER) -> Path:
    """Where the atlas of an encoder is kept."""
    return folder / f"atlas_scifact_{name}.json"


def measure(data_dir: Path, cache_dir: Path, out: Path, folder: Path, device: str) -> None:
    """Make both atlases, and write their JSON files."""
    from maxsim_eval.data.loading import load_task

    task = load_task("beir", "scifact", data_dir=data_dir)
    for name in NAMES:
        encoder = default_encoder() if name == "minilm" else name
        made = atlas(task, encoder, out_dir=out / name, cache_dir=cache_dir, device=device, command=COMMAND)
        write_text(json_of(name, folder), to_json(made))


def all_tables(atlases: Mapping[str, Atlas]) -> dict[str, list[str]]:
    """Every table of docs/atlas.md by its marker's name."""
    found = {"steps": _steps()}
    for name, made in atlases.items():
        whole = main_table(made)
        found[name] = [f"**{cell(headline(made))}.**", "", *table(whole.columns, whole.rows, "---:")[:-1]]
        losses = loss_table(made)
        if losses is not None:
            found[f"{name}-losses"] = table(losses.columns, losses.rows, "---:")[:-1]
    return found


def _steps() -> list[str]:
    rows = [[name, kind.summary, kind.source] for name, (kind, _) in STEPS.items()]
    return table(["step", "what it does", "source"], rows)[:-1]


def main(arguments: list[str] | None = None) -> None:
    """Measure where asked to; print the tables, or write them into a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="evaluate, and write the JSON files")
    parser.add_argument("--data-dir", type=Path, default=Path("datasets"), help="folder of BEIR datasets")
    parser.add_argument("--cache-dir", type=Path, default=Path("embeddings_cache"), help="folder of the embedding cache")
    parser.add_argument("--out", type=Path, default=Path("results/atlas"), help="folder of the atlases themselves")
    parser.add_argument("--device", default="auto", help="where scores are computed")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the JSON files")
    parser.add_argument("--write", type=Path, help="page whose tables are replaced; pictures/ beside it")
    options = parser.parse_args(arguments)
    if options.measure:
        measure(options.data_dir, options.cache_dir, options.out, options.folder, options.device)
    atlases = {name: read_atlas(json_of(name, options.folder)) for name in NAMES}
    put(all_tables(atlases), options.write)
    if options.write is not None:
        for name, made in atlases.items():
            write_text(options.write.parent / "pictures" / f"atlas_{name}.svg", to_svg(made) + "\n")


if __name__ == "__main__":
    main()
