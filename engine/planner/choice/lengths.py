"""Default sequence lengths: the requested length, or the model's maximum up to a usual length.

length_of(architecture, None)                 # 2,048, or the model's positions if fewer
length_of(architecture, 512, "inference")     # 512; ValueError if the model has fewer positions
"""

from typing import Literal

from engine.planner.architecture import Architecture

TaskType = Literal["training", "inference"]


def default_length(architecture: Architecture, task_type: TaskType = "training") -> int:
    """Return the default sequence length: the model's maximum, up to 2,048 (prompts: up to 512)."""
    usual = 2048 if task_type == "training" or architecture.kind != "decoder" else 512
    return min(_most(architecture, task_type) or usual, usual)


def length_of(architecture: Architecture, said: int | None, task_type: TaskType = "training") -> int:
    """Return the sequence length. Raises ValueError if it exceeds the model's position table, or is not an image's."""
    most = _most(architecture, task_type)
    if architecture.kind == "vision" and said not in (None, most):
        raise ValueError(
            f"{architecture.name}: an image is a sequence of {most:,}, got {said:,}. Leave the sequence length out"
        )
    if said is not None and architecture.positions and most is not None and said > most:
        raise ValueError(f"{architecture.name} has {most:,} positions; sequences of {said:,} tokens do not go in")
    return said or default_length(architecture, task_type)


def length_note(
    architecture: Architecture, said: int | None, length: int, task_type: TaskType = "training"
) -> list[str]:
    """Return a remark if no length was given, because time and memory depend on it, or one that the model has not."""
    most = _most(architecture, task_type)
    if said is not None and most is not None and said > most:
        return [f"sequences of {said:,} tokens, although {architecture.name} was made for {most:,}"]
    if said is not None or architecture.kind == "vision":
        return []
    return [f"no length was named; sequences of {length:,} tokens are assumed"]


def room_note(architecture: Architecture, prompt_tokens: int, new_tokens: int) -> list[str]:
    """Return a remark if the model has positions for the prompt, and not for the answer behind it.

    The answer of an encoder-decoder has positions of its own.
    """
    limit, apart = architecture.position_limit, architecture.kind == "encoder_decoder"
    prompt = 0 if apart else prompt_tokens
    if not architecture.decoder_layers or limit is None or not prompt <= limit < prompt + new_tokens:
        return []
    what = "new tokens" if apart else "tokens of prompt and answer"
    return [f"{prompt + new_tokens:,} {what}, although {architecture.name} has {limit:,} positions"]


def _most(architecture: Architecture, task_type: TaskType) -> int | None:
    """Return the most tokens of what is read, None if unknown: of Whisper the audio's, which is padded to all of them
    (transformers' WhisperFeatureExtractor), while its answers have fewer positions. Training has one length for both.
    """
    if task_type == "inference" and architecture.model_type == "whisper":
        return next(weight.shape[0] for weight in architecture.weights if weight.name == "encoder.positions")
    return architecture.max_positions
