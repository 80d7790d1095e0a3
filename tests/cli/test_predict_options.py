"""Options of `moestro predict` that do not go together, and files that cannot be written."""

import json
from pathlib import Path

import pytest

from moestro.cli.predict_options import check_together
from moestro.config.files import write_whole
from moestro.errors import MoestroError

from .helpers import moestro

ON = ("--hardware", "h100-8")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--trace", "a:b", "--net", "affmae"), "leave --net out"),
        (("--trace", "a:b", "--oracle", "--exact"), "leave --exact and --oracle out"),
        (("--trace", "a:b", "olmoe-tiny", "--from", "runs/x"), "leave --from and the preset out"),
        (("--net", "affmae", "batch=2", "--perfetto", "x.json", "--tokens", "3"), "leave --perfetto and --tokens out"),
        (("--net", "affmae", "--serving", "1:2:3"), "leave --serving out"),
        (("olmoe-tiny", "--world", "1"), "a preset takes --devices; leave --world out"),
        (("olmoe-tiny", "--routing", "balanced"), "--routing is for --trace"),
        (("olmoe-tiny", "--restart-s", "600"), "without --mtbf-hours"),
        (("olmoe-tiny", "plan.dp=4", "--slow", "0=2", "--slow", "0=3"), "rank 0 has a factor already"),
        (("olmoe-tiny", "plan.dp=4", "train.dtype=bf16", "--usd-per-hour", "-1"), "cannot cost -1 dollars"),
    ],
)  # fmt: skip
def test_no_option_is_passed_over(arguments: tuple[str, ...], error: str) -> None:
    done = moestro("predict", *arguments, *ON)
    assert (done.code, done.out) == (2, "")
    assert error in done.err


def test_what_goes_together() -> None:
    check_together({"trace", "world", "routing", "hardware", "perfetto", "timeline", "as_json"})
    check_together({"net", "preset", "overrides", "profile", "devices"})
    check_together({"preset", "hardware", "mtbf_hours", "restart_s", "checkpoint_s", "simulate", "oracle"})


def test_help_has_headings() -> None:
    text = moestro("predict", "--help").out
    places = [text.index(heading) for heading in ("On what", "Instead of a preset", "Beyond a step")]
    assert places == sorted(places)


def test_only_files_are_replaced(tmp_path: Path) -> None:
    with pytest.raises(MoestroError, match="is a folder; give the name of a file"):
        write_whole(tmp_path, "{}")
    with pytest.raises(MoestroError, match="is no file"):
        write_whole(Path("/dev/null"), "{}")
    assert not list(tmp_path.parent.glob(".*.tmp"))
    link, target = tmp_path / "link.json", tmp_path / "target.json"
    target.write_text("old")
    link.symlink_to(target)
    write_whole(link, json.dumps({}))
    assert link.read_text() == "{}"
