"""What goes wrong, as data: of each fault its category and its answer, of each exit status what it means.

The shape is that of the Lucia Training Platform (SIGMA, arXiv 2512.13488): a code for each fault, a category that says
whose it is, and for each exit status whether to start again never, always or a limited number of times.
"""

import signal
from typing import Literal, NamedTuple

from moestro.train.incidents import Action, Signal

Category = Literal["hardware", "user", "platform", "numeric", "unknown"]
# never: stop. retry: as often as `supervise.max_restarts` allows. always: a lost node is nobody's mistake, so that it
# does not count against the limit as long as the run gets on between two of them.
Reaction = Literal["never", "retry", "always"]


class Fault(NamedTuple):
    """category: whose it is. answers: actions that may be taken, the usual one first. noticed_s: within which it must
    be acted on, seconds; None: within a step, or the time that the run's settings give."""

    category: Category
    answers: tuple[Action, ...]
    noticed_s: float | None
    what: str


FAULTS: dict[Signal, Fault] = {
    "exit": Fault("unknown", ("restart", "stop"), 10, "a rank ended with an error"),
    "killed": Fault("platform", ("restart", "shrink", "stop"), 10, "a rank was killed by a signal"),
    "out_of_memory": Fault("user", ("stop",), 10, "memory ran out, on the device or the host"),
    "hang": Fault("unknown", ("restart", "shrink", "stop"), None, "no step was finished for many times its usual time"),
    "lost_peer": Fault("platform", ("restart", "stop"), 10, "a rank lost the connection to another"),
    "slow_rank": Fault("hardware", ("flag", "shrink"), None, "a rank computes slower than the others, or than before"),
    "non_finite": Fault("numeric", ("skip_step", "roll_back", "stop"), None, "a gradient that is NaN or infinite"),
    "loss_spike": Fault("numeric", ("roll_back", "flag", "stop"), None, "a loss far above those before"),
    "grad_spike": Fault("numeric", ("flag", "roll_back"), None, "a gradient norm far above those before"),
    "update_anomaly": Fault("numeric", ("flag",), None, "updates far from the size that the optimizer gives"),
    "collapse": Fault("numeric", ("flag", "stop"), None, "weights of middle layers shrink below those around them"),
    "dead_experts": Fault("numeric", ("flag",), None, "experts that get no tokens, or far too many, by measured load"),
    "corrupt_weights": Fault("hardware", ("roll_back", "flag", "stop"), None, "replicas hold different weights"),
    "corrupt_compute": Fault("hardware", ("flag", "shrink", "stop"), None, "the same layer, computed twice, differs"),
    "corrupt_checkpoint": Fault("platform", ("roll_back", "stop"), None, "a checkpoint is not what its manifest says"),
    "disk_full": Fault("platform", ("flag", "restart", "stop"), None, "a checkpoint or a log cannot be written"),
    "missing_data": Fault("platform", ("restart", "stop"), 10, "a file of the training text is gone"),
    "corrupt_data": Fault("platform", ("stop",), 10, "the training text is not what the run was begun with"),
    "clock_jump": Fault("platform", ("flag",), None, "the wall clock jumped against the monotonic one"),
    "unfit_node": Fault("hardware", ("cordon", "stop"), None, "moestro doctor finds the node unfit"),
    "node_lost": Fault("hardware", ("shrink", "restart", "stop"), 10, "the ranks of a node end again and again"),
    "node_back": Fault("platform", ("grow",), None, "a node that was lost is fit again"),
    "user_error": Fault("user", ("stop",), 10, "a setting that cannot work"),
}  # fmt: skip


class Exit(NamedTuple):
    """What an exit status says. `signal`: the incident it is; None: none at all."""

    signal: Signal | None
    category: Category
    reaction: Reaction
    what: str


EXITS: dict[int, Exit] = {
    0: Exit(None, "user", "never", "done"),
    1: Exit("exit", "unknown", "retry", "an error in the program"),
    2: Exit("user_error", "user", "never", "a mistake in the settings"),
    3: Exit("lost_peer", "platform", "retry", "another rank failed"),
    130: Exit(None, "user", "never", "stopped by Ctrl-C or SIGTERM"),
    128 + signal.SIGKILL: Exit("killed", "platform", "retry", "killed by SIGKILL, by hand or short of host memory"),
    128 + signal.SIGTERM: Exit(None, "user", "never", "asked to stop"),
    128 + signal.SIGSEGV: Exit("killed", "user", "retry", "a segmentation fault"),
    128 + signal.SIGBUS: Exit("killed", "hardware", "retry", "a bus error: a file or memory that is gone"),
    128 + signal.SIGABRT: Exit("killed", "unknown", "retry", "aborted, as by a collective that ran out of time"),
    128 + signal.SIGHUP: Exit("killed", "platform", "retry", "its terminal or launcher was lost"),
}
OTHER_SIGNAL = Exit("killed", "platform", "retry", "killed by a signal")
OTHER = Exit("exit", "unknown", "retry", "one of its own")


def exit_of(status: int) -> Exit:
    """Of a process; as subprocess gives it (negative: by a signal) or as a shell does."""
    status = 128 - status if status < 0 else status
    return EXITS.get(status, OTHER_SIGNAL if 128 < status <= 192 else OTHER)
