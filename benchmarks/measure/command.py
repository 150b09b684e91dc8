"""`evaluate.py` with clocks around its phases: `python command.py RECORD ARGUMENTS...` writes their seconds, by name, to RECORD.

Of several processes, under torchrun, the leader writes: it alone compares and reports.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(record: Path, arguments: list[str]) -> int:
    """Run `evaluate.py ARGUMENTS` here and write what its phases took."""
    began = time.perf_counter()
    sys.argv = ["evaluate.py", *arguments]
    from maxsim_eval import api, subject
    from maxsim_eval.cache import embeddings, filling, sides
    from maxsim_eval.cli import main as command
    from maxsim_eval.comparison import assessing, parity
    from maxsim_eval.data import loading
    from maxsim_eval.encoders.multi_vector import MultiVectorEncoder
    from maxsim_eval.processes import world

    seconds: dict[str, float] = {"imports": time.perf_counter() - began}

    def clocked(home: Any, name: str, phase: str, once: bool = False) -> None:
        inner = getattr(home, name)

        def call(*given: Any, **named: Any) -> Any:
            if once and phase in seconds:
                return inner(*given, **named)
            start = time.perf_counter()
            try:
                return inner(*given, **named)
            finally:
                seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start

        setattr(home, name, call)

    clocked(loading, "load_task", "read texts")
    clocked(sides, "content_hash", "hash texts")
    clocked(embeddings, "_encoder_of", "import the encoder")
    clocked(embeddings, "embed", "encode the queries")
    clocked(sides.TaskSide, "fill", "encode and write", once=True)  # the documents; the queries come after them
    share, by_all = world._Group.share, subject.embeddings_by
    # Clocked until all have read the texts and started their encoders; later `share` waits for other things.
    clocked(world._Group, "share", "wait for the others")

    def embeddings_by(*given: Any, **named: Any) -> Any:
        try:
            return by_all(*given, **named)
        finally:
            world._Group.share = share  # type: ignore[method-assign]

    subject.embeddings_by = embeddings_by
    clocked(subject, "embeddings_by", "embeddings")
    # Its first call (on a GPU, of a few texts) starts the model, the readers, the GPU and its kernels.
    clocked(MultiVectorEncoder, "encode", "start the encoder", once=True)
    clocked(MultiVectorEncoder, "_features", "tokenise (its threads)")
    clocked(filling, "write_shard", "write shards (their threads)")
    clocked(api, "assess", "score and compare")
    clocked(parity, "compare_scores", "compare full scores")
    clocked(assessing, "_result", "metrics")
    clocked(api, "_write", "write runs and report")
    code = 0
    try:
        command()
    except SystemExit as ended:
        code = int(ended.code or 0)
    seconds["in the process"] = time.perf_counter() - began
    if os.environ.get("RANK", "0") == "0":
        record.write_text(json.dumps(seconds))
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
