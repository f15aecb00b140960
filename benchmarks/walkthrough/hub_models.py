"""Repositories for the hub of the walk-through: the shapes of published models, with random weights.

with HubServer(hub_models(folder)) as hub:
    os.environ["HF_ENDPOINT"] = hub.endpoint
"""

import shutil
from pathlib import Path

from tests.support.servers.hub_server import Repository

BERT, T5, LLAMA = "google-bert/bert-base-uncased", "google-t5/t5-small", "openlm-research/open_llama_3b"
_TINY = Path(__file__).parents[2] / "configs" / "models" / "tiny-stdlib"


def hub_models(folder: Path) -> dict[str, Repository]:
    """Return repositories by name; what is not in the folder is made there.

    bert-base-uncased has 109 million parameters, t5-small 61 million, in float32 as on the hub; open_llama_3b is the
    small shipped model.
    """
    for name in (BERT, T5):
        if not (folder / name).exists():
            _make(name, folder / name)
    return {LLAMA: Repository(_TINY)} | {name: Repository(folder / name) for name in (BERT, T5)}


def _make(name: str, place: Path) -> None:
    import torch
    from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

    work = place.with_name(f".{place.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    torch.manual_seed(0)
    if name == BERT:
        BertForMaskedLM(BertConfig()).save_pretrained(work)
    else:
        T5ForConditionalGeneration(T5Config(decoder_start_token_id=0)).save_pretrained(work)
    work.rename(place)
