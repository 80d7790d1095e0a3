"""`moestro measure`: what it writes, what it refuses, and what it leaves behind. Measuring itself is a fake here."""

import json
from pathlib import Path
from typing import Any

import pytest
from report.profiles import collectives, complete_profile, machine_profile, memory, product, sample

from moestro.hardware.profile import MachineProfile, load_profile, save_profile
from moestro.measure import machine
from moestro.measure.collectives import CollectiveResult, WrongResult
from moestro.measure.constants import with_curves
from moestro.report.profile_page import write_folder

from .helpers import moestro


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `moestro measure` asks for; it gets a small profile."""
    asked: dict[str, Any] = {}

    def fake(**options: Any) -> MachineProfile:
        asked.update(options)
        options["progress"]("compute", 1, 2, "gemm m=1")
        return machine_profile([*memory(), product(64, 64, 64)], name=options["name"])

    monkeypatch.setattr(machine, "measure_machine", fake)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return asked


def _saved(folder: Path, profile: MachineProfile, name: str = "p") -> str:
    save_profile(profile, folder / name / "profile.json")
    return str(folder / name)


def test_measuring_writes_a_folder_and_prints_a_summary(asked: dict[str, Any], tmp_path: Path) -> None:
    done = moestro("measure", "--quick", "--out", str(tmp_path / "a" / "p"), "--skip", "host,pairs", "--skip", "gemm")
    assert done.code == 0, done.err
    assert {f.name for f in (tmp_path / "a" / "p").iterdir()} == {
        "profile.json", "samples.csv", "samples.jsonl", "profile.html",
    }  # fmt: skip
    assert load_profile(tmp_path / "a" / "p").constants["memory_gbps"] > 1
    assert asked["quick"] is True
    assert asked["skip"] == {"host", "pairs", "gemm"}
    assert asked["folder"] == tmp_path  # the next folder that is there: storage is measured in it
    assert asked["ranks"] is None
    for text in ("measured 2026-03-04 05:06 UTC", "triad", "16.0 GB/s", "profile.html"):
        assert text in done.out.replace("\u00a0", " "), text


def test_json_is_json_alone(asked: dict[str, Any], tmp_path: Path) -> None:
    done = moestro("measure", "--json", "--out", str(tmp_path / "p"), "--ranks", "4", "--device", "cpu")
    tree = json.loads(done.out)
    assert tree["folder"] == str(tmp_path / "p")
    assert tree["num_samples"] == len(load_profile(tmp_path / "p").samples)
    assert tree["constants"]["memory_gbps"] > 1
    assert (asked["quick"], asked["ranks"], asked["device"]) == (False, 4, "cpu")


def test_the_folder_is_named_after_host_and_date(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert moestro("measure").code == 0
    (folder,) = (tmp_path / "profiles").iterdir()
    assert folder.name.rsplit("-", 2)[1].isdigit()
    assert load_profile(folder).name == folder.name


def test_a_folder_that_is_there_is_refused_before_measuring(asked: dict[str, Any], tmp_path: Path) -> None:
    done = moestro("measure", "--out", str(tmp_path))
    assert done.code == 2
    assert done.err == f"error: {tmp_path} is there already; name another folder with --out, or move it away\n"
    assert not asked


def test_a_place_that_cannot_be_written_is_refused_before_measuring(asked: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = moestro("measure", "--quick", "--out", str(tmp_path / "file" / "p"))
    assert done.code == 2
    assert f"cannot write at {tmp_path / 'file'}: Not a directory; name another folder with --out" in done.err
    assert not asked
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_ctrl_c_leaves_nothing(asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    for where in ("moestro.measure.machine.measure_machine", "moestro.report.profile_page.render"):
        with monkeypatch.context() as patch:
            patch.setattr(where, lambda *args, **options: interrupt())
            done = moestro("measure", "--out", str(tmp_path / "p"))
        assert done.code == 130
        assert not list(tmp_path.iterdir())


def test_one_rank_of_many_does_not_measure_the_machine(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    done = moestro("measure", "--out", str(tmp_path / "p"))
    assert done.code == 2
    assert "`moestro measure collectives` runs on many" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "0"), "Invalid value for '--ranks'"),
        (("--skip", "gem"), "no section 'gem' to skip. Did you mean 'gemm'?"),
        (("--device", "cuda:99"), "--device = 'cuda:99' is not usable here"),
        (("--fast",), "No such option: --fast"),
    ],
)
def test_bad_input_is_two_lines_and_status_2(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = moestro("measure", "--quick", "--out", str(tmp_path / "p"), *arguments)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert not list(tmp_path.iterdir())


def test_show_prints_what_measure_printed(tmp_path: Path) -> None:
    folder = _saved(tmp_path, complete_profile()[0])
    done = moestro("measure", "show", folder)
    assert done.code == 0
    for text in (
        "best fp32",
        "120 GFLOP/s",
        "alignment fp32",
        "all_reduce, 4 ranks",
        "bucket, 4 ranks",
        "scatter factor",
    ):
        assert text in done.out.replace("\u00a0", " "), text
    tree = json.loads(moestro("measure", "show", folder + "/profile.json", "--json").out)
    assert tree["machine"]["cpu"] == "Test CPU"
    assert "samples" not in tree


def test_show_tells_what_a_model_waits_for_its_buffers(tmp_path: Path) -> None:
    folder = _saved(tmp_path, machine_profile([*collectives((2,))]))
    shown = moestro("measure", "show", folder, "--params", "2e9")
    assert shown.code == 0, shown.err
    assert "fusion buffers for 2.00 G parameters, predicted" in shown.out.replace("\u00a0", " ")
    bucket = json.loads(moestro("measure", "show", folder, "--params", "2e9", "--json").out)["buckets"]["2"]
    assert bucket["limited_by"] == "knee"
    assert bucket["count"] == pytest.approx(2e9 / bucket["params"])
    # Four times the buffer: a quarter of the start-ups, and a longer last one that nothing hides.
    start_s, last_s = bucket["exposed_s"]["0.25"], bucket["exposed_s"]["4.0"]
    assert start_s > bucket["exposed_s"]["1.0"] > last_s
    assert moestro("measure", "show", folder, "--params", "0").code == 2


@pytest.mark.parametrize("command", [("show",), ("plot",), ("compare", "{good}")])
def test_what_is_no_profile_is_named(tmp_path: Path, command: tuple[str, ...]) -> None:
    good = _saved(tmp_path, machine_profile([sample("copy", 1.0, bytes=1)]), "good")
    (tmp_path / "bad.json").write_text('{"format": 1, "name": 3}')
    for path, message in (("nowhere", "no profile at"), ("bad.json", "Input should be a valid string")):
        done = moestro("measure", *(part.format(good=good) for part in command), str(tmp_path / path))
        assert done.code == 2
        assert message in done.err


def test_plot_draws_the_page_anew(tmp_path: Path) -> None:
    folder = Path(_saved(tmp_path, machine_profile(list(memory()))))
    assert moestro("measure", "plot", str(folder)).code == 0
    assert "plot-memory" in (folder / "profile.html").read_text()
    assert moestro("measure", "plot", str(folder / "profile.json"), "--out", str(tmp_path / "other.html")).code == 0
    assert (tmp_path / "other.html").exists()


def test_compare_says_what_differs_before_the_numbers(tmp_path: Path) -> None:
    profile = machine_profile(list(memory()))
    slower = [s.model_copy(update={"median_s": s.median_s * (3 if s.op == "triad" else 1.01)}) for s in profile.samples]
    machine = profile.machine.model_copy(update={"cores": 64, "versions": {"torch": "9.9"}})
    a = _saved(tmp_path, profile, "a")
    b = _saved(
        tmp_path, profile.model_copy(update={"samples": tuple(slower), "machine": machine, "name": "box-2"}), "b"
    )
    done = moestro("measure", "compare", a, b)
    assert done.code == 0
    assert done.out.index("cores") < done.out.index("Not the same machine") < done.out.index("50% of 18 entries")
    assert "3.00 × triad" in done.out
    tree = json.loads(moestro("measure", "compare", a, b, "--json").out)
    assert tree["same_machine"] is False
    assert tree["totals"][-1]["within"] == 9
    assert tree["entries"][0]["ratio"] == pytest.approx(1.01)
    assert "Same machine, versions and settings." in moestro("measure", "compare", a, a).out


def _result(*findings: WrongResult) -> CollectiveResult:
    samples = tuple(s for s in collectives((2,)) if s.number("bytes") <= 2**14)
    return CollectiveResult(samples=samples, findings=findings, notes=("two ranks share one core",))


def _rank_zero(monkeypatch: pytest.MonkeyPatch, result: CollectiveResult) -> dict[str, Any]:
    """Rank 0 of two, whose collectives are a fake."""
    asked: dict[str, Any] = {}

    def fake(world: int, quick: bool, **options: Any) -> CollectiveResult:
        asked.update(options, world=world)
        return result

    monkeypatch.setattr("moestro.measure.collectives.collective_profile", fake)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    return asked


def test_collectives_print_a_table_and_write_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _rank_zero(monkeypatch, _result())
    done = moestro("measure", "collectives", "--out", str(tmp_path / "c"), "--min-bytes", "1K", "--max-bytes", "20KiB",
                   "--ops", "all_reduce, ring", "--pair-bytes", "1M")  # fmt: skip
    assert done.code == 0, done.err
    plan = asked["plan"]
    assert (plan.sizes_bytes, plan.ops, plan.group_sizes) == ((1024, 4096, 16384, 20480), ("all_reduce", "ring"), (2,))
    assert (plan.pair_bytes, asked["world"]) == (2**20, 2)
    assert "all_gather" in done.out
    assert "note two ranks share one core" in done.out
    assert len((tmp_path / "c" / "samples.jsonl").read_text().splitlines()) == 6
    assert json.loads((tmp_path / "c" / "notes.json").read_text()) == ["two ranks share one core"]


def test_a_wrong_result_is_named_and_the_status_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _rank_zero(monkeypatch, _result(WrongResult("broadcast", 4096, 2, wrong=17, rank=1)))
    done = moestro("measure", "collectives")
    assert done.code == 1
    assert any("broadcast" in line and "17" in line for line in done.out.splitlines())
    assert "first on rank" in done.out


def test_collectives_go_into_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "p"
    write_folder(*with_curves(machine_profile([product(64, 64, 64)])), folder)
    _rank_zero(monkeypatch, _result())
    assert moestro("measure", "collectives", "--into", str(folder)).code == 0
    assert "alpha_us_all_reduce_2" in load_profile(folder).constants


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ops", "all_reduc"), "all_reduc"),
        (("--min-bytes", "4X"), "'4X' is not a size in bytes; write for example 4096, 64K, 16M or 1G"),
        (("--min-bytes", "0"), "--min-bytes 0 is not between 1 and --max-bytes 16M"),
        (("--min-bytes", "32M"), "--min-bytes 32M is not between 1 and --max-bytes 16M"),
        (("--groups", "2,x"), "--groups takes numbers of ranks"),
        (("--groups", "3"), "groups of 3 ranks are wanted, but there are 2 ranks"),
        (("--dtype", "fp3"), "fp3"),
        (("--nproc", "2"), "leave --nproc out"),
        (("--into", "nowhere"), "no profile at nowhere"),
        (("--out", "."), ". is there already"),
    ],
)
def test_bad_sweeps_are_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    asked = _rank_zero(monkeypatch, _result())
    done = moestro("measure", "collectives", *arguments)
    assert done.code == 2
    assert message in done.err
    assert not asked


def test_nproc_starts_the_same_command_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("moestro.parallel.launch.launch", lambda nproc, argv: started.append((nproc, argv)) or 0)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    done = moestro("measure", "collectives", "--nproc", "3", "--ops", "ring", "--no-check", "--groups", "2,3", "--json")
    assert done.code == 0
    ((nproc, argv),) = started
    assert nproc == 3
    assert argv == ["measure", "collectives", "--ops=ring", "--groups=2,3", "--no-check", "--json"]


def test_one_rank_alone_says_so(tmp_path: Path) -> None:
    done = moestro("measure", "collectives")
    assert done.code == 0
    assert "one rank has nobody to exchange with" in done.out
