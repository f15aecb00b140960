"""What the first rank of a replica tells the others before each step.

message = StepMessage(sizes.max_tokens, sizes.sequences, sizes.max_length, sizes.block, device)
message.write(batch, logit_rows=[], draws=None)    # on the first rank
message.share(group)
step = message.read()                              # on all; None: the server ends

A step in which every sequence decodes is one short broadcast; what a longer one has in addition is a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.parallel.communicator import Communicator
from engine.serving.drawing import DRAW_FIELDS
from engine.serving.scheduling import ScheduledStep, positions_of

_HEADER = 8
_STEP, _IDLE, _END = 1, 2, 3
_NUMBERS_OF_A_DECODING_SEQUENCE = 7
"""Token, slot, position and row, and a new block's slot, place and number."""
_NUMBERS_OF_A_DRAW = 2 * DRAW_FIELDS
"""Numbers of 64 bits are sent as two of 32."""
_NO_ROWS = torch.zeros(0, dtype=torch.int32)
_NO_DRAWS = torch.zeros((DRAW_FIELDS, 0), dtype=torch.float64)


@dataclass(frozen=True)
class TokenStep:
    """Tokens of a step with their slots and positions, int32 [tokens]; rows of those that choose or score the next.

    assigned: new entries (slot, place, block) of the tables, [3, n]. logit_rows: rows whose token the first rank
    chooses or scores on the host from all logits, int32, in order. draws: how the ranks draw tokens of rows, float64
    [DRAW_FIELDS, draws] (`engine.serving.drawing`). All other rows choose the most likely.
    """

    tokens: Tensor
    slots: Tensor
    positions: Tensor
    rows: Tensor
    assigned: Tensor
    logit_rows: Tensor = _NO_ROWS
    draws: Tensor = _NO_DRAWS


class StepMessage:
    """Room for the largest step; on `device`, where the group's transport expects it."""

    def __init__(
        self,
        max_tokens: int,
        max_sequences: int,
        max_length: int,
        block: int,
        device: torch.device,
        max_scored: int = 0,
    ) -> None:
        # A sequence that shares its whole beginning is assigned all its blocks at once.
        max_assigned = max_sequences * -(-max_length // block)
        of_rows = 2 * (max_sequences + max_scored) + _NUMBERS_OF_A_DRAW * max_sequences
        size = _HEADER + 3 * max_tokens + of_rows + 3 * max_assigned
        self._short = min(size, _HEADER + _NUMBERS_OF_A_DECODING_SEQUENCE * max_sequences)
        self._host = torch.zeros(size, dtype=torch.int32)
        self._shared = self._host if device.type == "cpu" else torch.zeros(size, dtype=torch.int32, device=device)

    def write(self, batch: ScheduledStep, logit_rows: Sequence[int] = (), draws: Tensor = _NO_DRAWS) -> None:
        """Write a step."""
        slots, positions, rows = positions_of(batch.pieces)
        assigned = [number for entry in batch.assigned for number in entry]
        header = [_STEP, len(slots), len(rows), len(batch.assigned), len(logit_rows), draws.shape[1], 0, 0]
        drawn = draws.numpy().ravel().view(np.int32).tolist()
        numbers = [*header, *batch.tokens, *slots, *positions, *rows, *assigned, *logit_rows, *drawn]
        values = torch.tensor(numbers, dtype=torch.int32)
        self._host[: len(values)].copy_(values)

    def write_idle(self) -> None:
        """Write that there is nothing to do, which tells the others that this rank lives."""
        self._write_alone(_IDLE)

    def write_end(self) -> None:
        """Write that the server ends."""
        self._write_alone(_END)

    def share(self, group: Communicator) -> None:
        """Broadcast what the group's first rank has written; all ranks call it."""
        if group.size == 1:
            return
        self._broadcast(group, 0, self._short)
        length = _HEADER + sum(self._counts())
        if length > self._short:
            self._broadcast(group, self._short, length)

    def read(self) -> TokenStep | None:
        """Return the step. None: the server ends. A step without tokens: nothing to do."""
        if self._host[0] == _END:
            return None
        counts = self._counts()
        parts = torch.split(self._host[_HEADER : _HEADER + sum(counts)], counts)
        tokens, slots, positions, rows, assigned, logit_rows, drawn = parts
        # A copy: 64-bit numbers do not begin anywhere.
        draws = drawn.clone().view(torch.float64).view(DRAW_FIELDS, -1) if len(drawn) else _NO_DRAWS
        return TokenStep(tokens, slots, positions, rows, assigned.view(-1, 3).T, logit_rows, draws)

    def _write_alone(self, kind: int) -> None:
        self._host[:_HEADER] = 0
        self._host[0] = kind

    def _counts(self) -> list[int]:
        """How many numbers each part after the header has."""
        tokens, rows, assigned, logits, draws = self._host[1:6].tolist()
        return [tokens, tokens, tokens, rows, 3 * assigned, logits, _NUMBERS_OF_A_DRAW * draws]

    def _broadcast(self, group: Communicator, start: int, end: int) -> None:
        """Broadcast numbers from host to host, through the device where the group's transport wants them there."""
        host, shared = self._host[start:end], self._shared[start:end]
        if self._shared is not self._host and group.index == 0:
            shared.copy_(host)
        group.broadcast(shared, 0)
        if self._shared is not self._host and group.index != 0:
            host.copy_(shared)
