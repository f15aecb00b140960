"""The `generate` workload: a decoder answers prompts."""

from typing import Literal

from pydantic import Field, PositiveInt

from configs.workloads.descriptor import Descriptor, Latency, ShownTime
from configs.workloads.prompted import AXES, BATCH_FIELDS, ENGINES, HIDDEN_FIELDS, PromptedWorkload


class GenerateWorkload(PromptedWorkload):
    """Greedy generation by a decoder of exactly `new_tokens` tokens for each prompt, in batches of equal size."""

    kind: Literal["generate"] = "generate"
    new_tokens: PositiveInt = 32
    read_probe: bool = Field(False, description="also time a plain read of as many bytes as the weights")

    @property
    def decoded_tokens(self) -> int:
        return self.new_tokens

    @property
    def summary(self) -> str:
        """The work in a few words, for a table."""
        return f"{self._batch_text}, {self.new_tokens} tokens"


DESCRIPTOR = Descriptor(
    kind="generate",
    model=GenerateWorkload,
    unit="token",
    throughput="tokens_per_second",
    columns=("pass_seconds", "ttft_seconds", "request_seconds", "gap_seconds", "batch_sequences"),
    latencies={"request": "request_seconds", "ttft": "ttft_seconds", "token": "gap_seconds"},
    latency=Latency("time_per_output_token_seconds", "ms a token", waited_for="request"),
    times=(
        ShownTime("time_per_output_token_seconds", "ms a token"),
        ShownTime("ttft_seconds", "ms to first token", extra=True),
    ),
    predicted=("tokens_per_second", "ttft_seconds", "time_per_output_token_seconds"),
    axes=AXES,
    engines=ENGINES,
    grows="num_prompts",
    batch_fields=BATCH_FIELDS,
    batch="batch_size",
    compressible=True,
    needs_model=True,
    model_form="decoder",
    takes_prompts=True,
    input_fields=("prompts",),
    decodes=True,
    answers="tokens",
    own_groups=True,
    marks_work=True,
    form_title="Generate",
    hidden_fields=HIDDEN_FIELDS,
)
