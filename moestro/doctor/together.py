"""Several nodes examined at once: one rank of each node reports to rank 0, which waits for no one for ever.

Everything goes through the ranks' store, not through a collective, so that a node that is silent cannot hold the rest.
"""

import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import TYPE_CHECKING

from moestro.doctor.checks import Check, NodeReport, failed, three_digits, warned
from moestro.doctor.limits import limits_of
from moestro.doctor.versions import usual_versions, versions_check
from moestro.errors import MoestroError
from moestro.parallel.process import Rank, meeting_point

if TYPE_CHECKING:
    from torch.distributed import Store

LIMIT_S = 120.0  # that rank 0 waits for the others' reports, once it has its own
POLL_S = 0.02
LINGER_S = 5.0  # that rank 0, who has the store, waits for the others to have read from it
SLOW_NODE = 0.8  # share of the median node's rate


def report_to_rank_0(
    me: Rank,
    examine: Callable[[], NodeReport],
    limit_s: float = LIMIT_S,
    waiting: Callable[[str], object] = lambda what: None,
) -> list[NodeReport] | None:
    """Examine this node and gather the reports: of all nodes on rank 0, of this one on the others.

    None on a rank that is not the first of its node: it has nothing to do. On rank 0 a rank that has not reported
    within `limit_s` counts as a failing node. Elsewhere, without rank 0, the node's report is marked met_nobody.

    Raises:
        MoestroError: rank 0 cannot open the port where the ranks meet.
    """
    host, port = meeting_point(me)
    try:
        store = _meet(me, host, port, limit_s)
    except RuntimeError as error:  # torch's errors of networks and stores
        lost = f"rank {me.rank} cannot meet the others at {host}:{port}: {str(error).splitlines()[0]}"
        if me.rank == 0:
            raise MoestroError(f"{lost}; set MASTER_ADDR and MASTER_PORT to a free port of this machine") from error
        return None if me.local_rank else [_alone(examine(), lost)]
    if me.local_rank:
        store.set(f"report {me.rank}", "")
        return None
    report = examine()
    if me.rank:
        return [_send(store, me, report, limit_s)]
    waiting(f"waiting for the reports of {me.world_size - 1} ranks")
    reports = compare_nodes(_collect(store, me, report, limit_s))
    store.set("done", "1")
    spoke = sum(not any(check.name == "report" for check in report.checks) for report in reports)
    _wait_until(lambda: store.add("left", 0) >= spoke - 1, LINGER_S)
    return reports


def _alone(report: NodeReport, reason: str) -> NodeReport:
    check = warned("meeting", reason, "see MASTER_ADDR and MASTER_PORT; rank 0 lists this node as silent")
    return report.model_copy(update={"checks": (*report.checks, check), "met_nobody": True})


def _meet(me: Rank, host: str, port: int, limit_s: float) -> "Store":
    import torch.distributed as dist

    is_host = me.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=limit_s)
    store = dist.TCPStore(host, port, None, is_host, timeout=limit, wait_for_workers=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives an attempt
    return dist.PrefixStore(f"doctor {attempt}", store)


def _send(store: "Store", me: Rank, report: NodeReport, limit_s: float) -> NodeReport:
    """Ask rank 0 what time it is, hand in the report, and stay until all is told: torchrun ends all when one leaves.

    The clock is compared as by Cristian's algorithm: rank 0's answer belongs to the middle of the question's way.
    """
    try:
        store.wait(["serving"], timedelta(seconds=limit_s))
        asked_s = time.time()
        store.set(f"ask {me.rank}", "1")
        answer_s = float(store.get(f"clock {me.rank}"))
        answered_s = time.time()
        skew = {
            "clock_s": (asked_s + answered_s) / 2 - answer_s,
            "clock_uncertainty_s": (answered_s - asked_s) / 2,
        }
        report = report.model_copy(update=skew)
        store.set(f"report {me.rank}", report.model_dump_json())
        store.wait(["done"], timedelta(seconds=limit_s))
        store.add("left", 1)
    except RuntimeError:  # rank 0 has gone, or its time is up: what is known here is still told
        pass
    return report


def _collect(store: "Store", me: Rank, own: NodeReport, limit_s: float) -> list[NodeReport]:
    reports, waiting, asking = [own], set(range(1, me.world_size)), set(range(1, me.world_size))
    store.set("serving", "1")
    deadline = time.monotonic() + limit_s
    while waiting and time.monotonic() < deadline:
        for rank in sorted(asking):
            if store.check([f"ask {rank}"]):
                store.set(f"clock {rank}", repr(time.time()))
                asking.remove(rank)
        for rank in sorted(waiting):
            if store.check([f"report {rank}"]):
                waiting.remove(rank)
                text = store.get(f"report {rank}").decode()
                reports += [NodeReport.model_validate_json(text)] if text else []
        time.sleep(POLL_S)
    return sorted([*reports, *(_silence(rank, own, limit_s) for rank in waiting)], key=lambda report: report.rank)


def _silence(rank: int, own: NodeReport, limit_s: float) -> NodeReport:
    reason = f"rank {rank} did not report within {limit_s:g} s"
    check = failed("report", reason, "see whether its node is up and reaches rank 0; run the doctor there alone")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return NodeReport(
        node=f"of rank {rank}",
        rank=rank,
        tier=own.tier,
        started_at=now,
        seconds=limit_s,
        checks=(check,),
        versions={},
        rates={},
    )


def compare_nodes(reports: Sequence[NodeReport]) -> list[NodeReport]:
    """The reports with what shows between nodes only: other versions than most, a clock apart, a slower node."""
    usual = usual_versions([report.versions for report in reports if report.versions])
    rates = {name: [r.rates[name] for r in reports if name in r.rates] for report in reports for name in report.rates}
    compared = []
    for report in reports:
        checks = list[Check]()
        if report.versions and (check := versions_check(report.versions, usual, "most nodes")).status != "passed":
            checks.append(check)
        checks += _skew(report)
        for name, rate in report.rates.items():
            usual_rate = median(rates[name])
            if len(rates[name]) > 2 and rate < SLOW_NODE * usual_rate:
                reason = f"{name} is {three_digits(rate)}, the median node has {three_digits(usual_rate)}"
                checks.append(failed("slow node", reason, "drain the node; compare its tier 2 with a good one's"))
        compared.append(report.model_copy(update={"checks": (*report.checks, *checks)}))
    return compared


def _skew(report: NodeReport) -> list[Check]:
    limit_s = limits_of("accelerator").clock_skew_s
    skew, error = report.clock_s, report.clock_uncertainty_s or 0.0
    if skew is None or abs(skew) - error <= limit_s:
        return []
    way = "ahead of" if skew > 0 else "behind"
    reason = f"{abs(skew):.2f} s {way} rank 0's (± {error:.2g} s)"
    return [failed("clock skew", reason, "start chronyd on every node", value=round(skew, 3), limit=limit_s, unit="s")]


def _wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(POLL_S)
