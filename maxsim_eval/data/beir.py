"""BEIR-layout folders: `corpus.jsonl`, `queries.jsonl`, `qrels/<split>.tsv`, read strictly and written whole or not at all.

Texts follow BEIR: a document is `title + " " + text`, stripped. Every complaint names file and line. What BEIR's own loader
takes silently and wrongly is refused here: qrels without a header (it would eat the first judgement), a duplicate id
(the later one would replace the earlier), ids that no TREC run can hold.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maxsim_eval.bars import Bar
from maxsim_eval.data.items import PackedTexts
from maxsim_eval.errors import DataError, UsageError
from maxsim_eval.files import delete, fsync_folder, hidden, lines_of, remove_leftovers
from maxsim_eval.parsing import json_line
from maxsim_eval.printing import printable

QRELS_HEADER = ("query-id", "corpus-id", "score")
PROGRESS_BYTES = 64 << 20  # smaller files load in about a second: no bar
LAYOUT = "corpus.jsonl, queries.jsonl and qrels/<split>.tsv"
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
MAX_RELEVANCE = 10_000


@dataclass
class Texts:
    """Ids and texts of one JSONL file, in file order, and the file's own fingerprint."""

    ids: list[str] = field(default_factory=list)
    texts: PackedTexts = field(default_factory=PackedTexts)
    sha256: str = ""


@dataclass
class Judgements:
    """Qrels of one split, in file order; `repeated` counts pairs judged again with another score (the last one holds)."""

    qrels: dict[str, dict[str, int]] = field(default_factory=dict)
    repeated: int = 0
    sha256: str = ""


def _lines(path: Path, digest: Any, quiet: bool) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text) of lines that are not blank; UTF-8, with or without a byte order mark."""
    position = 0
    try:
        with (
            open(path, "rb") as handle,
            Bar(
                total=(size := os.fstat(handle.fileno()).st_size),
                unit="B",
                unit_scale=True,
                desc=printable(path.name),
                disable=quiet or size < PROGRESS_BYTES,
            ) as bar,
        ):
            for number, raw in lines_of(handle, path):
                digest.update(raw)
                bar.update(len(raw))
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{path}:{number}: not UTF-8: {error.reason} at byte {position + error.start} of the file. "
                        "Convert the file to UTF-8 (for example: iconv -f latin1 -t utf-8)."
                    ) from None
                position += len(raw)
                if text.strip():
                    yield number, text.rstrip("\r\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def check_id(where: str, what: str, value: str) -> None:
    """Refuse an id that no TREC run can hold: empty, with white space or NUL, not valid Unicode."""
    if value.split() != [value] or "\0" in value:
        raise DataError(
            f"{where}: {what} {value!r} is empty or holds white space, need one word: TREC run files separate columns by it"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{where}: {what} {value!r} holds half a surrogate pair, need valid Unicode") from None


def check_name(what: str, name: str) -> None:
    """Refuse the name of a dataset, split or encoder that does not stay on one line: reports and messages hold it."""
    wrong = next((letter for letter in name if unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp")), None)
    if wrong is not None:
        raise UsageError(f"{what} {name!r}: holds the control character U+{ord(wrong):04X}, need a name on one line")


def _record(where: str, text: str) -> dict[str, Any]:
    try:
        record = json_line(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}. Need one JSON object a line.") from None
    except ValueError as error:
        raise DataError(f"{where}: not usable JSON: {error}. Need one flat JSON object a line.") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON {type(record).__name__}, need an object with '_id' and 'text'")
    return record


def _record_id(where: str, record: dict[str, Any]) -> str:
    identifier = record.get("_id")
    if isinstance(identifier, int) and not isinstance(identifier, bool):
        identifier = str(identifier)  # qrels are text: 17 and "17" can only mean the same document
    if not isinstance(identifier, str):
        got = "missing" if "_id" not in record else f"{identifier!r}"
        raise DataError(f"{where}: '_id' is {got}, need a string")
    check_id(where, "'_id'", identifier)
    return identifier


def _record_text(where: str, record: dict[str, Any], key: str, *, required: bool) -> str:
    value = record.get(key)
    if value is None and not required:
        return ""
    if not isinstance(value, str):
        got = "missing" if key not in record else f"{type(value).__name__} {value!r:.40}"
        raise DataError(f'{where}: {key!r} is {got}, need a string ("" for an empty one)')
    return value


def read_texts(path: Path | str, *, titles: bool, quiet: bool = True) -> Texts:
    """Read `corpus.jsonl` (`titles=True`: text = title + " " + text, stripped) or `queries.jsonl` (text as it stands).

    Raises:
        DataError: unreadable file, a line that is not UTF-8, not JSON or not an object, `_id` or `text` missing or of
            the wrong type, an id with white space, an id used twice; the message names file and line(s).
    """
    path = Path(path)
    result, digest, seen = Texts(), hashlib.sha256(), set[str]()
    for number, line in _lines(path, digest, quiet):
        where = f"{path}:{number}"
        record = _record(where, line)
        identifier = _record_id(where, record)
        if identifier in seen:
            raise DataError(
                f"{where}: '_id' {identifier!r} is already that of line {_line_of(path, identifier)}, need unique ids"
            )
        seen.add(identifier)
        text = _record_text(where, record, "text", required=True)
        if titles:
            text = f"{_record_text(where, record, 'title', required=False)} {text}".strip()
        result.ids.append(identifier)
        result.texts.append(text)
    result.sha256 = digest.hexdigest()
    return result


def _line_of(path: Path, identifier: str) -> int:
    """The first line with this id: read again rather than keep five million line numbers for a message."""
    lines = _lines(path, hashlib.sha256(), True)
    return next(
        number for number, line in lines if _record_id(f"{path}:{number}", _record(f"{path}:{number}", line)) == identifier
    )


def check_header(path: Path, number: int, line: str) -> None:
    """Refuse a first line that is not BEIR's header: BEIR's loader drops it, whatever it is."""
    fields = [item.strip().strip('"') for item in line.split("\t")]
    if tuple(item.lower() for item in fields) == QRELS_HEADER:
        return
    shown, need = repr(line[:80]), "<tab>".join(QRELS_HEADER)
    fix = f"Add it with: sed -i '1i query-id\\tcorpus-id\\tscore' '{path}'"
    if len(fields) == 3 and _INTEGER.fullmatch(fields[2]):
        raise DataError(
            f"{path}:{number}: begins with the judgement {shown} instead of the header line {need}; beir takes the "
            f"first line for the header and would drop this judgement silently. {fix}"
        )
    if len(fields) == 1 and line.count(",") >= 2:
        raise DataError(f"{path}:{number}: separated by commas: {shown}, need tabs, after the header line {need}")
    columns = line.split()
    if len(columns) == 4 and _INTEGER.fullmatch(columns[3]):
        raise DataError(
            f"{path}:{number}: TREC qrels with 4 columns: {shown}, need BEIR's 3 after the header line {need}. Convert: "
            f"(printf 'query-id\\tcorpus-id\\tscore\\n'; awk '{{print $1\"\\t\"$3\"\\t\"$4}}' old.txt) > '{path}'"
        )
    raise DataError(f"{path}:{number}: the first line is {shown}, need the header {need}, separated by tabs")


def fields_of(where: str, line: str) -> list[str]:
    """The three fields of a line below the header."""
    if '"' in line:  # BEIR writes them with csv's minimal quoting: "Weird_Al" arrives as """Weird_Al"""
        try:
            fields = next(csv.reader([line], delimiter="\t", quoting=csv.QUOTE_MINIMAL, strict=True))
        except csv.Error as error:
            raise DataError(f'{where}: {line[:80]!r}: broken quoting ({error}); double every " inside a quoted id') from None
    else:
        fields = line.split("\t")
    if len(fields) != 3:
        hint = " (commas, not tabs?)" if line.count(",") >= 2 else ""
        raise DataError(f"{where}: {len(fields)} columns{hint}, need 3 separated by tabs: query-id, corpus-id, score")
    return [item.strip() for item in fields]


def _judgement(where: str, line: str) -> tuple[str, str, int]:
    query, document, score = fields_of(where, line)
    check_id(where, "query-id", query)
    check_id(where, "corpus-id", document)
    return query, document, relevance_of(where, score)


def relevance_of(where: str, text: str) -> int:
    """A relevance as a number, limited: trec_eval loops over every grade up to the highest, and 10^6 take minutes a query."""
    if not _INTEGER.fullmatch(text):
        raise DataError(f"{where}: relevance {text!r} is not a whole number (trec_eval grades with integers)")
    if abs(int(text)) > MAX_RELEVANCE:
        raise DataError(f"{where}: relevance {text}, need a whole number from -{MAX_RELEVANCE} to {MAX_RELEVANCE}")
    return int(text)


def read_judgements(path: Path | str, *, quiet: bool = True) -> Judgements:
    """Read `qrels/<split>.tsv`: the header `query-id, corpus-id, score`, then one judgement a line, tab-separated.

    Raises:
        DataError: unreadable or empty file, no header (the message shows how to add it), commas or TREC columns instead,
            a line without three columns, a score that is no integer; the message names file and line.
    """
    path = Path(path)
    result, digest, header = Judgements(), hashlib.sha256(), False
    for number, line in _lines(path, digest, quiet):
        if not header:
            check_header(path, number, line)
            header = True
            continue
        query, document, score = _judgement(f"{path}:{number}", line)
        row = result.qrels.setdefault(query, {})
        result.repeated += row.get(document, score) != score
        row[document] = score  # the last one holds, as in BEIR's loader
    if not header:
        raise DataError(f"{path}: empty, need the header line {'<tab>'.join(QRELS_HEADER)} and judgements")
    result.sha256 = digest.hexdigest()
    return result


def check_split(split: str) -> None:
    """Refuse a split that is not the plain name of a file: it becomes part of a path."""
    check_name("split", split)
    if not split or split in (".", "..") or Path(split).name != split or "\\" in split:
        raise UsageError(f"split {split!r}: need the name of a file qrels/<split>.tsv, without folders")


def splits(folder: Path | str) -> list[str]:
    """Names of the splits a folder has qrels for, sorted."""
    return sorted(path.stem for path in (Path(folder) / "qrels").glob("*.tsv"))


def dump_jsonl(records: Iterable[Mapping[str, Any]]) -> bytes:
    """One JSON object a line, UTF-8."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode("utf-8")


def dump_qrels(qrels: Mapping[str, Mapping[str, int]]) -> bytes:
    """BEIR's TSV with its header, UTF-8."""
    lines = ["\t".join(QRELS_HEADER)]
    lines += [f"{query}\t{document}\t{score}" for query, row in qrels.items() for document, score in row.items()]
    return ("\n".join(lines) + "\n").encode("utf-8")


def write_folder(folder: Path | str, files: Mapping[str, bytes]) -> None:
    """Write `files` (relative name -> content) as `folder`, whole or not at all; an existing folder is replaced.

    The files are written beside `folder` under a hidden name and renamed in one step. Of two processes
    that write the same folder at once, the later one wins; a reader never sees half a folder, at worst none for an instant.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    temporary = hidden(folder, "tmp")
    try:
        for name, content in files.items():
            target = temporary / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "wb") as handle:
                handle.write(content)
                handle.flush()
                os.fsync(handle.fileno())
        publish_folder(temporary, folder)
    finally:
        with suppress(OSError):  # the next writer takes it away
            delete(temporary)


def publish_folder(temporary: Path, folder: Path) -> None:
    """Rename `temporary` to `folder`; a folder that already stands there is moved aside first and deleted after."""
    retired = hidden(folder, "old")
    try:
        while True:
            if folder.exists():
                os.replace(folder, retired)
            try:
                os.replace(temporary, folder)
                break
            except OSError as error:
                # Another process published between the two renames: its folder is retired in turn, the later one wins.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                delete(retired)
        fsync_folder(folder.parent)
    finally:
        if retired.exists() and not folder.exists():
            os.replace(retired, folder)  # the new one did not arrive: the old one stays
        with suppress(OSError):  # the new one is there: the next writer takes away what is left of the old one
            delete(retired)
