"""Which nodes' ranks take part: one that ends the run again and again is left out, and comes back when it is fit.

A node is a machine, or on one machine a group of `supervise.ranks_per_node` ranks that stands for one. Its state is
kept by `moestro.resilience.nodes`, so that every step of it is checked and logged in the run's `nodes.jsonl`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from moestro.config.supervise import SuperviseConfig
from moestro.errors import MoestroError
from moestro.resilience.nodes import TRIAGE_OF, Nodes, State, way
from moestro.resilience.policy import End
from moestro.train.incidents import Action


@dataclass(frozen=True)
class Verdict:
    """What is done after a fault. action: "restart", "shrink" or "stop". why: in words, for whoever reads the log."""

    action: Action
    why: str = ""
    unfit: bool = False  # whether the doctor said so


@dataclass
class _Member:
    """One node. ends: when it ended the run, monotonic seconds. out: since when it is left out; None: it takes part."""

    name: str
    ends: list[float] = field(default_factory=list)
    out: float | None = None
    times_out: int = 0


class Crew:
    """The nodes of a run.

    layout: raises MoestroError for a number of ranks that the run's configuration does not allow. examine: why a node
    is unfit, or None.
    """

    def __init__(
        self,
        ranks: int,
        host: str,
        settings: SuperviseConfig,
        nodes: Nodes,
        layout: Callable[[int], object],
        examine: Callable[[str], str | None],
    ) -> None:
        self._all, self._settings, self._nodes = ranks, settings, nodes
        self._layout, self._examine = layout, examine
        self._each = settings.ranks_per_node or ranks
        if ranks % self._each:
            raise MoestroError(f"supervise.ranks_per_node = {self._each} does not divide the {ranks} ranks")
        count = ranks // self._each
        self._members = [_Member(host if count == 1 else f"{host}:{i}") for i in range(count)]
        self.ranks = ranks

    def join(self) -> str | None:
        """Before the first start: every node is validated. Returns why one may not take part, or None."""
        for member in self._members:
            unfit = self._validate(member, "a run begins")
            if unfit is not None:
                return f"node {member.name} is unfit: {unfit}"
        return None

    def name_of(self, rank: int | None) -> str | None:
        """The node of a rank of the present start."""
        member = self._member(rank)
        return None if member is None else member.name

    def after(self, end: End, now: float) -> Verdict:
        """A fault began with `end.rank`: its node is taken out of work, examined, and let back in or left out."""
        member = self._member(end.rank)
        if member is None:
            return Verdict("restart")
        self._move(member, "cordoned", str(end.signal), end.text)
        member.ends = [when for when in member.ends if now - when <= self._settings.lost_within_s] + [now]
        often = self._settings.elastic and len(member.ends) >= self._settings.lost_after
        if often:
            why = f"node {member.name} ended the run {len(member.ends)} times"
            refused = self._leave_out(member, end, now, why)
            if refused is None:
                return Verdict("shrink", f"{why}; {self.ranks} of {self._all} ranks go on")
            return (
                Verdict("restart", f"{why}, but {refused}") if self._back(member, end) is None else self._unfit(member)
            )
        unfit = self._back(member, end)
        if unfit is None:
            return Verdict("restart")
        why = f"node {member.name} is unfit: {unfit}"
        refused = self._leave_out(member, end, now, why) if self._settings.elastic else "supervise.elastic is off"
        if refused is None:
            return Verdict("shrink", f"{why}; {self.ranks} of {self._all} ranks go on", unfit=True)
        return Verdict("stop", f"{why}, and {refused}", unfit=True)

    def returning(self, now: float) -> str | None:
        """The name of a node that was left out for long enough and is fit again: it takes part from the next start."""
        for member in self._members:
            if member.out is None or now - member.out < self._settings.back_after_s * 2 ** (member.times_out - 1):
                continue
            if self._validate(member, "it was left out for long enough") is not None:
                member.out, member.times_out = now, member.times_out + 1  # asked again later
                continue
            ranks = self._allowed(len(self._in()) + 1)
            if isinstance(ranks, int) and ranks > self.ranks:
                member.out, member.ends, self.ranks = None, [], ranks
                return member.name
            member.out = now  # fit, but no layout has a use for it yet
        return None

    def _unfit(self, member: _Member) -> Verdict:
        return Verdict("stop", f"node {member.name} is unfit, and the run cannot go on without it", unfit=True)

    def _in(self) -> list[_Member]:
        return [member for member in self._members if member.out is None]

    def _member(self, rank: int | None) -> _Member | None:
        if rank is None:
            return None
        return self._in()[rank // self._each]

    def _leave_out(self, member: _Member, end: End, now: float, why: str) -> str | None:
        """Returns why the run cannot go on without this node, or None: it does."""
        ranks = self._allowed(len(self._in()) - 1)
        if isinstance(ranks, str):
            return ranks
        if self._nodes.state(member.name) == "cordoned":
            self._move(member, TRIAGE_OF[end.category], why)
        member.out, member.times_out, self.ranks = now, member.times_out + 1, ranks
        return None

    def _allowed(self, nodes: int) -> int | str:
        """The most ranks of so many nodes that the configuration has a layout for, or why there are none."""
        most, why = nodes * self._each, "no node is left"
        for ranks in range(most, 0, -1):
            try:
                self._layout(ranks)
                return ranks
            except MoestroError as error:
                why = why if ranks < most else f"{ranks} ranks are not allowed ({error})"
        return why

    def _back(self, member: _Member, end: End) -> str | None:
        """From cordoned to work again; returns why not, or None."""
        if not self._settings.doctor:
            self._move(member, "available", "not examined: supervise.doctor is off")
            return None
        self._move(member, TRIAGE_OF[end.category], str(end.signal), end.text)
        return self._validate(member, "before it takes part again")

    def _validate(self, member: _Member, reason: str) -> str | None:
        """Take a node to validating by the shortest way, and on as the doctor says; returns why it is unfit."""
        if self._nodes.state(member.name) == "available":
            self._move(member, "cordoned", reason)
        for state in way(self._nodes.state(member.name), ["validating"]):
            self._move(member, state, reason)
        unfit = self._examine(member.name) if self._settings.doctor else None
        if unfit is not None:
            self._move(member, "cordoned", "moestro doctor", unfit)
            return unfit
        passed = "moestro doctor" if self._settings.doctor else "not examined: supervise.doctor is off"
        self._move(member, "available", passed)
        return None

    def _move(self, member: _Member, after: State, reason: str, detail: str = "") -> None:
        self._nodes.move(member.name, after, reason, detail)
