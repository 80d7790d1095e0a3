import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.config import Config, LoadedConfig, describe, load_config, parse_config, preset_names, to_toml
from moestro.errors import MoestroError

from .helpers import config_file, tree


def error_of(settings_tree: dict[str, Any]) -> str:
    with pytest.raises(MoestroError) as caught:
        parse_config(settings_tree, source="here.toml")
    return str(caught.value)


def rows(loaded: LoadedConfig) -> dict[str, tuple[str, str]]:
    return {key: (value, origin) for key, value, origin in describe(loaded)}


# Unknown keys


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("modell", "model"),
        ("train__stepz", "steps"),
        ("model__num_layer", "num_layers"),
        ("model__moe__topk", "top_k"),
        ("model__moe__router__capacity", "capacity_factor"),
        ("model__moe__balance__aux_coeff", "aux_coef"),
        ("data__tokenizer__vocabsize", "vocab_size"),
        ("data__sources__0__wieght", "weight"),
        ("data__sources__1__pth", "path"),
        ("run__sample_prompt", "sample_prompts"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    dotted = key.replace("__", ".")
    right = ".".join([*dotted.split(".")[:-1], nearest])
    assert error_of(tree(**{key: 1})) == f"unknown key '{dotted}' (here.toml). Did you mean '{right}'?"


def test_an_unknown_key_without_a_near_name_suggests_nothing() -> None:
    assert error_of(tree(train__xyzzy=1)) == "unknown key 'train.xyzzy' (here.toml)."


def test_the_nearest_name_comes_from_the_same_section() -> None:
    # `steps` exists in train, not in model.
    assert "steps" not in error_of(tree(model__steps=1)).removeprefix("unknown key 'model.steps'")


# Wrong types and values


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("train__steps", "many", "integer"),
        ("train__steps", 1.5, "integer"),
        ("train__steps", [1], "integer"),
        ("train__steps", 0, "greater than or equal to 1"),
        ("optim__lr", "fast", "number"),
        ("optim__lr", 0.0, "greater than 0"),
        ("optim__lr", float("nan"), "finite number"),
        ("optim__momentum", 1.0, "less than 1"),
        ("optim__decay_fraction", 1.1, "less than or equal to 1"),
        ("model__tie_embeddings", "perhaps", "boolean"),
        ("model__moe__router__jitter", 1.0, "less than 1"),
        ("data__sources__0__path", 3, "string"),
        ("data__sources__1__weight", -1.0, "greater than 0"),
        ("run__name", 12, "string"),
        ("model", 5, "dictionary"),
        ("data__sources", [], "at least 1 item"),
        ("data__sources", {}, "tuple"),
    ],
)
def test_a_bad_value_names_the_key_and_the_value(key: str, value: Any, says: str) -> None:
    message = error_of(tree(**{key: value}))
    assert message.startswith(f"bad value for '{key.replace('__', '.')}': {value!r}. ")
    assert says in message
    assert "(here.toml)" in message
    assert "\n" not in message


@pytest.mark.parametrize("key", ["train__steps", "optim__lr", "data__seq_len"])
def test_true_is_not_a_number(key: str) -> None:
    assert error_of(tree(**{key: True})).startswith(f"bad value for '{key.replace('__', '.')}'")


@pytest.mark.parametrize("value", ["two", [1, "two"]])
def test_a_bad_top_k_is_one_line_about_the_key_of_the_file(value: Any) -> None:
    message = error_of(tree(model__moe__top_k=value))
    assert re.match(r"bad value for 'model\.moe\.top_k(\.1)?': ", message)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("key", "value", "nearest"),
    [
        ("model__attention", "spda", "sdpa"),
        ("model__moe__experts", "group", "grouped"),
        ("model__moe__router__score", "sigmod", "sigmoid"),
        ("model__moe__balance__aux_scope", "globalbatch", "global_batch"),
        ("model__moe__balance__bias_rule", "adam", "adamw"),
        ("optim__name", "moon", "muon"),
        ("train__dtype", "bfp16", "bf16"),
        ("run__trackers", ["tensorbord"], "tensorboard"),
    ],
)
def test_a_bad_choice_names_the_nearest(key: str, value: Any, nearest: str) -> None:
    message = error_of(tree(**{key: value}))
    assert message.startswith(f"bad value for '{key.replace('__', '.')}")
    assert message.endswith(f"(here.toml). Did you mean '{nearest}'?")


def test_a_missing_key() -> None:
    settings_tree = tree()
    del settings_tree["train"]["steps"]
    assert error_of(settings_tree) == "missing key 'train.steps' (here.toml)"


def test_a_missing_key_inside_a_list() -> None:
    message = error_of(tree(data__sources=[{"path": "a"}, {"weight": 1.0}]))
    assert message.splitlines()[0] == "missing key 'data.sources.1.path' (here.toml)"


def test_a_missing_section() -> None:
    settings_tree = tree()
    del settings_tree["model"]
    assert error_of(settings_tree) == "missing key 'model' (here.toml)"


def test_at_most_two_problems_are_listed() -> None:
    message = error_of(tree(train__a=1, train__b=1, train__c=1, train__d=1, train__e=1))
    assert len(message.splitlines()) == 2


def test_an_impossible_combination_names_its_section() -> None:
    message = error_of(tree(model__moe__top_k=9))
    assert message == "model.moe: top_k = 9 must lie between 1 and num_experts = 4 (here.toml)"


def test_an_impossible_combination_of_two_sections() -> None:
    message = error_of(tree(data__seq_len=8192))
    assert message == "data.seq_len = 8192 exceeds model.max_seq_len = 4096 (here.toml)"


# Files and presets


def test_a_malformed_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[model\nhidden = 1")
    with pytest.raises(MoestroError, match=r"bad\.toml is not valid TOML: .*line 1"):
        load_config(str(path))


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(MoestroError, match="is not valid TOML"):
        load_config(str(path))


@pytest.mark.parametrize("name", ["missing.toml", "some/where", "some/where.toml"])
def test_a_missing_file(name: str) -> None:
    with pytest.raises(MoestroError, match=re.escape(f"no such config file: {name}")):
        load_config(name)


def test_a_folder_lists_the_presets(tmp_path: Path) -> None:
    with pytest.raises(MoestroError, match=r"is a folder; give a TOML file or a preset: .*sotu-tiny"):
        load_config(str(tmp_path))


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = config_file(tmp_path)

    def refuse(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(MoestroError, match=r"cannot read .*config\.toml: Permission denied"):
        load_config(path)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(MoestroError) as caught:
        load_config("sotu-tyni")
    assert str(caught.value).startswith("no preset 'sotu-tyni'. Did you mean 'sotu-tiny'? Presets: ")


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_says_what_it_is(name: str) -> None:
    loaded = load_config(name)
    assert loaded.config.description
    assert loaded.origins["model.hidden_size"] == f"preset {name}"


def test_there_are_presets() -> None:
    assert "sotu-tiny" in preset_names()


# Overrides


@pytest.mark.parametrize("text", ["train.steps", "=3", ""])
def test_a_bad_override(tmp_path: Path, text: str) -> None:
    with pytest.raises(MoestroError, match=re.escape(f"'{text}' is not an override; write section.key=value")):
        load_config(config_file(tmp_path), [text])


@pytest.mark.parametrize(
    ("override", "index"),
    [
        ("data.sources.2.path=x", "2"),
        ("data.sources.2={path='x'}", "2"),
        ("data.sources.first.path=x", "first"),
        ("data.sources.-1.path=x", "-1"),
    ],
)
def test_an_index_out_of_range(tmp_path: Path, override: str, index: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(MoestroError) as caught:
        load_config(config_file(tmp_path), [override])
    assert str(caught.value) == f"bad key '{key}' (command line): '{index}' is not an index below 2"


def test_an_override_below_a_value(tmp_path: Path) -> None:
    with pytest.raises(MoestroError) as caught:
        load_config(config_file(tmp_path), ["train.steps.x=1"])
    assert str(caught.value) == "unknown key 'train.steps.x' (command line): 'steps' is a value, not a section"


def test_an_override_with_an_unknown_key(tmp_path: Path) -> None:
    with pytest.raises(MoestroError, match=r"unknown key 'model\.moe\.rooter\.score'|unknown key 'model\.moe\.rooter'"):
        load_config(config_file(tmp_path), ["model.moe.rooter.score=sigmoid"])


def test_an_error_names_the_override_that_caused_it(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    with pytest.raises(MoestroError, match=r"bad value for 'train\.steps': 'many'\. .*\(command line\)"):
        load_config(path, ["optim.lr=1.0", "train.steps=many"])
    with pytest.raises(MoestroError) as caught:
        load_config(config_file(tmp_path, train__steps=-1), ["optim.lr=1.0"])
    assert f"({path})" in str(caught.value)


def test_overrides_of_every_kind(tmp_path: Path) -> None:
    overrides = [
        "train.steps=7",
        "optim.lr=1e-3",
        "model.tie_embeddings=true",
        "model.moe.router.score=sigmoid",  # a section that the file does not have
        "model.moe.top_k=[3, 2]",
        "data.sources.1.weight=5",
        "run.name=a=b",  # only the first = divides
        'run.dir="quoted"',
        "run.sample_prompts=['x', 'y']",
    ]
    config = load_config(config_file(tmp_path), overrides).config
    assert config.train.steps == 7
    assert config.optim.lr == 1e-3
    assert config.model.tie_embeddings is True
    assert config.model.moe is not None
    assert config.model.moe.router.score == "sigmoid"
    assert config.model.moe.top_k == (3, 2)
    assert [source.weight for source in config.data.sources] == [1.0, 5.0]
    assert config.data.sources[0].path == "a.txt"
    assert config.run.name == "a=b"
    assert config.run.dir == "quoted"
    assert config.run.sample_prompts == ("x", "y")


def test_a_section_and_a_list_can_be_replaced_whole(tmp_path: Path) -> None:
    overrides = ["model.moe={num_experts=2, expert_hidden_size=3, top_k=2}", "data.sources=[{path='c'}]"]
    loaded = load_config(config_file(tmp_path, model__moe__num_shared_experts=3), overrides)
    assert loaded.config.model.moe is not None
    assert loaded.config.model.moe.num_shared_experts == 0
    assert [source.path for source in loaded.config.data.sources] == ["c"]
    origins = {key: origin for key, _, origin in describe(loaded)}
    assert origins["model.moe.num_experts"] == "command line"
    assert origins["model.moe.num_shared_experts"] == "default"
    assert origins["data.sources.0.path"] == "command line"


def test_the_last_override_wins(tmp_path: Path) -> None:
    assert load_config(config_file(tmp_path), ["train.steps=5", "train.steps=6"]).config.train.steps == 6


def test_an_impossible_override_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MoestroError, match="global_batch_size = 4 is not a multiple of micro_batch_size = 3"):
        load_config(config_file(tmp_path), ["train.micro_batch_size=3"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.micro_batch_size", 2),  # unset by default
        ("train.grad_clip", 0.5),  # set by default
        ("model.moe.router.capacity_factor", 1.5),
        ("model.head_dim", 4),
    ],
)
@pytest.mark.parametrize("in_file", [True, False])
def test_none_unsets_an_optional_value(tmp_path: Path, key: str, value: float, in_file: bool) -> None:
    path = config_file(tmp_path, **({key.replace(".", "__"): value} if in_file else {}))
    loaded = load_config(path, [f"{key}=none"])
    assert rows(loaded)[key][0] == "(unset)"


def test_none_removes_the_experts(tmp_path: Path) -> None:
    loaded = load_config(config_file(tmp_path), ["model.moe=none", "model.intermediate_size=16"])
    assert loaded.config.model.moe is None
    assert loaded.config.model.moe_layers == (False, False)


def test_none_does_not_unset_what_must_be_set(tmp_path: Path) -> None:
    with pytest.raises(MoestroError, match=r"train\.steps"):
        load_config(config_file(tmp_path), ["train.steps=none"])


# Origins


def test_describe_lists_every_setting_with_its_origin(tmp_path: Path) -> None:
    path = config_file(tmp_path, train__grad_clip=2.0)
    loaded = load_config(path, ["train.steps=9", "data.sources.0.weight=3"])
    found = rows(loaded)
    assert found["train.steps"] == ("9", "command line")
    assert found["train.grad_clip"] == ("2.0", path)
    assert found["train.log_every"] == ("1", "default")
    assert found["train.micro_batch_size"] == ("(unset)", "default")
    assert found["data.sources.0.weight"] == ("3.0", "command line")
    assert found["data.sources.0.path"] == ('"a.txt"', path)
    assert found["data.sources.1.weight"] == ("2.0", path)
    assert found["data.sources.1.text_key"] == ('"text"', "default")
    assert found["model.moe.router.score"] == ('"softmax"', "default")
    assert found["model.qk_norm"] == ('"none"', "default")
    assert found["optim.betas"][1] == "default"
    # Every field of every section appears once.
    assert len(describe(loaded)) == len(found)
    expected = {"description", "model.moe.balance.bias_lr", "data.tokenizer.kind", "run.trackers", "optim.eps"}
    assert expected <= set(found)


def test_describe_gives_one_line_a_setting(tmp_path: Path) -> None:
    loaded = load_config(config_file(tmp_path, run__sample_prompts=["a", "b"], model__moe__top_k=[3, 2]))
    assert [key for key, value, _ in describe(loaded) if "\n" in value] == []


def test_a_changed_item_of_a_plain_list_comes_from_the_command_line(tmp_path: Path) -> None:
    path = config_file(tmp_path, run__sample_prompts=["a", "b"])
    loaded = load_config(path, ["run.sample_prompts.1=c"])
    assert loaded.config.run.sample_prompts == ("a", "c")
    assert rows(loaded)["run.sample_prompts"][1] == "command line"


def test_a_replaced_scalar_below_a_replaced_section(tmp_path: Path) -> None:
    loaded = load_config(config_file(tmp_path), ["data.sources=[{path='c', weight=4}]", "data.sources.0.weight=5"])
    assert loaded.config.data.sources[0].weight == 5
    assert rows(loaded)["data.sources.0.weight"] == ("5.0", "command line")


# Round trip


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_survives_the_round_trip(tmp_path: Path, name: str) -> None:
    config = load_config(name).config
    path = tmp_path / "c.toml"
    path.write_text(to_toml(config))
    assert load_config(str(path)).config == config


def test_an_unset_value_with_a_default_survives_the_round_trip(tmp_path: Path) -> None:
    config = parse_config(tree(train__grad_clip=None), source="test")
    path = tmp_path / "c.toml"
    path.write_text(to_toml(config))
    assert load_config(str(path)).config.train.grad_clip is None


def test_a_saved_config_holds_the_defaults_too() -> None:
    """A run must not change when a default does."""
    saved = tomllib.loads(to_toml(parse_config(tree(), source="test")))
    assert saved["train"]["log_every"] == 1
    assert saved["model"]["moe"]["router"]["score"] == "softmax"
    assert saved["optim"]["betas"] == [0.9, 0.95]


TEXT = st.text(max_size=20)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "description": TEXT,
        "model__head_dim": st.sampled_from([2, 6]),
        "model__vocab_size": st.integers(2, 10**6),
        "model__tie_embeddings": st.booleans(),
        "model__norm_eps": st.floats(1, 1e9),
        "model__moe__top_k": st.one_of(st.integers(2, 4), st.tuples(st.integers(2, 4), st.integers(2, 4)).map(list)),
        "model__moe__router__capacity_factor": st.floats(0.1, 8),
        "model__moe__router__score": st.sampled_from(["softmax", "sigmoid"]),
        "model__moe__balance__bias_rule": st.sampled_from(["none", "sign", "adamw"]),
        "data__sources__1__text_key": TEXT,
        "data__tokenizer__vocab_size": st.integers(258, 10**5),
        "train__micro_batch_size": st.sampled_from([1, 2, 4]),
        "train__grad_clip": st.floats(1e-3, 10),
        "train__dtype": st.sampled_from(["fp32", "bf16"]),
        "optim__lr": st.floats(1e-12, 1e3),
        "optim__betas": st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)).map(list),
        "run__trackers": st.lists(st.sampled_from(["tensorboard", "wandb", "mlflow"]), max_size=2),
        "run__sample_prompts": st.lists(TEXT, max_size=3),
    },
)


@settings(max_examples=60, deadline=None)
@given(SETTINGS)
def test_any_config_survives_the_round_trip(tmp_path_factory: pytest.TempPathFactory, chosen: dict[str, Any]) -> None:
    config = parse_config(tree(**chosen), source="test")
    path = tmp_path_factory.mktemp("trip") / "c.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert load_config(str(path)).config == config


def test_a_config_is_frozen() -> None:
    config = parse_config(tree(), source="test")
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 4  # type: ignore[misc]
    assert isinstance(config, Config)
