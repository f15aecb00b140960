"""Common base of the workloads with prompts: `generate`, `seq2seq` and `encode`."""

from functools import partial
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt

from configs.common.execution import Dtype, Layout
from configs.workloads.descriptor import BaseWorkload, ComparedLatency, Descriptor, ShownTime

RANDOM_PROMPT_TOKENS = 32
"""Length of random prompts where a study gives none."""

prompted_descriptor = partial(
    Descriptor,
    axes=("dp", "tp", "pp"),
    engines=("rankwise", "transformers", "deepspeed", "onnxruntime"),
    grows="num_prompts",
    batch_fields=("batch_size", "num_prompts"),  # random prompts are as many as the batch holds
    batch="batch_size",
    compressible=True,
    needs_model=True,
    takes_prompts=True,
    input_fields=("prompts",),
    own_groups=True,
    marks_work=True,
    repeats_passes=True,
    hidden_fields=(
        "answers",
        "longest_tokens",
        "noise_dtypes",
        "noise_orders",
    ),  # set by experiments that judge answers
)
"""What holds for every kind with prompts."""

decoding_descriptor = partial(
    prompted_descriptor,
    unit="token",
    throughput="tokens_per_second",
    columns=("pass_seconds", "ttft_seconds", "request_seconds", "gap_seconds", "batch_sequences"),
    latencies={"request": "request_seconds", "ttft": "ttft_seconds", "token": "gap_seconds"},
    latency=ComparedLatency("time_per_output_token_seconds", "ms TPOT", waited_for="request"),
    times=(
        ShownTime("time_per_output_token_seconds", "ms TPOT"),
        ShownTime("ttft_seconds", "ms TTFT", extra=True),
    ),
    predicted=("tokens_per_second", "ttft_seconds", "time_per_output_token_seconds"),
    decodes=True,
    answers="tokens",
)
"""What holds for every kind that answers prompts token by token."""


class PromptedWorkload(BaseWorkload):
    """Common fields of workloads with prompts.

    The prompts are distributed over the replicas; `num_prompts` counts all replicas. A replica is `tp` x `pp`
    ranks; with `pp` above 1 several micro-batches of a batch are in flight at once to keep all stages busy.
    """

    prompts: str | None = Field(
        None, description="JSONL file with one `prompt`, or `tokens`, per line; none: random token ids"
    )
    variant: str | None = Field(None, description="only lines with this `variant`")
    limit: PositiveInt | None = Field(None, description="only the first N lines")
    num_prompts: PositiveInt | None = Field(
        None, description="number of prompts over all replicas; the file is repeated"
    )
    prompt_tokens: PositiveInt | None = Field(None, description="cut or repeat each prompt to this length")
    batch_size: PositiveInt = Field(1, description="concurrent sequences per replica")
    micro_batch_size: PositiveInt | None = Field(
        None, description="sequences per pipeline micro-batch; none: the batch divided by the stages"
    )
    answers: bool = Field(False, description="keep the model's answers, to check correctness")
    longest_tokens: PositiveInt | None = Field(
        None, description="with answers: the last prompt is cut or repeated to this many tokens"
    )
    noise_dtypes: tuple[Dtype, ...] = Field(
        (), description="with answers, engine transformers: precisions whose reduction-order noise is measured"
    )
    noise_orders: PositiveInt = Field(4, description="reduction orders for measuring the noise")

    def in_micro_batches(self, stages: int) -> int:
        """Sequences of a micro-batch on so many stages."""
        return min(self.batch_size, self.micro_batch_size or -(-self.batch_size // stages))

    def scaled(self, factor: int) -> Self:
        """The same work a rank for `factor` times as many ranks."""
        return self.model_copy(update={"num_prompts": (self.num_prompts or 1) * factor})

    @property
    def keeps_answers(self) -> bool:
        return self.answers

    @property
    def prompt_source(self) -> tuple[str, str | None, int | None] | None:
        return None if self.prompts is None else (self.prompts, self.variant, self.limit)

    @property
    def decoded_tokens(self) -> int:
        """Tokens that are decoded for each prompt; 0 of an encoder."""
        return 0

    @property
    def sequences(self) -> int | None:
        return self.num_prompts or 1

    def units_per_pass(self, dp: int) -> int | None:
        return (self.num_prompts or self.batch_size * dp) * (self.decoded_tokens or 1)

    def size_of_pass(self, dp: int) -> tuple[int, int | None, int] | None:
        return self.batch_size, self.prompt_tokens, max(1, self.decoded_tokens)

    def positions(self, prompt_tokens: int) -> int:
        """Positions that a prompt of so many tokens takes in one stack of the model."""
        return prompt_tokens + self.decoded_tokens

    @property
    def longest_sequence(self) -> tuple[str, int, str] | None:
        # The length of a file's prompts is known only to the tokenizer.
        prompt = self.prompt_tokens or (RANDOM_PROMPT_TOKENS if self.prompts is None else 1)
        new, positions = self.decoded_tokens, self.positions(prompt)
        field = "new_tokens" if new >= prompt else "prompt_tokens"
        return field, positions, f"{prompt} prompt tokens with {new} new ones take {positions} positions"

    def most_replicas(self) -> tuple[int, str] | None:
        prompts = self.num_prompts or 1
        full = max(1, prompts // self.batch_size)
        asked = f"{prompts:,} prompt{'' if prompts == 1 else 's'} in batches of {self.batch_size}"
        return full, f"{asked} fill no more than {full:,} rank{'' if full == 1 else 's'}"

    def compared_fields(self, dp: int) -> dict[str, Any]:
        """Batches that cannot be filled count as what fills them."""
        fields = self.model_dump(mode="json")
        if self.num_prompts is not None:
            fields["batch_size"] = min(self.batch_size, max(1, self.num_prompts // dp))
        return fields

    @property
    def without_effect(self) -> dict[str, str]:
        given = () if self.prompts is not None else ("variant", "limit")
        return {name: "prompts" for name in given if getattr(self, name) is not None}

    def check(self, layout: Layout) -> None:
        if (self.micro_batch_size or 1) > self.batch_size:
            raise ValueError(
                f"workload.micro_batch_size: got {self.micro_batch_size}, more than the batch of {self.batch_size}"
            )
        if self.num_prompts is not None and self.num_prompts < layout.dp:
            raise ValueError(
                f"workload.num_prompts: got {self.num_prompts}, fewer than replicas (dp={layout.dp}). "
                f"Use at least {layout.dp}"
            )

    def check_batch(self, replicas: int = 1) -> None:
        """Raise ValueError if no replica ever gets a full batch: smaller ones would be shown under its name."""
        if self.num_prompts is None or -(-self.num_prompts // replicas) >= self.batch_size:
            return
        shared = "" if replicas == 1 else f" on each of {replicas} replicas"
        raise ValueError(
            f"workload.num_prompts: got {self.num_prompts}, too few to fill a batch of {self.batch_size}{shared}. "
            f"Use at least {self.batch_size * replicas}, or leave num_prompts out"
        )

    @property
    def _batch_text(self) -> str:
        pieces = "" if self.micro_batch_size is None else f" in micro-batches of {self.micro_batch_size}"
        return f"batch {self.batch_size}{pieces}"


class DecodingWorkload(PromptedWorkload):
    """Common fields of workloads that answer each prompt with exactly `new_tokens` tokens."""

    kind: Literal["generate", "seq2seq"]
    new_tokens: PositiveInt = 32

    @property
    def decoded_tokens(self) -> int:
        return self.new_tokens

    @property
    def summary(self) -> str:
        """The work in a few words, for a table."""
        return f"{self._batch_text}, {self.new_tokens} token{'' if self.new_tokens == 1 else 's'}"
