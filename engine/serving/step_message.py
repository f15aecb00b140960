"""What the first rank of a replica tells the others before each step, as one message of fixed size.

message = StepMessage(sizes.max_tokens, sizes.sequences, device)
message.write(batch, full_logits=False)            # on the first rank
group.broadcast(message.tensor, 0)
step = message.read()                              # on all; None: the server ends
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from engine.serving.scheduling import ScheduledStep, positions_of

_HEADER = 8
_STEP, _IDLE, _END = 1, 2, 3


@dataclass(frozen=True)
class TokenStep:
    """Tokens of a step with their slots and positions, int32 [tokens]; rows [choosing] of tokens that choose the next.

    assigned: new entries (slot, place, block) of the tables, [3, n]. full_logits: whether all logits are needed.
    """

    tokens: Tensor
    slots: Tensor
    positions: Tensor
    rows: Tensor
    assigned: Tensor
    full_logits: bool


class StepMessage:
    """Room for the largest step; on `device`, where the group's transport expects it."""

    def __init__(self, max_tokens: int, max_sequences: int, max_length: int, block: int, device: torch.device) -> None:
        # A sequence that shares its whole beginning is assigned all its blocks at once.
        self._max_assigned = max_sequences * -(-max_length // block)
        size = _HEADER + 3 * max_tokens + max_sequences + 3 * self._max_assigned
        self._host = torch.zeros(size, dtype=torch.int32)
        self.tensor = self._host if device.type == "cpu" else torch.zeros(size, dtype=torch.int32, device=device)

    def write(self, batch: ScheduledStep, full_logits: bool) -> None:
        """Write a step."""
        slots, positions, rows = positions_of(batch.pieces)
        assigned = [number for entry in batch.assigned for number in entry]
        header = [_STEP, len(slots), len(rows), len(batch.assigned), int(full_logits), 0, 0, 0]
        values = torch.tensor([*header, *batch.tokens, *slots, *positions, *rows, *assigned], dtype=torch.int32)
        self._host[: len(values)].copy_(values)
        self._send()

    def write_idle(self) -> None:
        """Write that there is nothing to do, which tells the others that this rank lives."""
        self._host[0] = _IDLE
        self._send()

    def write_end(self) -> None:
        """Write that the server ends."""
        self._host[0] = _END
        self._send()

    def read(self) -> TokenStep | None:
        """Return the step. None: the server ends. A step without tokens: nothing to do."""
        if self.tensor is not self._host:
            self._host.copy_(self.tensor)
        kind, tokens, rows, assigned, full = self._host[:5].tolist()
        if kind == _END:
            return None
        if kind == _IDLE:
            tokens = rows = assigned = 0
        ends = [_HEADER + count for count in accumulate([0, tokens, tokens, tokens, rows, 3 * assigned])]
        parts = [self._host[start:end] for start, end in pairwise(ends)]
        return TokenStep(parts[0], parts[1], parts[2], parts[3], parts[4].view(assigned, 3).T, bool(full))

    def _send(self) -> None:
        if self.tensor is not self._host:
            self.tensor.copy_(self._host)
