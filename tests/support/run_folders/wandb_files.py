"""Reads the files of offline runs of Weights & Biases."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def offline_records(path: Path) -> Iterator[Any]:
    """Records of a .wandb file by wandb's own messages: LevelDB's log format after a header of 7 bytes.

    32 KiB blocks; a piece is CRC, length, kind (whole, first, middle, last) and bytes.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, record = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            message = wandb_internal_pb2.Record()
            message.ParseFromString(record)
            record = b""
            yield message
