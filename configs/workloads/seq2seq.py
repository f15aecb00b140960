"""The `seq2seq` workload: an encoder-decoder answers sources."""

from typing import Literal

from pydantic import PositiveInt

from configs.workloads.descriptor import Descriptor, Latency, ShownTime
from configs.workloads.prompted import AXES, BATCH_FIELDS, ENGINES, HIDDEN_FIELDS, PromptedWorkload


class Seq2SeqWorkload(PromptedWorkload):
    """Greedy generation by an encoder-decoder: each prompt is a source, `new_tokens` tokens are decoded from it."""

    kind: Literal["seq2seq"] = "seq2seq"
    new_tokens: PositiveInt = 32

    @property
    def decoded_tokens(self) -> int:
        return self.new_tokens

    def positions(self, prompt_tokens: int) -> int:
        """Source and answer lie in stacks of their own."""
        return max(prompt_tokens, self.new_tokens)

    @property
    def summary(self) -> str:
        """The work in a few words, for a table."""
        return f"{self._batch_text}, {self.new_tokens} tokens"


DESCRIPTOR = Descriptor(
    kind="seq2seq",
    model=Seq2SeqWorkload,
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
    model_form="encoder_decoder",
    takes_prompts=True,
    input_fields=("prompts",),
    decodes=True,
    answers="tokens",
    own_groups=True,
    marks_work=True,
    form_title="Sequence to sequence",
    hidden_fields=HIDDEN_FIELDS,
)
