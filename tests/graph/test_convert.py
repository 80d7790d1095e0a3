"""From the trainer's configuration to workload and plan, and back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.config import load_config, preset_names
from moestro.config.plan import Plan
from moestro.errors import MoestroError
from moestro.graph.convert import overrides_of, plan_of, workload_of
from moestro.graph.count import count_step

PRESET = "mixtral-tiny"
BASE = ["train.global_batch_size=64", "model.num_layers=4"]


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_can_be_counted(name: str) -> None:
    config = load_config(name).config
    workload, plan = workload_of(config), plan_of(config, 1)
    graph = count_step(workload, plan)
    assert graph.tokens == config.in_phase(0).train.global_batch_size * config.in_phase(0).data.seq_len
    assert graph.micro_batches * plan.micro_batch_size == workload.global_batch_size


def test_a_layout_keeps_its_meaning() -> None:
    overrides = [*BASE, "parallel.dp=2", "parallel.fsdp=2", "parallel.cp=2", "parallel.tp=2", "parallel.ep=4"]
    plan = plan_of(load_config(PRESET, [*overrides, "train.micro_batch_size=2"]).config, 16)
    assert (plan.dp, plan.cp, plan.tp, plan.ep, plan.etp) == (4, 2, 2, 4, 2)
    assert (plan.zero, plan.shard, plan.micro_batch_size, plan.dispatch) == (3, 4, 2, "deduplicated")
    assert plan.overlap_gradients
    assert plan.expert_data_ranks == 2


def test_defaults_are_the_trainers() -> None:
    config = load_config(PRESET, BASE).config
    one = plan_of(config, 1)
    assert (one.zero, one.micro_batch_size, one.world_size) == (0, 64, 1)
    many = plan_of(config, 4)
    assert (many.dp, many.zero, many.shard, many.overlap_gradients) == (4, 1, None, False)
    piped = plan_of(load_config(PRESET, [*BASE, "parallel.pp=2", "parallel.schedule=interleaved"]).config, 2)
    assert (piped.vpp, piped.layers_per_stage) == (2, (1, 1, 1, 1))


def test_the_first_phase_stands_for_a_run() -> None:
    config = load_config("sotu-phases").config
    assert workload_of(config).seq_len == config.in_phase(0).data.seq_len
    last = config.in_phase(config.num_phases - 1)
    assert workload_of(last).seq_len == last.data.seq_len


def test_chunks_are_chosen_by_the_memory_they_may_take() -> None:
    def chunks(mib: str) -> int:
        overrides = [*BASE, "train.expert_chunks=auto", f"train.expert_memory_mib={mib}"]
        return plan_of(load_config(PRESET, overrides).config, 1).expert_chunks

    assert chunks("100000.0") == 1
    assert chunks("0.001") == 8
    assert plan_of(load_config(PRESET, ["train.expert_chunks=3"]).config, 1).expert_chunks == 3


def test_leaders_are_not_counted() -> None:
    overrides = [*BASE, "parallel.ep=4", "parallel.dispatch=leader", "parallel.ranks_per_node=2"]
    with pytest.raises(MoestroError, match="two_hop"):
        plan_of(load_config(PRESET, overrides).config, 4)


PLANS = st.fixed_dictionaries(
    {
        "pp": st.sampled_from([1, 2]),
        "dp": st.sampled_from([2, 4]),
        "cp": st.sampled_from([1, 2]),
        "tp": st.sampled_from([1, 2]),
        "ep": st.sampled_from([1, 2]),
        "context": st.sampled_from(["ring", "all_gather"]),
        "micro_batch_size": st.sampled_from([1, 2]),
        "schedule": st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]),
        "zero": st.sampled_from([0, 1, 2]),
        "recompute": st.sampled_from(["none", "block"]),
        "expert_chunks": st.sampled_from([1, 2]),
    }
)


@settings(max_examples=40, deadline=None)
@given(PLANS)
def test_the_trainer_makes_of_overrides_the_plan_they_are_of(sizes: dict[str, object]) -> None:
    if sizes["schedule"] in ("zero_bubble", "zbv"):
        sizes = sizes | {"recompute": "none"}
    if sizes["pp"] == 1:
        sizes = sizes | {"schedule": "1f1b"}
    many = sizes["schedule"] in ("interleaved", "zbv")
    sharded = sizes["zero"] == 2
    cp, dp = sizes["cp"], sizes["dp"]
    plan = Plan.model_validate(
        sizes
        | {
            "vpp": 2 if many else 1,
            "layers_per_stage": None if sizes["pp"] == 1 else (1,) * 4 if many else (2, 2),
            "etp": sizes["tp"],
            "dispatch": "deduplicated",
            "shard": cp * dp if sharded else None,  # type: ignore[operator]
            "overlap_gradients": sharded,
            "overlap_parameters": sharded,
        }
    )
    config = load_config(PRESET, [*BASE, *overrides_of(plan)]).config
    assert plan_of(config, plan.world_size) == plan


@pytest.mark.parametrize("pp", [1, 2])
def test_a_plan_replaces_the_pipeline_that_the_file_had(pp: int) -> None:
    """As when a file that `moestro plan --balance --out` wrote is planned again."""
    had = ["parallel.pp=2", "parallel.schedule=interleaved", "parallel.stages_per_rank=2",
           "parallel.layers_per_stage=[1,1,1,1]"]  # fmt: skip
    plan = Plan(pp=pp, dp=2)
    got = plan_of(load_config(PRESET, [*BASE, *had, *overrides_of(plan)]).config, plan.world_size)
    assert (got.pp, got.vpp, got.schedule, got.layers_per_stage) == (pp, 1, "1f1b", None if pp == 1 else (2, 2))


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        ({"pp": 2, "schedule": "dualpipe"}, "dualpipe"),
        ({"tp": 2, "sequence_parallel": False}, "sequence_parallel"),
        ({"tp": 4, "etp": 2}, "etp = 2"),
        ({"dp": 4, "zero": 1, "shard": 2}, "shard = 2"),
        ({"recompute": "selective"}, "selective"),
        ({"recompute": "block", "recompute_layers": 1}, "recompute_layers"),
        ({"gradient_dtype": "bf16"}, "gradient_dtype"),
        ({"offload": "optimizer"}, "offload"),
        ({"bucket_bytes": 1e6}, "bucket_bytes"),
    ],
)
def test_what_the_trainer_cannot_do_is_refused(plan: dict[str, object], what: str) -> None:
    with pytest.raises(MoestroError, match=what):
        overrides_of(Plan.model_validate(plan))


def test_the_softwares_version_goes_along() -> None:
    assert workload_of(load_config(PRESET).config, "NCCL 2.27").software == "NCCL 2.27"
