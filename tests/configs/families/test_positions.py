"""How long a sequence a model takes, by its config.json."""

from typing import Any

import pytest

from configs.families.positions import are_distances, trained_positions


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"model_type": "llama", "max_position_embeddings": 64}, 64),
        ({"model_type": "t5", "n_positions": 512, "relative_attention_num_buckets": 32}, None),
        ({"model_type": "longt5", "n_positions": 4096, "relative_attention_num_buckets": 32}, None),
        # A table of 514 positions, the first two for padding, beside its buckets.
        ({"model_type": "mpnet", "max_position_embeddings": 514, "relative_attention_num_buckets": 32}, 512),
        ({"model_type": "falcon", "max_position_embeddings": 2048}, 2048),
        ({"model_type": "falcon", "max_position_embeddings": 2048, "alibi": False}, 2048),
        ({"model_type": "falcon", "max_position_embeddings": 2048, "alibi": True}, None),
        ({"model_type": "bloom", "seq_length": 2048}, None),
        (
            {"model_type": "led", "max_encoder_position_embeddings": 16384, "max_decoder_position_embeddings": 1024},
            1024,
        ),
        ({"model_type": "led", "max_encoder_position_embeddings": 1000, "attention_window": [256, 384]}, 768),
    ],
)
def test_a_model_whose_positions_are_distances_has_no_longest_sequence(
    config: dict[str, Any], longest: int | None
) -> None:
    assert trained_positions(config) == longest
    assert are_distances(config) is (longest is None)
