"""One rule for secrets: names that hide their values, names that do not, URLs, and the study's own `env`."""

from typing import Any
from urllib.error import URLError

import pytest

from configs.common.secrets import (
    excerpt,
    hide_in_error,
    holds_secret,
    is_secret,
    redacted,
    secret_fields,
    shown_url,
    shown_value,
    without_password,
)
from configs.plans.expand import expand
from configs.records.record import Failure
from configs.spec.study import StudyError, parse_study
from configs.targets.target import LocalTarget


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "PGPASSWORD", "OPENAI_API_KEY",
     "NCCL_SECRET", "NCCL_KEY_FILE", "aws_secret_access_key",
     "MY_CREDENTIALS", "api_key", "GOOGLE_CREDENTIALS", "TOKENS", "PREFECT_API_AUTH_STRING",
     "DB_PASS", "GITHUB_PAT", "SLURM_JWT"],
)  # fmt: skip
def test_secret_names(name: str) -> None:
    assert is_secret(name) and shown_value(name, "hush") == "(hidden)"


@pytest.mark.parametrize(
    "name",
    ["TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "KEYBOARD", "KEYBOARD_LAYOUT", "CUDA_VISIBLE_DEVICES", "PATH",
     "BYPASS", "MLIR_PASS_TIMING", "NUM_PASSES", "LD_LIBRARY_PATH"],
)  # fmt: skip
def test_names_whose_values_are_shown(name: str) -> None:
    assert not is_secret(name) and shown_value(name, "1") == "1"


def test_urls_are_shown_without_what_may_be_secret() -> None:
    assert without_password("https://me:hush@host:4200/api?key=hush") == "https://host:4200/api"
    assert without_password("http://127.0.0.1:4200/api") == "http://127.0.0.1:4200/api"


HUSH = "hush-4711"
FORMS = [
    f"postgresql://me:{HUSH}@host/db",
    f"cannot connect to http://me:{HUSH}@10.0.0.1:4200/api: refused",
    f"https://host/x?token={HUSH}&y=1",
    f"https://host/x?X-Amz-Signature={HUSH}",
    f"Authorization: Bearer {HUSH}",
    f"{{'Authorization': 'Basic {HUSH}=='}}",
    f"host=db user=u password={HUSH} dbname=x",
    f"Server=x;Pwd={HUSH};",
    f"export MLFLOW_TRACKING_PASSWORD='{HUSH}'",
    f"train.py --api-key {HUSH} --epochs 3",
    f"hf_{HUSH.replace('-', '')}{'0' * 20}",
    "AKIA" + "ABCDEFGH12345678",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-DEF_123",
    f"-----BEGIN RSA PRIVATE KEY-----\n{HUSH}\n-----END RSA PRIVATE KEY-----",
    f"postgresql://me:p@{HUSH}@host/db",
    f"postgresql://me:p/{HUSH}@host/db",
    f"authorization: ApiKey {HUSH}",
    f"X-Api-Key: {HUSH}",
    f"got {{'db_password': '{HUSH}'}}, expected text",
    f'{{"access_token": "{HUSH}", "expires_in": 3600}}',
]


@pytest.mark.parametrize("text", FORMS)
def test_secrets_are_detected_by_their_form(text: str) -> None:
    shown = redacted(text)
    assert "(hidden)" in shown and HUSH not in shown
    assert redacted(shown) == shown, "once is enough"
    assert holds_secret("INNOCENT", text) and HUSH not in shown_value("INNOCENT", text)
    assert HUSH not in Failure(message=text).message


@pytest.mark.parametrize(
    "text",
    [
        "new_tokens=8, max_tokens=16, keys=4, key=value",
        "num_key_value_heads: got 3, expected a divisor of 8",
        "git@github.com:a/b and user@example.org and https://host/@x",
        "export HF_TOKEN=$HF_TOKEN",
        "synthetic:llama-1m@0",
        "http://127.0.0.1:4200/api",
        "postgresql://$USER:$PGPASSWORD@host/db",
        "http://host:8080/models/llama@v1 and https://[::1]:8000/x@y",
        '{"token": " Yes", "eos_token": "</s>", "num_key_value_heads": 8}',
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text and not holds_secret("INNOCENT", text)


def test_values_of_secret_variables_are_found_in_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", HUSH)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "somebody:another-hush")
    monkeypatch.setenv("SHORT_TOKEN", "abc")
    assert redacted(f"refused {HUSH} and another-hush of somebody, abc") == (
        "refused (hidden) and (hidden) of somebody, abc"
    )


def test_a_number_of_tokens_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts did not get their MAX_TOKENS, studies with one were refused, and its number was hidden everywhere."""
    for name, value in (("MAX_TOKENS", "131072"), ("VLLM_MAX_TOKENS_PER_STEP", "8192"), ("NEW_TOKENS", "128k")):
        monkeypatch.setenv(name, value)
        assert not holds_secret(name, value) and shown_value(name, value) == value
    assert redacted("a sequence of 131072 tokens") == "a sequence of 131072 tokens"
    assert LocalTarget(name="here", env={"MAX_TOKENS": "512"}).env
    work = {"kind": "script", "command": ["train.py"], "environment": {"MAX_NEW_TOKENS": "512"}}
    assert parse_study(
        {"study": "s", "workload": work, "experiments": {"one": {"kind": "strong", "grow": "dp", "to": 1}}}
    )
    for name, value in (("TOKENS", "a1b2c3"), ("DB_PASSWORD", "123456"), ("TOKEN", "123456"), ("ACCESS_KEY", "12345")):
        assert holds_secret(name, value) and shown_value(name, value) == "(hidden)"


@pytest.mark.parametrize("before", [0, 150, 190, 199, 200, 400, 5000])
def test_a_secret_at_the_cut_of_a_text_is_hidden(before: int) -> None:
    secret = "hf_" + "Zq7" * 11
    shown = excerpt("x" * before + f" token={secret} " + "y" * 50_000, 200)
    assert len(shown) <= 200 and shown.endswith("…")
    assert secret[:6] not in shown
    assert excerpt("short", 200) == "short"


def test_urls_are_shown_without_user() -> None:
    assert shown_url(f"http://me:{HUSH}@host:4200/api") == "http://host:4200/api"
    assert shown_url("http://host:4200/api") == "http://host:4200/api"


def test_a_long_chain_of_words_takes_no_time_to_speak_of() -> None:
    """Some ten minutes, where each word of the chain is a beginning."""
    assert redacted("a-" * 70_000 + "token=hush-42") == "a-" * 70_000 + "token=(hidden)"


@pytest.mark.parametrize("part", ["eyJ-", "eyJaaaaaaaa-"])
def test_a_long_word_of_beginnings_of_tokens_takes_no_time_to_speak_of(part: str) -> None:
    """Some ten minutes, where the rest of the word is searched behind each of them."""
    text = part * ((1 << 20) // len(part))
    assert redacted(text) == text
    token = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-DEF_123"
    assert redacted(f"{text} session-{token}, {token}") == f"{text} (hidden), (hidden)"


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("targets.0.env.DATABASE_URL", {"targets": [{"name": "x", "env": {"DATABASE_URL": FORMS[0]}}]}),
        ("targets.0.setup.0", {"targets": [{"name": "x", "kind": "slurm", "setup": [FORMS[8]]}]}),
        ("models.0.id", {"models": [{"id": f"https://me:{HUSH}@host/model"}]}),
        ("workload.label", {"workload": {"kind": "noop", "label": FORMS[10]}}),
    ],
)
def test_a_secret_in_a_study_is_refused_since_the_study_is_kept(field: str, change: dict[str, Any]) -> None:
    study = {
        "study": "s",
        "experiments": {"one": {"kind": "sweep", "over": {"items": [1, 2]}}},
        "workload": {"kind": "noop"},
    }
    with pytest.raises(StudyError, match=f"^{field}: contains a secret") as caught:
        parse_study(study | change)
    assert HUSH.replace("-", "") not in str(caught.value).replace("-", "")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("workload.params.wandb_api_key", {"params": {"wandb_api_key": "0123456789abcdef0123", "lr": 0.1}}),
        ("workload.command.2", {"command": ["train.py", "--wandb-api-key", "0123456789abcdef0123"]}),
        ("workload.command.2", {"command": ["train.py", "--db_password", "hush-42"]}),
        ("workload.arguments.dtype.float32.1", {"arguments": {"dtype": {"float32": ["--hf-token", "hush-42"]}}}),
        ("workload.config_files.a.yaml.db.password", {"config_files": {"a.yaml": {"db": {"password": "hush-42"}}}}),
    ],
)
def test_so_is_one_that_only_its_field_or_the_option_before_it_names(field: str, change: dict[str, Any]) -> None:
    study = {"study": "s", "experiments": {"one": {"kind": "sweep", "over": {"dtype": ["float32"]}}}}
    with pytest.raises(StudyError, match=f"^{field}: contains a secret") as caught:
        parse_study(study | {"workload": {"kind": "script", "command": ["train.py"], "measure": "wall"} | change})
    assert not any(value in str(caught.value) for value in ("0123456789abcdef0123", "hush-42"))


def test_what_an_experiment_sets_or_an_engine_is_given_by_such_a_name_is_one_too() -> None:
    varied = {"experiments": {"one": {"variants": {"on": {"params.api_key": "hush-42"}}}}}
    assert list(secret_fields(varied)) == ["experiments.one.variants.on.params.api_key"]
    assert list(secret_fields({"engine_options": {"api-key": "hush-42"}})) == ["engine_options.api-key"]


@pytest.mark.parametrize(
    "data",
    [
        {
            "pad_token": "<|endoftext|>",
            "eos_token": "[END]",
            "token": "<image>",
            "max_tokens": "100000",
            "key": "column",
        },
        {"api_key": "{params.key}", "password": "${DB_PASSWORD}", "private_key": "~/.ssh/id_ed25519", "secret": None},
        {"api_key": "EMPTY", "use_auth_token": True, "access_key": 1234567},
        {"api_key": "OPENAI_API_KEY", "hf_token": "os.environ/HF_TOKEN", "client_secret": "env:CLIENT"},
        ["train.py", "--eos-token", "<|endoftext|>", "--key", "column", "--api-key", "--password", "/run/secrets/db"],
    ],
)
def test_placeholders_paths_and_tokens_of_text_are_none(data: Any) -> None:
    assert list(secret_fields(data)) == []


def test_a_secret_in_a_targets_env_is_refused_since_env_is_kept() -> None:
    assert LocalTarget(name="here", env={"NCCL_DEBUG": "INFO"}).env
    study = {
        "study": "s",
        "experiments": {"one": {"kind": "sweep", "over": {"items": [1, 2]}}},
        "workload": {"kind": "noop"},
        "targets": [{"name": "here", "kind": "local", "env": {"WANDB_API_KEY": "hush-42"}}],
    }
    with pytest.raises(StudyError, match="WANDB_API_KEY: the name of a secret") as caught:
        parse_study(study)
    assert "hush-42" not in str(caught.value)


@pytest.mark.parametrize(
    "experiment",
    [
        {"kind": "sweep", "over": {"env.WANDB_API_KEY": ["hush-42"]}},
        {"kind": "sweep", "base": {"env": {"WANDB_API_KEY": "hush-42"}}, "over": {"items": [1, 2]}},
        {"kind": "optimization", "variants": {"on": {"env.WANDB_API_KEY": "hush-42"}}},
    ],
)
def test_so_is_one_that_an_experiment_sets(experiment: dict[str, Any]) -> None:
    study = {"study": "s", "workload": {"kind": "noop"}, "experiments": {"one": experiment}}
    with pytest.raises(StudyError, match=r"env(\.WANDB_API_KEY)?: WANDB_API_KEY: the name of a secret") as caught:
        expand(parse_study(study), [], {}, lambda workload: 1)
    assert "hush-42" not in str(caught.value)


def test_one_of_a_script_is_not_shown() -> None:
    swept = {"kind": "sweep", "over": {"environment.WANDB_API_KEY": ["hush-42"]}}
    work = {"kind": "script", "command": ["train.py"]}
    with pytest.raises(StudyError, match=r"environment.WANDB_API_KEY: WANDB_API_KEY: the name of a secret") as caught:
        expand(parse_study({"study": "s", "workload": work, "experiments": {"one": swept}}), [], {}, lambda _: 1)
    assert "hush-42" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "A=B", "TWO WORDS", "1ST", "é"])
def test_a_variable_of_the_ranks_has_a_name_that_a_process_can_have(name: str) -> None:
    study = {"study": "s", "workload": {"kind": "noop"}}
    with pytest.raises(StudyError, match=r"targets\[0\].env: '.*': expected the name of a variable"):
        parse_study(
            study
            | {"targets": [{"env": {name: "1"}}], "experiments": {"one": {"kind": "sweep", "over": {"items": [1, 2]}}}}
        )
    swept = {"kind": "sweep", "over": {f"env.{name}": ["1", "2"]}}
    with pytest.raises(StudyError, match=r"experiments.one.over.env.*: '.*': expected the name of a variable"):
        expand(parse_study(study | {"experiments": {"one": swept}}), [], {}, lambda workload: 1)


def test_an_error_and_what_it_came_from_are_redacted_in_place() -> None:
    inner = OSError(2, "no such file: https://me:hush@host/x")
    error = ValueError("cannot fetch https://me:hush@host/x", inner, 3)
    inner.__context__ = URLError("no route to https://me:hush@host/x")
    error.__cause__, inner.__cause__ = inner, error  # a circle
    hide_in_error(error)
    assert str(inner.__context__) == "<urlopen error no route to https://(hidden)@host/x>"
    assert (error.args[0], error.args[2]) == ("cannot fetch https://(hidden)@host/x", 3)
    assert str(inner) == "[Errno 2] no such file: https://(hidden)@host/x"
