"""The parts of a training step, and the backward alone: our paths called directly, the peers' through autograd.

Source: the paper's component breakdown (tab:bwd_breakdown, one query) and its ablation of backward paths (tab:bwd_abl). Winners come
from data, so that peers can take part (`drawn` of `training.py`). Every run of csr must give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cases.training import row, shared
from maxsim_kernels import maxsim
from measure import installed
from measure.method import Lineup, Method, Options, Row
from measure.names import ABLATION, FLASH, LIK, WINNERS, ablation_name, parts_name
from measure.session import RefusedError
from measure.timing import Call
from rivals import training as rivals
from rivals.training import PATHS, Problem, Scores, summed

REPEATS = 20


def gradients(problem: Problem, winners: Tensor, choice: str, needs: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
    """Our backward called directly: gradients of queries and documents for `problem.grad`."""
    queries, documents = problem.queries.detach(), problem.documents.detach()
    if queries.is_cuda:
        from maxsim_kernels.gpu.backward import gradients as backward

        made = backward.backward(problem.grad, winners, queries, None, documents, None, "shared", *needs, choice)
    else:
        from maxsim_kernels.cpu import backward as cpu_backward

        made = cpu_backward.backward(problem.grad, winners, queries, None, documents, None, "shared", *needs)
    return (made[0] if needs[0] else None, made[1] if needs[1] else None)


def saved_winners(problem: Problem) -> Tensor:
    """What training saves: 16-bit winners where they fit (on a CPU 32-bit)."""
    with torch.no_grad():
        winners = maxsim(problem.queries, problem.documents, return_argmax=True)[1]
    small = problem.documents.shape[-2] < 65535 and winners.is_cuda
    return winners.to(torch.int16) if small else winners


def direct(problem: Problem, name: str, choice: str, needs: tuple[bool, bool], winners: Tensor, repeats: int = 0) -> Method:
    """The backward alone, with its kernels' own times; `repeats`: every run must give the same bits."""
    kept: list[Tensor] = []

    def call() -> Tensor:
        kept.clear()
        made = [part for part in gradients(problem, winners, choice, needs) if part is not None]
        kept.extend(made)
        return made[0]

    def check(_: str) -> dict[str, Any]:
        kept.clear()
        first = gradients(problem, winners, choice, needs)
        found = problem.compare(problem.grad, first)
        for run in range(1, repeats):
            again = gradients(problem, winners, choice, needs)
            for before, after in zip(first, again, strict=True):
                if before is not None and after is not None and not torch.equal(before, after):
                    raise RefusedError(f"wrong: run {run + 1} of {repeats} gave other bits")
        return {**found, "same_bits": repeats} if repeats else found

    wanted = [leaf for leaf, need in zip((problem.queries, problem.documents), needs, strict=True) if need]
    return Method(
        name,
        "ours",
        {"": call},
        check=check,
        gradient_bytes=sum(leaf.numel() * leaf.element_size() for leaf in wanted),
        kernels=True,
    )


def forwards(problem: Problem) -> list[Method]:
    """The forward three ways: scores alone, winners returned, winners kept for the gradient."""
    leaves = (problem.queries, problem.documents)
    plain = (problem.queries.detach(), problem.documents.detach())

    def check(winners: bool, _: str) -> dict[str, Any]:
        scores, argmax = maxsim(*plain, return_argmax=True)
        worst = 0.0
        for side in problem.truth.of_queries:
            sure = ~side.unsure
            if winners and not torch.equal(argmax[side.number][:, sure].long(), side.winners[:, sure]):
                raise RefusedError(f"wrong: winners of query {side.number} differ from FP64's")
            tokens = problem.truth.queries[side.number].double()
            others = torch.arange(len(plain[1]), device=tokens.device).unsqueeze(1)
            need = torch.einsum("nld,ld->n", plain[1].double()[others, side.winners], tokens)
            worst = max(worst, float(((scores[side.number] - need).abs() / need.abs()).max()))
        if not worst <= 1e-5:
            raise RefusedError(f"wrong: scores are off by {worst:.1e}")
        return {"error": worst}

    named: dict[str, tuple[Call, bool]] = {
        "scores alone": (lambda: maxsim(*plain), False),  # type: ignore[dict-item,return-value]
        "scores, winners returned (32-bit)": (lambda: maxsim(*plain, return_argmax=True)[0], True),
        "scores, winners kept for the gradient": (lambda: maxsim(*leaves), True),  # type: ignore[dict-item,return-value]
    }
    return [Method(name, "ours", {"": call}, check=partial(check, winners)) for name, (call, winners) in named.items()]


def parts(options: Options) -> Iterator[Row]:
    """What a step is made of, in the batch and (the paper's protocol) for one query; every call with the host ahead too."""
    names = {"both": (True, True), "queries": (True, False), "documents": (False, True)}
    for one in (False, True):
        for shape in ABLATION:
            problem = shared(shape, options, one=one)
            if one:
                problem.loss = summed
            winners = saved_winners(problem)
            methods = forwards(problem)
            methods += [
                direct(problem, f"gradient of {what}, {choice}", choice, needs, winners)
                for choice in PATHS
                for what, needs in names.items()
            ]
            step = rivals.ours(problem)
            methods += through_autograd(problem, step.methods[:1], "backward through autograd")
            lineups = [Lineup(methods), Lineup(step.methods[:1], step.skipped)]
            yield row(parts_name(shape, one), problem, lineups, busy=True, main="ours")


def through_autograd(problem: Problem, of: list[Method], name: str) -> list[Method]:
    """Our backward alone as autograd calls it; nothing where `of`, our methods, is empty because ours cannot run."""
    return [alone(problem, name, "ours", lambda: maxsim(problem.queries, problem.documents))] if of else []  # type: ignore[arg-type,return-value]


def alone(problem: Problem, name: str, kind: str, make: Scores, variable: str = "") -> Method:
    """The backward of scores made once, for `problem.grad`, through autograd."""
    leaves, kept, made = (problem.queries, problem.documents), list[Tensor](), list[Tensor]()

    def run() -> tuple[Tensor, ...]:
        if not made:
            made.append(make())
        with rivals.path(variable):
            return torch.autograd.grad(made[0], leaves, problem.grad.view(made[0].shape), retain_graph=True)

    def call() -> Tensor:
        kept.clear()
        kept.extend(run())
        return kept[0]

    def check(_: str) -> dict[str, Any]:
        kept.clear()
        query_grad, document_grad = run()
        return problem.compare(problem.grad, (query_grad, document_grad))

    return Method(
        name, kind, {"": call}, check=check, gradient_bytes=sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    )


def ablation(options: Options) -> Iterator[Row]:
    """Three paths on three kinds of winners; the peers' backward through autograd on the same data."""
    for shape in ABLATION:
        for kind in WINNERS:
            problem = shared(shape, options, kind)
            winners = saved_winners(problem)
            methods = [
                direct(problem, f"ours {choice}", choice, (True, True), winners, REPEATS if choice == "csr" else 0)
                for choice in PATHS
            ]
            found = Lineup(methods)
            for name, variable, make in peer_scores(problem, options, found):
                found.methods.append(alone(problem, name, "peer", make, variable))
            yield row(ablation_name(shape, kind), problem, [found], busy=True, main="ours unified")


def peer_scores(problem: Problem, options: Options, lineup: Lineup) -> Iterator[tuple[str, str, Scores]]:
    """(name, flash-maxsim's path, differentiable scores) of the peers; reasons go to `lineup`."""
    queries, documents = problem.queries, problem.documents
    for peer in options.peers:
        module = installed.load(peer)
        if isinstance(module, str):
            lineup.skipped[peer] = module
        elif peer == FLASH:
            for name in PATHS:
                yield (
                    f"{FLASH} {name}",
                    rivals.FLASH_PATHS[name],
                    partial(module.flash_maxsim_batched_train, queries, documents),
                )
        else:
            for name in rivals.LIK_PATHS[1:]:
                yield f"{LIK} {name}", "", partial(module.maxsim, queries, documents, backward=name)
