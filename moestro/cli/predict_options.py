"""Which options of `moestro predict` go together: none that was given is passed over in silence."""

from collections.abc import Set

from moestro.errors import MoestroError

ALWAYS = {"hardware", "profile", "devices", "as_json"}
OF_PROGRAMS = ALWAYS | {"trace", "world", "routing", "perfetto", "timeline"}
OF_NETS = ALWAYS | {"net", "preset", "overrides"}
FLAGS = {"as_json": "--json", "run": "--from", "preset": "the preset", "overrides": "the overrides"}


def check_together(given: Set[str]) -> None:
    """given: names of the parameters that the command line has.

    Raises:
        MoestroError: one of them has no say beside the others.
    """
    if given & {"trace", "net"} and given & {"simulate", "slow"}:
        raise MoestroError("--simulate and --slow take a preset with its plan, not --trace or --net")
    if "trace" in given:
        _refuse(given - OF_PROGRAMS, "--trace has the model and the layout in its function")
        return
    if "routing" in given:
        raise MoestroError("--routing is for --trace; a preset takes workload.routing.kind=power_law and so on")
    _refuse(given & {"world"}, "only --trace asks for ranks; a preset takes --devices")
    if "net" in given:
        _refuse(given - OF_NETS, "--net is the model, and a prediction of its step's time only")
    if "mtbf_hours" not in given:
        _refuse(given & {"checkpoint_s", "restart_s"}, "without --mtbf-hours there are no failures")


def _refuse(names: Set[str], why: str) -> None:
    if names:
        flags = sorted(FLAGS.get(name, f"--{name.replace('_', '-')}") for name in names)
        raise MoestroError(f"{why}; leave {' and '.join(flags)} out")
