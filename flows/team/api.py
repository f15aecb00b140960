"""Queries to a Prefect API with the standard library only, because importing Prefect takes a second or two.

api = Api("http://127.0.0.1:4200/api", own=True, environment=dict(os.environ))
api.answers(), api.online("host"), api.deployments()
"""

import base64
import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from flows.server.opener import api_opener
from flows.team.setup import POOL

_FAILURES = (OSError, ValueError, http.client.HTTPException)


@dataclass(frozen=True)
class Api:
    """An API, and the environment in which its credentials are. Our `own`, or one on loopback, is asked by no proxy."""

    url: str
    own: bool
    environment: dict[str, str]

    def answers(self) -> bool:
        """Whether it says that it is healthy."""
        try:
            with self._open(urllib.request.Request(f"{self.url}/health")):
                return True
        except _FAILURES:
            return False

    def online(self, worker: str) -> bool | str:
        """Whether it shows the Prefect worker as online; in words, why it cannot be asked."""
        try:
            workers = self._filter(f"/work_pools/{POOL}/workers/filter")
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                return "the API requires PREFECT_API_AUTH_STRING or PREFECT_API_KEY"
            return False
        except _FAILURES as error:
            return f"the API cannot be queried: {error}"
        return any(each["name"] == worker and each["status"] == "ONLINE" for each in workers)

    def deployments(self) -> list[str]:
        """One line for each: its name and how many of its schedules are on. Empty where it cannot be asked."""
        try:
            found = self._filter("/deployments/filter")
        except _FAILURES:
            return []
        return sorted(f"deployment {each['name']}: {_schedules(each)}" for each in found)

    def _filter(self, path: str) -> list[dict[str, Any]]:
        headers = {"Content-Type": "application/json", **self._credentials()}
        with self._open(urllib.request.Request(f"{self.url}{path}", b"{}", headers)) as answer:
            told: list[dict[str, Any]] = json.load(answer)
            return told

    def _credentials(self) -> dict[str, str]:
        user = self.environment.get("PREFECT_API_AUTH_STRING")
        if self.own:
            user = user or self.environment.get("PREFECT_SERVER_API_AUTH_STRING")
        elif key := self.environment.get("PREFECT_API_KEY"):
            return {"Authorization": f"Bearer {key}"}
        return {"Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"} if user else {}

    def _open(self, request: urllib.request.Request) -> Any:
        return api_opener(self.url, self.environment, self.own).open(request, timeout=10)


def _schedules(deployment: dict[str, Any]) -> str:
    schedules = deployment.get("schedules") or []
    on = sum(1 for schedule in schedules if schedule["active"])
    told = f"{on} of {len(schedules)} schedules on" if schedules else "no schedule"
    return f"paused, {told}" if deployment.get("paused") else told
