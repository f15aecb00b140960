"""The sections on training: speed, memory, strategies, equality of losses."""
