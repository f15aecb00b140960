"""One rule for secrets: names that hide their values, names that do not, URLs, and the study's own `env`."""

import pytest

from configs.common.secrets import is_secret, shown_value, without_password
from configs.spec.study import StudyError, parse_study
from configs.spec.target import LocalTarget


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "PGPASSWORD", "OPENAI_API_KEY",
     "NCCL_SECRET", "NCCL_KEY_FILE", "aws_secret_access_key",
     "MY_CREDENTIALS", "api_key", "GOOGLE_CREDENTIALS", "TOKENS", "PREFECT_API_AUTH_STRING"],
)  # fmt: skip
def test_secret_names(name: str) -> None:
    assert is_secret(name) and shown_value(name, "hush") == "(hidden)"


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "KEYBOARD", "KEYBOARD_LAYOUT", "CUDA_VISIBLE_DEVICES", "PATH"]
)
def test_names_whose_values_are_shown(name: str) -> None:
    assert not is_secret(name) and shown_value(name, "1") == "1"


def test_urls_are_shown_without_what_may_be_secret() -> None:
    assert without_password("https://me:hush@host:4200/api?key=hush") == "https://host:4200/api"
    assert without_password("http://127.0.0.1:4200/api") == "http://127.0.0.1:4200/api"


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
