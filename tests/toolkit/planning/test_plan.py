"""The arithmetic of a plan against hand-computed cases, what it rests on elsewhere, and what fits."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from maxsim_eval import api
from maxsim_eval.errors import UsageError
from maxsim_eval.planning import costs
from maxsim_eval.planning.costs import (
    FORMS,
    Encoding,
    PathRates,
    Rate,
    Rates,
    Sizes,
    corpus_bytes,
    kept_rows,
    largest_share,
    merge_bytes,
    operations,
    path_plan,
    scratch_bytes,
)
from maxsim_eval.planning.hardware import Machine
from maxsim_eval.planning.plan import HOST_BYTES, LEAST_GPU, Room, cold_bytes, make_plan
from maxsim_eval.planning.sizes import rule_of
from maxsim_eval.scoring import units
from maxsim_kernels import pack, quantize_fp8, quantize_int8
from maxsim_kernels.streaming import least_budget
from maxsim_kernels.topk import TopK
from places import ROOT

GIB = 1 << 30
# 8 GiB of FP16: 128 units of 64 MiB, 64 pieces of 128 MiB.
SIZES = Sizes(queries=500, documents=2**18, query_tokens=16_000, document_tokens=2**25, dim=128, form="float16")
FAST = Rate(1e30)


def rates(**changed: Any) -> Rates:
    """A GPU on which everything takes no time but what is given."""
    paths = {name: PathRates(FAST) for name in ("fp32", "fp16", "int8", "int8-corpus")}
    known = dict.fromkeys(("disk", "host", "link", "topk", "output", "compare", "finish", "network"), FAST)
    return Rates(**{"device": "cuda", "paths": paths, **known, "encode": Encoding(FAST), **changed})


# Sizes ------------------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_tensors() -> None:
    documents = pack([torch.randn(n, 16) for n in (3, 0, 5)])
    tensors = {
        "float32": [documents.values],
        "float16": [documents.to(torch.float16).values],
        "bfloat16": [documents.to(torch.bfloat16).values],
        "int8-token": [(q := quantize_int8(documents, "token")).token_values, q.scales],
        "int8-document": [(q := quantize_int8(documents, "document")).token_values, q.scales],
        "fp8-document": [(q := quantize_fp8(documents)).token_values, q.scales],
    }
    assert set(tensors) == set(FORMS)
    for form, parts in tensors.items():
        assert corpus_bytes(8, 3, 16, form) == sum(part.numel() * part.element_size() for part in parts), form
    with pytest.raises(UsageError, match="int4"):
        corpus_bytes(1, 1, 1, "int4")


def test_the_paper_s_corpora() -> None:
    assert corpus_bytes(100_000_000 * 1024, 100_000_000, 128, "float16") == 26_214_400_000_000  # 262 KB a page
    assert corpus_bytes(750_000 * 1024, 750_000, 128, "float16") == 196_608_000_000  # 197 GB
    assert operations(32, 1024, 128) == 2 * 32 * 1024 * 128


def test_kept_rows_follow_the_evaluation() -> None:
    assert kept_rows(300, 5183, ["fp32", "fp16"]) == 300
    assert kept_rows(300, 5183, ["fp16"]) == 0
    assert kept_rows(1000, 10**6, ["fp32"]) == 1000
    assert kept_rows(1000, 10**6 + 1, ["fp32"]) == 200
    assert kept_rows(150, 10**9, ["fp32"]) == 150
    assert (api._ALL_PAIRS, api._SAMPLED_QUERIES) == (costs.ALL_PAIRS, costs.SAMPLED_QUERIES)


def test_units_and_keys_are_those_of_the_evaluation() -> None:
    assert (costs.LEAST_UNIT, costs.MOST_UNIT, costs.UNIT_DOCUMENTS) == (
        units.LEAST_BYTES,
        units.MOST_BYTES,
        units.MOST_DOCUMENTS,
    )
    assert TopK(2, 3).keys.element_size() == costs.KEY_BYTES
    for documents, tokens in ((1000, 10), (300_000, 1), (400_000, 250)):
        found = len(units.units(np.full(documents, tokens), 256))
        assert costs.units(documents * tokens * 256, documents) == pytest.approx(found, abs=0.01 * found + 1)
    assert costs.units(0, 0) == 1


def test_shares_merge_and_scratch() -> None:
    assert [largest_share(8, ranks) for ranks in (1, 2, 3, 8, 20)] == [1, 0.5, 3 / 8, 1 / 8, 1 / 8]
    assert merge_bytes(8, 500, 100) == 8 * 500 * 100 * 8
    # 8 GiB are 128 units: rows x documents x 4 bytes, and 128 x 500 x 100 keys of 8 bytes, for each of 3 paths.
    assert scratch_bytes(SIZES, 10, 100, 3) == 3 * (10 * 2**18 * 4 + 128 * 500 * 100 * 8)


# Seconds ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "bound", "seconds"),
    [
        ({"link": Rate(GIB)}, "link", 8.0),
        ({"host": Rate(4 * GIB)}, "host copy", 2.0),
        ({"paths": {"fp16": PathRates(Rate(2.0 * 16_000 * 2**25 * 128 / 5))}}, "score", 5.0),
        ({"paths": {"fp16": PathRates(FAST, Rate(2 * GIB))}}, "prepare", 4.0),
        ({"topk": Rate(500 * 2**18 / 3)}, "top-k", 3.0),
    ],
)
def test_one_stage_bounds(changed: dict[str, Any], bound: str, seconds: float) -> None:
    found = path_plan("fp16", SIZES, rates(**changed), cold=0)
    assert found.bound == bound
    assert found.seconds == pytest.approx(seconds)
    assert found.of(bound) == pytest.approx(seconds)


def test_a_certified_path_reads_codes_and_what_some_query_may_want() -> None:
    # 500 queries leave 4 k = 40 documents each of 2^18: 1 - exp(-500 * 40 / 2^18) of all, whatever they share.
    share = 1 - np.exp(-500 * 40 / 2**18)
    work, codes = 2.0 * 16_000 * 2**25 * 128, 2**25 * 128 + 2 * 2**18
    slow = rates(link=Rate(GIB), paths={"exact-int8": PathRates(Rate(work / 5), Rate(1))})
    found = path_plan("exact-int8", SIZES, slow, cold=0, k=10)
    assert found.of("link") == pytest.approx((codes + share * SIZES.stored) / GIB)
    assert found.of("score") == pytest.approx(5 * (1 + 2 * share))  # twice the time a product, in FP16
    assert found.of("prepare") == 0
    wide = replace(slow, paths={"exact-int8-fp32": PathRates(Rate(work / 5), Rate(1))})
    widened = path_plan("exact-int8-fp32", SIZES, wide, cold=0, k=10)  # FP32 on the way to the GPU and there
    assert widened.of("link") == pytest.approx((codes + 2 * share * SIZES.stored) / GIB)
    assert widened.of("score") == pytest.approx(5 * (1 + 160 * share))
    everything = path_plan("exact-int8", SIZES, slow, cold=0, k=1000)  # all of it, by brute force after the scan
    assert everything.of("link") == pytest.approx((codes + SIZES.stored) / GIB)
    made = Machine("h200", gpus=1, disk=10**9).rates(["fp16", "exact-int8", "int8-document"], readers=4)
    assert made.paths["exact-int8"].score.value == made.paths["int8-document"].score.value
    on_cpu = path_plan("exact-int8", SIZES, replace(slow, device="cpu"), cold=0, k=1000)
    # Three times as long a product as the scan's, and products twice as large: of 4 k of the 2^18 pairs a query.
    assert on_cpu.of("score") == pytest.approx(5 * (1 + 3 * 2 * 4000 / 2**18))
    paths = {"exact-int8": PathRates(Rate(work / 5), Rate(1)), "fused-fp32": PathRates(Rate(work / 10), None)}
    known = replace(slow, device="cpu", paths=paths)
    assert path_plan("exact-int8", SIZES, known, cold=0, k=1000).of("score") == pytest.approx(5 * (1 + 2 * 2 * 4000 / 2**18))
    assert path_plan("exact-int8", SIZES, known, cold=0, k=20_000).of("score") == pytest.approx(5 * (1 + 2)), "brute force"


def test_what_a_cpu_gains_by_a_certified_path_is_about_what_was_measured() -> None:
    """By the rates of its scan and of brute force in the same evaluations: what a CPU gains depends on these.

    Reads and Python, which are no products, are a third of a search that takes a second in all (`lexical`'s).
    """
    measured = json.loads((ROOT / "docs" / "results" / "cpu" / "certified.json").read_text(encoding="utf-8"))
    for row in measured["runs"].values():
        brute, scan = (np.median(row["seconds"][name]) for name in ("fused-fp32", "int8-document"))
        paths = {"exact-int8": PathRates(Rate(brute / scan * 1e9)), "fused-fp32": PathRates(Rate(1e9))}
        sizes = replace(SIZES, queries=row["queries"], documents=row["documents"])
        on_cpu = replace(rates(), device="cpu", paths=paths)
        float_path, certified = (path_plan(name, sizes, on_cpu, cold=0, k=row["k"]) for name in ("fused-fp32", "exact-int8"))
        gain = float_path.of("score") / certified.of("score")  # type: ignore[operator]
        most = 1.75 if row["encoder"] == "lexical" else 1.3
        assert 0.6 < gain / np.median(row["times"]) < most, (row["encoder"], row["k"], gain)
    assert len(measured["runs"]) == 4


def test_resources_overlap_and_stages_of_one_add() -> None:
    # 8 s of link; GPU: 5 s of scoring and 4 s of preparing are 9 s. The first of 64 pieces of 128 MiB crosses the link alone.
    busy = rates(link=Rate(GIB), paths={"fp16": PathRates(Rate(2.0 * 16_000 * 2**25 * 128 / 5), Rate(2 * GIB))})
    found = path_plan("fp16", SIZES, busy, cold=0)
    assert found.bound == "score"
    assert found.fill == pytest.approx(8 / 64)
    assert found.seconds == pytest.approx(9 + 8 / 64)


def test_cold_bytes_come_from_the_disk() -> None:
    found = path_plan("fp16", SIZES, rates(disk=Rate(GIB), link=Rate(4 * GIB)), cold=8 * GIB)
    assert found.bound == "disk"
    assert found.seconds == pytest.approx(8 + 2 / 64)


def test_a_cpu_copies_and_scores_with_the_same_cores() -> None:
    path = {"fp16": PathRates(Rate(2.0 * 16_000 * 2**25 * 128 / 5), Rate(2 * GIB))}
    found = path_plan("fp16", SIZES, rates(device="cpu", host=Rate(8 * GIB), paths=path), cold=0)
    assert found.seconds == pytest.approx(1 + 4 + 5)
    assert "link" not in [stage.name for stage in found.stages]
    more = path_plan("fp16", SIZES, rates(device="cpu", host=Rate(8 * GIB), paths=path), cold=0, processes=4)
    assert more.seconds == pytest.approx(10)  # processes share the cores


def test_gpus_share_disk_and_host_but_not_links() -> None:
    one = rates(link=Rate(GIB), host=Rate(2 * GIB), network=Rate(500 * 100 * 8 * 8.0))
    found = path_plan("fp16", SIZES, one, cold=0, processes=8)
    assert found.of("link") == pytest.approx(1)
    assert found.of("host copy") == pytest.approx(4)
    assert found.bound == "host copy"
    # The first piece of 1/64 crosses its link at full length, and 8 ranks' keys are merged after everything.
    assert found.seconds == pytest.approx(4 + 8 / 64 + 1)


def test_few_units_leave_ranks_idle() -> None:
    small = replace(SIZES, documents=3072, document_tokens=3 * 2**18)  # 192 MiB: 3 units
    found = path_plan("fp16", small, rates(link=Rate(3 << 26)), cold=0, processes=2)
    assert found.of("link") == pytest.approx(2 / 3)


def test_a_corpus_scale_is_a_pass_of_its_own() -> None:
    found = path_plan("int8-corpus", SIZES, rates(disk=Rate(GIB), link=Rate(2 * GIB)), cold=8 * GIB)
    assert found.of("corpus scale") == pytest.approx(8)  # which reads the disk, so that scoring does not
    assert found.of("disk") == 0
    assert found.seconds == pytest.approx(8 + 4)
    again = path_plan("int8-corpus", SIZES, rates(disk=Rate(GIB)), cold=16 * GIB)
    assert again.seconds == pytest.approx(16)


def test_kept_scores_are_written_beside_scoring() -> None:
    found = path_plan("fp16", SIZES, rates(link=Rate(4 * GIB), output=Rate(2**20)), cold=0, rows=10)
    assert found.of("kept scores") == pytest.approx(10)
    assert (found.bound, found.seconds) == ("kept scores", pytest.approx(10 + 2 / 64))


def test_an_unknown_rate_of_scoring_is_never_a_number() -> None:
    found = path_plan("fp8", SIZES, rates(), cold=0)
    assert (found.bound, found.seconds) == ("unknown", None)
    made = make_plan(SIZES, rates(compare=None, topk=None), Room(), ["fp32", "fp8"])
    assert made.total is None
    assert set(made.unknown) == {"fp8", "prepare of fp8", "score of fp8", "top-k of fp32", "top-k of fp8", "compare"}


def test_nothing_to_score() -> None:
    empty = Sizes(0, 0, 0, 0, 128, "float32")
    found = make_plan(empty, rates(), Room(memory=GIB), ["fp32", "int8-corpus"])
    assert found.total == pytest.approx(0, abs=1e-6)


# The whole plan ---------------------------------------------------------------------------------------------------------


def test_who_reads_the_disk() -> None:
    names = ["fp32", "fp16", "int8-corpus"]
    whole, roomy, tight = 8.0 * GIB, Room(memory=16 * GIB), Room(memory=8 * GIB)
    assert cold_bytes(SIZES, roomy, names, 4 * GIB) == {"fp32": whole, "fp16": 0, "int8-corpus": 0}
    assert cold_bytes(SIZES, replace(roomy, in_page_cache=0.75), names)["fp32"] == whole / 4
    assert cold_bytes(replace(SIZES, encoded=False), roomy, names)["fp32"] == 0  # just written
    assert cold_bytes(SIZES, tight, names, 1) == {"fp32": whole, "fp16": whole, "int8-corpus": 2 * whole}
    assert cold_bytes(SIZES, replace(tight, in_page_cache=1.0), names, 1)["fp16"] == whole
    assert cold_bytes(SIZES, Room(), names) == cold_bytes(SIZES, tight, names, 1)  # unknown memory: the worst


def test_the_total_is_start_paths_and_comparison() -> None:
    sizes = replace(SIZES, queries=10, query_tokens=320)
    known = rates(link=Rate(GIB), compare=Rate(2**18), finish=Rate(5), encode=Encoding(Rate(2**17), 1.0), output=Rate(GIB / 2))
    made = make_plan(sizes, known, Room(memory=100 * GIB), ["fp32", "fp16"], start=3.0)
    assert made.kept_rows == 10
    assert {phase.name: phase.seconds for phase in made.phases} == pytest.approx(
        # Comparing: one path beside the reference; finishing: 10 queries by 2 paths.
        {"start": 3, "fp32": 8, "fp16": 8, "compare": 10, "finish": 4}
    )
    assert made.total == pytest.approx(3 + 8 + 8 + 10 + 4)
    encoded = make_plan(replace(sizes, encoded=False), known, Room(memory=100 * GIB), ["fp16"])
    assert [phase.name for phase in encoded.phases] == ["start", "encode", "fp16", "finish"]
    assert encoded.phases[1].seconds == pytest.approx(16)  # written meanwhile, which takes longer
    fast = replace(known, output=Rate(8 * GIB))
    seconds = {
        (rates.device, count): make_plan(
            replace(sizes, encoded=False), rates, Room(memory=100 * GIB), ["fp16"], processes=count
        )
        .phases[1]
        .seconds
        for rates in (fast, replace(fast, device="cpu"))
        for count in (1, 2)
    }
    # 2^18 documents, a second of start; on a CPU processes share the cores, and what is encoded is written afterwards.
    assert seconds == pytest.approx({("cuda", 1): 1 + 2, ("cuda", 2): 1 + 1, ("cpu", 1): 1 + 2 + 1, ("cpu", 2): 1 + 2 + 1})


def test_rates_that_were_not_steady_give_a_range() -> None:
    shaky = rates(link=Rate(GIB, spread=0.5), paths={"fp32": PathRates(FAST), "fp16": PathRates(Rate(1e30, spread=9.0))})
    made = make_plan(SIZES, shaky, Room(memory=100 * GIB), ["fp32", "fp16"])
    assert [phase.more for phase in made.phases if phase.stages] == pytest.approx([4, 4])  # of what bounds it alone
    assert made.more == pytest.approx(8)


ROOMY = Room(memory=100 * GIB, cache_disk=100 * GIB, output_disk=100 * GIB, gpu=80 * GIB, gpus=8)


def verdicts(room: Room, sizes: Sizes = SIZES, **options: Any) -> dict[str, bool | None]:
    made = make_plan(sizes, rates(), room, ["fp32", "fp16"], **options)
    found = {check.what: check.ok for check in made.checks}
    assert made.fits is (False not in found.values())
    return found


def test_what_fits() -> None:
    every = {"memory", "page cache", "cache disk", "output disk", "GPU memory", "GPUs"}
    assert verdicts(ROOMY, processes=8) == dict.fromkeys(every, True)
    assert verdicts(ROOMY, processes=9)["GPUs"] is False
    least = least_budget("cuda", SIZES.queries)
    assert [verdicts(ROOMY, memory_budget=budget)["memory budget"] for budget in (least - 1, least)] == [False, True]
    assert verdicts(replace(ROOMY, memory=2 * GIB))["memory"] is False
    assert verdicts(replace(ROOMY, memory=8 * GIB))["page cache"] is None  # slower, but it works
    assert verdicts(replace(ROOMY, output_disk=10**6))["output disk"] is False
    assert verdicts(ROOMY, memory_budget=81 * GIB)["GPU memory"] is False
    assert verdicts(replace(ROOMY, gpu=LEAST_GPU))["GPU memory"] is False
    assert verdicts(replace(ROOMY, memory=None, cache_disk=None))["memory"] is None
    assert "GPU memory" not in {check.what for check in make_plan(SIZES, rates(device="cpu"), ROOMY, ["fp16"]).checks}


def test_every_process_holds_the_task() -> None:
    room = replace(ROOMY, process=10 * GIB)
    one, eight = (make_plan(SIZES, rates(), room, ["fp16"], processes=count).checks[0].needed for count in (1, 8))
    assert one > 10 * GIB + HOST_BYTES["cuda"]
    assert eight == 8 * one
    assert verdicts(room, processes=8)["memory"] is False


def test_what_must_be_encoded_needs_the_cache_disk() -> None:
    new = replace(SIZES, encoded=False)
    queries = 16_000 * 256
    assert verdicts(replace(ROOMY, cache_disk=8 * GIB + queries - 1))["cache disk"] is True
    assert verdicts(replace(ROOMY, cache_disk=8 * GIB + queries - 1), new)["cache disk"] is False
    assert verdicts(replace(ROOMY, cache_disk=8 * GIB + queries), new)["cache disk"] is True
    made = make_plan(new, rates(), ROOMY, ["fp16"])
    assert "encode" not in made.unknown
    assert "encode" in make_plan(new, rates(encode=None), ROOMY, ["fp16"]).unknown


def test_one_disk_must_hold_both() -> None:
    new = replace(SIZES, encoded=False)
    both = {check.what: check.needed for check in make_plan(new, rates(), ROOMY, ["fp32", "fp16"]).checks}
    needed = both["cache disk"] + both["output disk"]
    room = replace(ROOMY, one_disk=True, cache_disk=needed, output_disk=needed)
    assert verdicts(room, new)["disk"] is True
    assert verdicts(replace(room, cache_disk=needed - 1), new)["disk"] is False


@pytest.mark.parametrize("gpu", ["h200", "h100"])
def test_the_ranges_of_a_gpu_cover_its_rehearsal(gpu: str) -> None:
    """What `plan --gpu` says of every path and of encoding, beside what the whole command took."""
    runs = json.loads((ROOT / "docs" / "results" / gpu / "rehearsal.json").read_text(encoding="utf-8"))
    machine = Machine(gpu, 1, disk=3 * 10**9, ram=10**12)
    paths = ("fp32", "fp16", "int8")
    for run, took in (("scored", {}), ("encoded", {"encode": "encode and write"})):
        phases, documents = runs[run]["phases"], int(5_233_329 / runs[f"{run}_part"])
        sizes = Sizes(7405, documents, 7405 * 32, runs[run]["document_tokens"], 128, "float16", encoded=run == "scored")
        encode = machine.encode(sizes, rule_of("colbertv2").parameters)
        made = make_plan(sizes, replace(machine.rates(paths, 4), encode=encode), machine.room(), paths)
        said = {phase.name: phase for phase in made.phases}
        for name in (*(path for path in paths if path in phases), *took):
            seconds, measured = said[name].seconds, phases[took.get(name, name)]
            assert seconds is not None
            assert seconds / 1.1 <= measured <= 1.1 * (seconds + said[name].more), (run, name)
    assert machine.encode(sizes, rule_of("lexical").parameters) is None, "no model: a CPU's work, whose rate is not known"
    four = Machine(gpu, 4, disk=1).encode(sizes, 85e6)
    assert four is not None
    assert encode is not None
    assert four == encode, "of one GPU: the plan divides"
