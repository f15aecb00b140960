"""Results of the planner: bytes by purpose, seconds by purpose."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank's device at the moment of the peak; `host_bytes`, `storage_bytes`: offloaded, by rank.

    `activations` excludes logits; `communication`: buckets and gathered shards; `framework`: context, libraries and
    allocator losses.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    kv_cache: int = 0
    communication: int = 0
    framework: int = 0
    host_bytes: int = 0
    storage_bytes: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device, framework included."""
        return self.tensors + self.framework

    @property
    def tensors(self) -> int:
        """Bytes of tensors on the device: what an exact tensor tracker counts."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.logits
            + self.kv_cache
            + self.communication
        )


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step. `seconds` is the total, without hidden communication."""

    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    bubble_seconds: float
    optimizer_seconds: float
    tokens: int
    model_flops: float  # over all ranks, recomputation not counted

    @property
    def seconds(self) -> float:
        """Wall time of the step."""
        return self.compute_seconds + self.exposed_seconds + self.bubble_seconds + self.optimizer_seconds

    def scaled(self, times: float) -> "StepTime":
        """Return the step with all its seconds multiplied."""
        return replace(
            self,
            compute_seconds=self.compute_seconds * times,
            communication_seconds=self.communication_seconds * times,
            exposed_seconds=self.exposed_seconds * times,
            bubble_seconds=self.bubble_seconds * times,
            optimizer_seconds=self.optimizer_seconds * times,
        )

    @property
    def tokens_per_second(self) -> float:
        """Throughput over all ranks."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class GenerationTime:
    """Seconds of one batch: prefill, then decode."""

    prefill_seconds: float
    token_seconds: float  # of one decode step, at the mean context
    prefill_communication_seconds: float
    token_communication_seconds: float
    sequences: int  # over all replicas
    new_tokens: int  # of each sequence; 0: an encoder, which has only the prefill
    prompt_tokens: int = 0
    token_message_seconds: float = 0.0  # of token_communication_seconds, messages between pipeline stages

    @property
    def seconds(self) -> float:
        """Wall time of the batch; the first new token comes out of the prefill."""
        return self.prefill_seconds + self.token_seconds * max(0, self.new_tokens - 1)

    def scaled(self, times: float) -> "GenerationTime":
        """Return the batch with all its seconds multiplied."""
        return replace(
            self,
            prefill_seconds=self.prefill_seconds * times,
            token_seconds=self.token_seconds * times,
            prefill_communication_seconds=self.prefill_communication_seconds * times,
            token_communication_seconds=self.token_communication_seconds * times,
            token_message_seconds=self.token_message_seconds * times,
        )

    @property
    def tokens_per_second(self) -> float:
        """New tokens, over all replicas."""
        return self.sequences * self.new_tokens / self.seconds

    @property
    def prompt_tokens_per_second(self) -> float:
        """Tokens read in the prefill per second, over all replicas: an encoder's throughput."""
        return self.sequences * self.prompt_tokens / self.prefill_seconds
