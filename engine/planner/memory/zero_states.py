"""Memory of DeepSpeed's ZeRO besides activations, over a step; the events are those of `states`.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py.
"""

from engine.planner.memory.gathering import GatheredPeak, GatheredWeights, gather
from engine.planner.memory.states import States

_FLOAT, _DOUBLE = 4, 8


class Zero12(States):
    """DeepSpeed's stages 1 and 2: flat weights, a float32 partition, a bucket in which gradients are reduced."""

    def lay_out(self) -> None:
        self.partition = self.stage.elements / self.ranks
        self.held.parameters = self.stage.elements * self.width
        self._optimizer(self.partition * (self.moments + _FLOAT))
        # Buffer for gradients of the own partition; a weight across its border is kept whole.
        self.copy = self.stage.touched(self.ranks) * self.width
        if self.offloads:
            # Float32 gradients and the new 16-bit weights are created on the host; one buffer brings gradients there.
            self.held.host += self.partition * (_FLOAT + self.width)
            self.held.communication = self.stage.largest * self.width
            self.copy = 0.0
        self.second = self.setup.layout.strategy == "zero2"
        self.bucket = self.framework.reduce_bucket_size
        self.filled = self.oversized = self.reduced = 0.0
        self.has_bucket = self.has_copy = False

    def begin(self, micro: int) -> None:
        super().begin(micro)
        self.reduced = 0.0

    def gradients(self, weights: tuple[float, ...]) -> None:
        self.momentary = 0.0
        if not self.has_bucket:  # created by the first gradient, which is then copied into it
            self.held.communication += self.bucket * self.width
            self.has_bucket = True
            self.momentary = sum(weights) * self.width if self.second else 0.0
        if not self.second:
            super().gradients(weights)
            return
        for elements in weights:
            if self.filled + elements > self.bucket:
                self._flush()
            self.filled += elements
            if elements > self.bucket:  # reduced in place when the next one comes
                self.oversized = elements * self.width
                self.held.gradients += self.oversized

    def _flush(self) -> None:
        if not self.filled:
            return
        self.momentary = self._flattened()
        self.reduced += self.filled
        self.held.gradients -= self.oversized
        self.filled = self.oversized = 0.0
        if not self.has_copy:  # the fullest rank is the last, whose partition comes first in the backward pass
            self.held.gradients += self.copy
            self.has_copy = True
            if not self.on_cpu:  # gloo's threads may release reduced data shortly after the copy
                self.momentary = max(0.0, self.momentary - self.copy)

    def _flattened(self) -> float:
        """Return bytes of the temporary tensor that joins gradients of several ranks for the reduction."""
        end = self.stage.elements - self.reduced
        first, last = (end - self.filled + 0.5) // self.partition, (end - 0.5) // self.partition
        return self.filled * self.width if first != last else 0.0

    def skip(self, blocks: int) -> None:
        if not self.second:
            super().skip(blocks)
            return
        self.filled += max(0, blocks) * self.stage.block
        if self.filled > self.bucket:
            full = self.filled // self.bucket * self.bucket
            self.reduced, self.filled = self.reduced + self.filled - full, full
            self._flush()
            self.momentary = 0.0

    def end(self) -> None:
        self.momentary = 0.0
        if self.second:
            self._flush()
            before = self.held.total
            self._drop_bucket()
            if self.micro > 0:
                self.held.gradients -= self.copy
            self.has_copy = False
            self.momentary += before - self.held.total  # all of that still exists
            return
        if self.last:
            self.momentary = self.copy

    def _drop_bucket(self) -> None:
        if self.has_bucket:
            self.held.communication -= self.bucket * self.width
            self.has_bucket = False

    def step(self) -> None:
        """Step: the partition's gradients as one flat tensor, then in float32; norms in float64 come before."""
        self._drop_bucket()
        self.held.gradients = self.copy
        if self.offloads:
            self.momentary = self.stage.elements * self.width if self.on_cpu else 0.0
            return
        wide = self.partition * _FLOAT if self.mixed else 0.0
        flat = self.partition * self.width + wide + self._temporaries(self.partition)
        gathering = (self.stage.elements * self.width if self.on_cpu else 0.0) - self.held.gradients
        self.momentary = max(flat, gathering, self.stage.largest * _DOUBLE)


class Zero3(States):
    """DeepSpeed's stage 3: everything is partitioned; matrices are gathered one by one, ahead of use."""

    def lay_out(self) -> None:
        framework, stage = self.framework, self.stage
        self.partition = stage.elements / self.ranks
        small = sum(size for size in stage.matrices if size < framework.param_persistence_threshold) * stage.layers
        # A partition of one rank is the weight itself: nothing has to be gathered.
        self.alias = self.ranks == 1 and not self.offloads
        # Small weights stay gathered.
        persistent = 0.0 if self.alias else (stage.vectors + small) * self.width
        self.held.parameters = self.partition * self.width + persistent
        self._optimizer(self.partition * (self.moments + _FLOAT))
        self.held.gradients = self.partition * self.width
        if self.offloads:  # weights too; only vectors stay on the device
            self.held.parameters -= self.partition * self.width
            self.held.gradients = 0.0
            self.held.host += self.partition * _FLOAT
            if self.setup.offload == "cpu":
                self.held.host += self.partition * self.width
            else:
                self.held.storage += self.partition * self.width
                self.held.host += framework.swap_buffer_elements * self.width
        self.held.communication = framework.reduce_bucket_size * self.width
        self.steady = self.held.communication
        tied = stage.unembedding > 0 and not stage.head and stage.tables >= stage.unembedding
        self.gathered = gather(
            GatheredWeights(
                stage.matrices, stage.layers, stage.tables - (stage.unembedding if tied else 0.0), stage.unembedding,
                tied, recomputed=self.setup.checkpointing != "none",
            ),
            framework,
        )  # fmt: skip
        self.filled = 0.0

    def begin(self, micro: int) -> None:
        super().begin(micro)
        self.passed = 0
        self._hold(self.gathered.start)

    def enter_forward(self, block: int) -> None:
        blocks = self.gathered.forward
        self._hold(blocks[block] if block < len(blocks) else self.gathered.head)

    def enter_block(self, first: bool) -> None:
        self._hold(self.gathered.backward[self.passed])
        self.passed += 1

    def _hold(self, moment: GatheredPeak) -> None:
        """Hold the gathered weights of a moment, and gloo's temporary receive buffer."""
        if self.alias:
            moment = GatheredPeak()
        self.held.communication = self.steady + moment.held * self.width
        self.momentary = max(0.0, moment.arriving - moment.held) * self.width if self.on_cpu else 0.0

    def gradients(self, weights: tuple[float, ...]) -> None:
        """Copy gradients into the bucket; a full one is padded, reduced and added to the partition."""
        self.momentary = 0.0
        for elements in weights:
            if self.filled + elements > self.framework.reduce_bucket_size:
                self.momentary = max(self.momentary, self.filled * self.width * (2 if self.on_cpu else 1))
                self.filled = 0.0
            self.filled += elements

    def skip(self, blocks: int) -> None:
        self.passed += max(0, blocks)

    def end(self) -> None:
        self._hold(self.gathered.end)
        self.momentary = self.filled * self.width * (2 if self.on_cpu else 1)
        self.filled = 0.0

    def step(self) -> None:
        """Step: a group's gradients as one flat tensor, then in float32."""
        self.held.communication = self.steady
        group = 0.0 if self.offloads else min(self.partition, self.framework.sub_group_size)
        self.momentary = group * (self.width + (_FLOAT if self.mixed else 0)) + self._temporaries(group)
