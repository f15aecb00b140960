"""The `encode` workload: an encoder embeds prompts."""

from typing import Literal

from pydantic import Field

from configs.workloads.descriptor import ComparedLatency, ShownTime
from configs.workloads.prompted import PromptedWorkload, prompted_descriptor

Pooling = Literal["mean", "first"]


class EncodeWorkload(PromptedWorkload):
    """Embeddings by an encoder: one vector for each prompt."""

    kind: Literal["encode"] = "encode"
    pooling: Pooling = Field("mean", description="of the last hidden states: mean of all tokens, or the first token")
    normalize: bool = Field(True, description="normalise embeddings to length 1")

    @property
    def summary(self) -> str:
        """The work in a few words, for a table."""
        return f"encode {self._batch_text}"


DESCRIPTOR = prompted_descriptor(
    kind="encode",
    model=EncodeWorkload,
    unit="embedding",
    throughput="embeddings_per_second",
    columns=("pass_seconds", "request_seconds", "batch_sequences"),
    latencies={"request": "request_seconds"},
    latency=ComparedLatency("latency_seconds", "ms a request", waited_for="request"),
    times=(ShownTime("latency_seconds", "ms a request"),),
    predicted=("embeddings_per_second",),
    model_form="encoder",
    answers="vectors",
    form_title="Encode",
)
