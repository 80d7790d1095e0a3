"""`moestro predict --net`: models that are no language models, counted and priced."""

import json

import pytest

from .helpers import moestro

pytestmark = pytest.mark.usefixtures("own_cache")


def test_what_is_printed() -> None:
    done = moestro("predict", "--net", "affmae", "batch=2", "image=128", "--hardware", "rtx-5090")
    assert done.code == 0, done.err
    assert "affmae batch=2 image=128 on 1 ×" in done.out
    assert "counted; priced by: rtx-5090" in done.out
    assert "merge" in done.out


def test_values_reach_the_net() -> None:
    flops = []
    for batch in (1, 2):
        done = moestro("predict", "--net", "vit-mae", f"batch={batch}", "image=64", "--hardware", "h100-8", "--json")
        flops.append(json.loads(done.out)["model_flops"])
    assert flops[1] == 2 * flops[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--net", "affma"), "Did you mean 'affmae'"),
        (("olmoe-tiny", "--net", "affmae"), "no preset"),
        (("--net", "affmae", "--from", "runs/x"), "leave --from out"),
        (("--net", "affmae", "ranks=16", "--devices", "8"), "16 ranks"),
        (("--net", "affmae", "batch"), "batch"),
    ],
)
def test_refused(arguments: tuple[str, ...], says: str) -> None:
    done = moestro("predict", *arguments, "--hardware", "h100-8")
    assert done.code == 2
    assert says in done.err
