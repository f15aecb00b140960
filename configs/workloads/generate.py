"""The `generate` workload: a decoder answers prompts."""

from typing import Literal

from pydantic import Field

from configs.workloads.prompted import DecodingWorkload, decoding_descriptor


class GenerateWorkload(DecodingWorkload):
    """Greedy generation by a decoder of exactly `new_tokens` tokens for each prompt, in batches of equal size."""

    kind: Literal["generate"] = "generate"
    read_probe: bool = Field(False, description="also time a plain read of as many bytes as the weights")


DESCRIPTOR = decoding_descriptor(kind="generate", model=GenerateWorkload, model_form="decoder", form_title="Generate")
