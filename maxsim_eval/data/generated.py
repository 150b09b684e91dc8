"""The generated collection behind `demo`: about 300 documents and 40 queries with graded judgements, in BEIR layout.

It is made to have what breaks retrieval code, not to be hard: ragged lengths, empty documents, documents of more than 2000
words, exact duplicates (ties), grades 0, 1 and 2, text outside ASCII. Each document treats one topic and one aspect of it
(grade 2) and may touch another aspect (grade 1); every concept has several words and a document and a query pick theirs
independently, so that lexical matching works well but not perfectly.

The text depends on nothing but this file: the random numbers are BLAKE2b in counter mode, the same on every platform and
Python version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from maxsim_eval.data.beir import dump_jsonl, dump_qrels, write_folder
from maxsim_eval.errors import UnknownNameError
from maxsim_eval.files import writing

T = TypeVar("T")
DEFAULT = "small"

# Name: concepts, each with the words for it; documents and queries choose among the words independently.
_TOPICS = """
    bees: beehive/apiary/hive honey/nectar swarm/colony pollen/blossom queen/brood
    canals: canal/waterway lock/sluice barge/narrowboat towpath/embankment dredging/silt
    violins: violin/fiddle varnish/lacquer bow/horsehair luthier/maker spruce/maple
    glaciers: glacier/icefield moraine/debris crevasse/fissure meltwater/runoff névé/firn
    bread: bread/loaf sourdough/leaven flour/rye oven/hearth crust/crumb
    trams: tram/streetcar rail/track overhead/catenary depot/garage passenger/commuter
    lighthouses: lighthouse/beacon lens/prism keeper/watchman foghorn/siren reef/shoal
    orchards: orchard/grove apple/cider grafting/rootstock pruning/trimming harvest/picking
    kites: kite/glider string/tether bamboo/frame silk/paper breeze/gust
    caves: cave/cavern stalactite/dripstone bat/roost limestone/karst passage/gallery
    looms: loom/weaving shuttle/bobbin warp/weft wool/linen pattern/tapestry
    observatories: observatory/telescope mirror/aperture dome/shutter comet/asteroid spectrum/wavelength
"""
_ASPECTS = """
    cost: cost/price/expense budget/funding loan/subsidy
    safety: safety/hazard/danger injury/accident helmet/precaution
    history: history/origin/tradition century/medieval archive/chronicle
    upkeep: maintenance/repair/upkeep cleaning/inspection rust/decay
    weather: weather/climate/season frost/snowfall drought/rainfall
    training: training/lesson/apprenticeship school/workshop beginner/novice
    tourism: tourism/visitor/travel museum/exhibition ticket/guide
    law: law/regulation/statute permit/licence court/dispute
"""
_FILLER = """
    people often small large region valley river town village morning evening winter summer year month number result
    report study record local common early late simple careful method material design surface colour measure example
    problem reason change growth value group member family market road bridge garden field stone water light sound
    council engineer farmer teacher writer neighbour letter story question answer plan project season café façade
"""
FILLER = tuple(_FILLER.split())
OPENERS = ("In this account", "According to the notes", "A short survey shows that", "For many years", "As reported here,")
QUESTIONS = ("what is known about {}", "how do {} matter", "notes on {}", "which reports describe {}", "{}")


def _concepts(table: str) -> dict[str, list[list[str]]]:
    rows = (line.split(":") for line in table.strip().splitlines())
    return {name.strip(): [concept.split("/") for concept in words.split()] for name, words in rows}


TOPICS = _concepts(_TOPICS)
ASPECTS = _concepts(_ASPECTS)


class Stream:
    """Random choices from BLAKE2b in counter mode over a seed text."""

    def __init__(self, seed: str) -> None:
        self._seed, self._count = seed, 0

    def below(self, n: int) -> int:
        """An integer of 0..n-1 (the modulo bias at 64 bits is of no consequence here)."""
        self._count += 1
        digest = hashlib.blake2b(f"{self._seed}/{self._count}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % n

    def pick(self, items: Sequence[T]) -> T:
        """Draw one of `items`."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], n: int) -> list[T]:
        """`n` different members of `items`, in random order."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(n)]


@dataclass(frozen=True)
class _Document:
    topic: str
    main: str  # the aspect it treats: grade 2
    side: str  # the aspect it touches, or "": grade 1
    title: str
    text: str


def _sentence(rng: Stream, words: list[str]) -> str:
    mixed = [*words, *rng.sample(FILLER, 4 + rng.below(6))]
    text = " ".join(rng.sample(mixed, len(mixed)))
    if rng.below(4) == 0:
        text = f"{rng.pick(OPENERS)} {text}"
    return text[0].upper() + text[1:] + "."


def _document(rng: Stream, topic: str, main: str, side: str, sentences: int) -> _Document:
    parts = []
    for number in range(sentences):
        words = [rng.pick(concept) for concept in rng.sample(TOPICS[topic], 1 + rng.below(2))]
        if number == 0 or rng.below(2) == 0:
            words += [rng.pick(rng.pick(ASPECTS[main]))]
        if side and (number == sentences - 1 or rng.below(12) == 0):
            words += [rng.pick(rng.pick(ASPECTS[side]))]
        if rng.below(6) == 0:  # a passing word of another topic or aspect
            other = TOPICS[rng.pick(list(TOPICS))] if rng.below(2) else ASPECTS[rng.pick(list(ASPECTS))]
            words += [rng.pick(rng.pick(other))]
        parts.append(_sentence(rng, words))
    title = " ".join([rng.pick(TOPICS[topic][0]), rng.pick(FILLER)]).capitalize() if rng.below(3) else ""
    return _Document(topic, main, side, title, " ".join(parts))


def _documents(rng: Stream) -> list[_Document]:
    pairs = [(topic, aspect) for topic in TOPICS for aspect in ASPECTS]
    result = []
    for number in range(280):
        topic, main = pairs[number % len(pairs)]
        side = rng.pick([aspect for aspect in ASPECTS if aspect != main]) if rng.below(2) else ""
        sentences = 220 if number % 70 == 35 else 1 + rng.below(4) if number % 5 == 0 else 4 + rng.below(14)
        result.append(_document(rng, topic, main, side, sentences))
    result += [result[index] for index in rng.sample(range(280), 12)]  # exact duplicates under other ids
    empty = [("", ""), ("", ""), ("", ""), ("", "   "), ("", "..."), ("", "The and of it."), ("", "—"), ("", "")]
    result += [_Document("", "", "", title, text) for title, text in empty]
    return rng.sample(result, len(result))


def _grade(document: _Document, topic: str, aspect: str) -> int:
    if document.topic != topic:
        return 0
    return 2 if document.main == aspect else 1 if document.side == aspect else 0


def generate(name: str = DEFAULT) -> dict[str, bytes]:
    """The files of the collection: relative name -> content, the same bytes on every machine.

    Raises:
        UnknownNameError: no such demo collection.
    """
    if name != DEFAULT:
        raise UnknownNameError("demo dataset", name, [DEFAULT])
    rng = Stream("maxsim-eval demo 1")
    documents = _documents(rng)
    ids = [f"d{number:03d}" for number in range(len(documents))]
    corpus = [{"_id": i, "title": d.title, "text": d.text} for i, d in zip(ids, documents)]
    queries, qrels = [], dict[str, dict[str, int]]()
    pairs = rng.sample([(topic, aspect) for topic in TOPICS for aspect in ASPECTS], 40)
    for number, (topic, aspect) in enumerate(pairs):
        words = [rng.pick(concept) for concept in rng.sample(TOPICS[topic], 2 + rng.below(2))]
        words += [rng.pick(concept) for concept in rng.sample(ASPECTS[aspect], 2 + rng.below(2))]
        query = f"q{number:02d}"
        queries.append({"_id": query, "text": rng.pick(QUESTIONS).format(" ".join(words))})
        grades = {i: _grade(d, topic, aspect) for i, d in zip(ids, documents)}
        wrong = rng.sample([i for i, d in zip(ids, documents) if d.topic == topic and not grades[i]], 3)
        qrels[query] = {i: grade for i, grade in grades.items() if grade or i in wrong}
    queries.append({"_id": "q40", "text": "a query that nobody judged"})
    return {"corpus.jsonl": dump_jsonl(corpus), "queries.jsonl": dump_jsonl(queries), "qrels/test.tsv": dump_qrels(qrels)}


def ensure(name: str, parent: Path) -> tuple[Path, bool]:
    """Make sure `parent/name` holds the collection, byte for byte; write it whole or not at all.

    Returns:
        The folder, and whether one stood there with other content and was replaced.
    """
    files, folder = generate(name), Path(parent) / name
    existed = folder.exists()
    if existed and all((folder / file).is_file() and (folder / file).read_bytes() == data for file, data in files.items()):
        return folder, False
    with writing(folder):
        write_folder(folder, files)
    return folder, existed
