"""Train a small GPT-2 with transformers.Trainer, on random tokens.

Written from https://huggingface.co/docs/transformers/trainer: a model, a dataset, TrainingArguments, Trainer.train().
Lines for Rankwise: none. The step times and losses come from a callback that Rankwise adds to the Trainer.

    torchrun --nproc-per-node 2 hf_trainer.py --output_dir out --max_steps 24 --report_to none
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

SEQUENCE_LENGTH = 128


class RandomTokens(torch.utils.data.Dataset):
    """Sequences of random tokens, always the same ones."""

    def __init__(self, sequences: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, (sequences, SEQUENCE_LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[place], "labels": self.tokens[place]}


def main() -> None:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(args.seed)
    config = GPT2Config(
        vocab_size=512, n_positions=SEQUENCE_LENGTH, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=RandomTokens(sequences=4096, vocabulary=config.vocab_size),
    )
    trainer.train()


if __name__ == "__main__":
    main()
