"""The part of a job on one host: carried there, started, looked at, brought back, ended, removed."""

import errno
import json
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from configs.common.files.reading import PLAN_BYTES, read_bytes
from configs.plans.job import HostPlacement, Job
from configs.plans.paths import JobPaths
from configs.records.record import Status
from configs.targets.target import SshTarget
from slurm.launcher.node import GIVEN, GIVEN_NAME
from slurm.launcher.setup_lines import prepared
from slurm.schedulers.job_files import node_end, node_launcher
from slurm.ssh.connection import Facts, Host, HostAway, HostError
from slurm.ssh.staging import interpreter_name, run_folder
from slurm.ssh.transfer import send, send_file
from slurm.staging.packages import whole_inputs

_BETWEEN_BYTES = 1 << 20
"""Larger files are brought when the job is over: to carry them could disturb what is measured."""
_END_SECONDS = 12.0
_OURS = ("end.json", "accounting.json", "submission.json", "hosts.json", "job.json", "queue.json", "collected", "go")


class NodeJob:
    """One node of a job. `over`: nothing of it runs any more, and all that it left is here."""

    def __init__(
        self, paths: JobPaths, job: Job, target: SshTarget, host: Host, placement: HostPlacement, rank: int
    ) -> None:
        self._paths, self._job, self._target, self._placement = paths, job, target, placement
        self.host, self.rank = host, rank
        self.over = False
        self.never_started = False
        """Its host has the job, and was never told to start its launcher."""
        self.ended_there = False
        """It was told to end, and nothing of it runs on its host any more."""
        self._told_to_end = False
        self._folder: str | None = None
        self._known: dict[str, list[int]] = {}

    @property
    def completed(self) -> bool:
        """Whether its ranks ended by themselves."""
        end = node_end(self._paths, self.rank)
        return end is not None and end.status is Status.COMPLETED

    @property
    def waits(self) -> bool:
        """Whether its launcher is up and waits for the host's lock."""
        launcher = node_launcher(self._paths, self.rank)
        return launcher is not None and launcher.lock_acquired_at is None

    def blames(self) -> tuple[str, ...]:
        """The hosts that this node says it has lost."""
        end = node_end(self._paths, self.rank)
        return end.nodes if end is not None else ()

    def rendezvous_address(self, facts: Facts) -> str:
        """By which the other hosts reach this one: as the target says, else where it was connected to."""
        return facts.address_of({host.name: host for host in self._target.hosts}[self.host.name])

    async def _place(self) -> tuple[str, Facts]:
        facts = await self.host.facts()
        if self._folder is None:
            if self._target.shared is not None:
                self._folder = str(self._paths.folder.resolve())
            else:
                self._folder = f"{run_folder(facts, self._placement.run)}/jobs/{self._placement.folder}"
        return self._folder, facts

    async def carry(self) -> None:
        """Bring the job and its inputs. Harmless where they are there."""
        folder, _ = await self._place()
        if self._target.shared is not None:
            return
        root = folder.rpartition("/jobs/")[0]
        await self.host.ask("make", paths=[f"{folder}/parts", f"{root}/cache", f"{root}/inputs"])
        inputs = whole_inputs(self._paths.folder.parents[1] / "inputs")
        there = (await self.host.ask("sizes", paths=[f"{root}/inputs/{path.name}" for path in inputs]))[0]["sizes"]
        for path, size in zip(inputs, there, strict=True):
            if size != path.stat().st_size:
                part = f".{path.name}.{self._placement.folder}.{self.rank}.part"
                await send_file(self.host, path, f"{root}/inputs/{path.name}", part)
        await send(self.host, read_bytes(self._paths.job, PLAN_BYTES), f"{folder}/job.json")

    async def start(self, addresses: Sequence[str]) -> None:
        """Start the launcher, once."""
        folder, facts = await self._place()
        shared = self._target.python if self._target.shared is not None else None
        program = shared or f"{facts.folder}/{interpreter_name(self._target)}"
        command = prepared([program, "-m", "slurm.launch", f"{folder}/job.json"], self._target)
        node = {"rank": self.rank, "names": self._placement.hosts, "addresses": addresses}
        digest = self._placement.run.rpartition("-")[2]
        told = json.dumps(node | {"job_id": f"{digest}-{self._placement.folder}"})
        environment = {GIVEN: told, GIVEN_NAME: self.host.name, "PYTHONSAFEPATH": "1"}
        await self.host.ask("start_job", folder=folder, rank=self.rank, argv=command, environment=environment)

    async def holds_its_host(self) -> bool:
        """Whether the host is this job's: no other is measured on it."""
        await self.look()
        launcher = node_launcher(self._paths, self.rank)
        return launcher is not None and launcher.lock_acquired_at is not None

    async def release(self) -> None:
        """Let the ranks start."""
        folder, _ = await self._place()
        if self._target.shared is not None:
            self._paths.go.touch()
        else:
            await send(self.host, b"", f"{folder}/go")

    async def look(self) -> None:
        """Bring what is new, and see whether it is over."""
        folder, _ = await self._place()
        shared = self._target.shared is not None
        while not self.over:
            asked = {"folder": folder, "rank": self.rank, "known": None if shared else self._known}
            answer, body = await self.host.ask("look", jobs=[asked])
            found = answer["jobs"][0]
            self.never_started = found["there"] and not found["started"]
            ended = not found["there"] or (not found["alive"] and (found["started"] or self._told_to_end))
            brought = await self._bring(folder, found["files"], body, ended)
            if not ended:
                return
            # What it wrote last may have come after the list: until nothing is new.
            self.over = brought == 0

    async def _bring(self, folder: str, files: Sequence[Sequence[Any]], body: bytes, ended: bool) -> int:
        """Keep what came with an answer, and fetch the rest where it is time. Returns the number of files."""
        brought = place = 0
        for name, size, changed, inline in files:
            content = body[place : place + inline] if inline is not None else None
            place += inline or 0
            if content is None and size > _BETWEEN_BYTES and not ended:
                continue
            if not _is_theirs(name):
                self._known[name] = [size, changed]
                continue
            try:
                await self._keep(f"{folder}/{name}", self._paths.folder / name, size, content)
            except HostError as error:
                if error.errno != errno.ENOENT:
                    raise
                continue  # a file that had its name for a moment alone
            self._known[name] = [size, changed]
            brought += 1
        return brought

    async def _keep(self, source: str, target: Path, size: int, content: bytes | None) -> None:
        """Write a file whole or not at all."""
        target.parent.mkdir(parents=True, exist_ok=True)
        work = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        try:
            with work.open("wb") as file:
                if content is not None:
                    file.write(content)
                while content is None and file.tell() < size:
                    _, piece = await self.host.ask("get", path=source, offset=file.tell(), size=size - file.tell())
                    if not piece:
                        break  # it became shorter meanwhile: it is new again at the next look
                    file.write(piece)
                if target.parent == self._paths.parts:  # no other copy is left once the host's folder is removed
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(work, target)
        finally:
            work.unlink(missing_ok=True)

    async def end(self) -> list[int]:
        """End all processes of the job there. Returns pids of those that could not be ended."""
        folder, _ = await self._place()
        answer, _ = await self.host.ask("end_job", limit_seconds=_END_SECONDS, folder=folder, rank=self.rank)
        self._told_to_end = True
        left: list[int] = answer["left"]
        self.ended_there = not left
        return left

    async def clear(self) -> None:
        """Remove the job's folder from the host; where that is away, end the job when it is back."""
        if self._folder is None:
            return
        if not self.over:
            self.host.to_end[self._folder, self.rank] = None
        if self._target.shared is None and self.over:
            with suppress(HostAway):
                await self.host.ask("remove", paths=[self._folder])


def _is_theirs(name: str) -> bool:
    """Whether a host may write the file of this name here: below the job's folder, and none of those made here."""
    path = PurePosixPath(name)  # `./end.json` is end.json
    hidden = any(part.startswith(".") for part in path.parts)
    return path.parts != () and not path.is_absolute() and not hidden and str(path) not in _OURS
