"""Kinds of failure that more than one layer refers to by name; a record's `failure.kind` holds them.

A rank's own exception is of the kind of its class; a signal is of its name.
"""

PEER_LOST = "PeerLost"
"""A rank that only saw another rank go."""

PROCESS_DIED = "ProcessDied"
"""A rank ended without a word and without a signal."""

OTHER_NODE = "OtherNodeEnded"
"""This node's ranks were ended because those of another node had."""

NODE_LOST = "NodeLost"
"""The head node no longer reaches a node."""

HEAD_LOST = "HeadLost"
"""A node no longer reaches the head node."""

SUSPENDED = "Suspended"
"""The scheduler stopped the job in a measurement, and let it go on: its times contain the pause."""

_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "cannot allocate memory",
    "out of memory",
    "cublas_status_alloc_failed",
)


def says_no_memory(text: str) -> bool:
    """Return whether a library's message says that memory was lacking: of the host, or of a GPU.

    Only torch's own allocator raises `torch.OutOfMemoryError`: CUDA, cuBLAS and NCCL take memory beside it.
    """
    lowered = text.lower()
    return any(words in lowered for words in _NO_MEMORY)
