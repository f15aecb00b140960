"""The `seq2seq` workload: an encoder-decoder answers sources."""

from typing import Literal

from configs.workloads.prompted import DecodingWorkload, decoding_descriptor


class Seq2SeqWorkload(DecodingWorkload):
    """Greedy generation by an encoder-decoder: each prompt is a source, `new_tokens` tokens are decoded from it."""

    kind: Literal["seq2seq"] = "seq2seq"

    def positions(self, prompt_tokens: int) -> int:
        """Source and answer lie in stacks of their own."""
        return max(prompt_tokens, self.new_tokens)


DESCRIPTOR = decoding_descriptor(
    kind="seq2seq", model=Seq2SeqWorkload, model_form="encoder_decoder", form_title="Sequence to sequence"
)
