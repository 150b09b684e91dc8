"""The command `gate`: a Result against a committed baseline and thresholds, for a CI."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from maxsim_eval.cli.options import AsJson
from maxsim_eval.cli.output import answer, print_json, say
from maxsim_eval.errors import EXIT_GATE, UsageError

_SUMMARY = "GITHUB_STEP_SUMMARY"


def gate(
    result: Annotated[Path, typer.Argument(help="result.json of a fresh evaluation, or its folder.")],
    baseline: Annotated[Path, typer.Option(help="Committed baseline JSON.")],
    thresholds: Annotated[Path | None, typer.Option(help="Thresholds TOML. Default: the paper's bounds.")] = None,
    require_equivalent: Annotated[
        bool,
        typer.Option("--require-equivalent", help="Every metric with a bound must be shown to lie within it, by its interval."),
    ] = False,
    summary: Annotated[
        Path | None, typer.Option(help="Also append a Markdown summary to this file. Default: $GITHUB_STEP_SUMMARY, where set.")
    ] = None,
    update_baseline: Annotated[bool, typer.Option("--update-baseline", help="Write the baseline from this result.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="With --update-baseline: also over the baseline of something else.")
    ] = False,
    accept: Annotated[
        bool, typer.Option("--accept", help="With --update-baseline: also where the gate fails, on purpose.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also show the checks that passed.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only what failed and the verdict.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fail (exit code 1) when quality fell or a path left its parity bounds. For a CI: docs/gate.md.

    Example: python evaluate.py gate results/beir-scifact-lexical/result.json --baseline tests/baselines/scifact-lexical.json
    """
    from maxsim_eval.gate import checking as rules
    from maxsim_eval.gate.report import append_summary, overview, render, to_json, to_summary
    from maxsim_eval.report.result_json import read_result

    for name, given in (("--replace", replace), ("--accept", accept)):
        if given and not update_baseline:
            raise UsageError(f"{name}: only with --update-baseline")
    if summary and update_baseline:
        raise UsageError("--summary: not with --update-baseline, which checks nothing that could be summarised")
    found, bounds = read_result(result), rules.load_thresholds(thresholds)
    if update_baseline:
        findings = [] if accept else rules.check_update(baseline, found, bounds, equivalent=require_equivalent, replace=replace)
        if not (accept or rules.passed(findings)):
            if as_json:
                print_json(to_json(findings))
            else:
                typer.echo(render(findings, every=verbose))
            say(f"{baseline}: not written; --accept writes it all the same")
            raise typer.Exit(EXIT_GATE)
        changes = rules.update_baseline(baseline, found, replace=replace)
        if as_json:
            print_json({"baseline": str(baseline), "written": True, "changes": changes})
        else:
            for line in (f"baseline written: {baseline}", *(f"  {line}" for line in changes or ["nothing changed"])):
                answer(line)
        return
    findings = rules.check(found, rules.load_baseline(baseline), bounds, equivalent=require_equivalent)
    if as_json:
        print_json(to_json(findings))
    else:
        typer.echo("\n".join([*([] if quiet else [overview(found)]), render(findings, every=verbose)]))
    target = summary or os.environ.get(_SUMMARY)
    if target:
        append_summary(target, to_summary(found, findings))
    if not rules.passed(findings):
        raise typer.Exit(EXIT_GATE)
