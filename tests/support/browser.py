"""Prefect's UI in a real headless Chromium, driven by Playwright as a person would: by what is on the screen.

    with chromium() as browser, opened(browser, team.ui) as ui:
        form = ui.form(deployment)
        form.field("Name").fill("mine")
        run = ui.submit()

The browser is on the network of the thread that starts it, so start it where the server is. Nothing sleeps:
every look waits until the page shows what is asked for.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import UUID

from playwright.sync_api import Browser, Locator, Page, Response, expect, sync_playwright
from playwright.sync_api import TimeoutError as PageTimeoutError

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SLOW = 60_000.0
"""Milliseconds that a page may take on a machine that is busy with other things."""
_BUSY, _PRESSES = 503, 5
WIDTH, HEIGHT = 1280, 2000
"""The UI makes only those items of a long list that are in the window."""


def find_chromium() -> str | None:
    """Path of the system's Chromium; Playwright's own would have to be downloaded."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser; it and its driver are gone afterwards."""
    path = find_chromium()
    assert path is not None, f"none of {', '.join(_NAMES)} is installed"
    with sync_playwright() as playwright:
        # A sandbox cannot be made by root, nor in many containers; only our own server is measured.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=SLOW)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, height: int = HEIGHT) -> Iterator["Ui"]:
    """A window with an empty profile, for the UI that lies at `url`."""
    with browser.new_context(viewport={"width": WIDTH, "height": height}, timezone_id="UTC") as context:
        context.set_default_timeout(SLOW)
        yield Ui(context.new_page(), url)


def serious_faults(page: Page) -> list[str]:
    """What axe-core finds on a page as it is now: rule, impact and first element of each violation."""
    from axe_playwright_python.sync_playwright import Axe

    response = Axe().run(page).response
    assert len(response["passes"]) > 10, "axe has looked at nothing"
    return [f"{one['id']} ({one['impact']}): {one['nodes'][0]['html'][:200]}" for one in response["violations"]]


class Field:
    """A field of a form, with all that lies in it; found by its label."""

    def __init__(self, within: Page | Locator, label: str) -> None:
        page = within if isinstance(within, Page) else within.page
        header = page.locator(":scope > .p-label__header .schema-form-property__label")
        text = re.compile(rf"^\s*{re.escape(label)}( \(Optional\))?\s*$")
        self.place = within.locator(".schema-form-property").filter(has=header.filter(has_text=text)).first

    def field(self, label: str) -> "Field":
        """A field inside this one; the first, where several have the label."""
        return Field(self.place, label)

    def add_item(self) -> Locator:
        """Press the button below the list, the last in this field; returns the new item."""
        items = self.place.locator(".p-draggable-list__item")
        before = items.count()
        self.place.get_by_role("button", name="Add item").last.click()
        expect(items).to_have_count(before + 1, timeout=SLOW)
        return items.last

    def fill(self, value: str) -> None:
        """Write into the field's box."""
        self.place.locator("input, textarea").first.fill(value)

    def choose(self, alternative: str) -> None:
        """Take one of the field's alternatives."""
        self.place.get_by_role("button", name=alternative, exact=True).first.click()

    def toggle(self) -> None:
        """Switch a yes to a no, or back."""
        self.place.get_by_role("switch").click()

    @property
    def alternatives(self) -> list[str]:
        """What is written on the buttons of the field's alternatives."""
        self.place.locator(".p-button-group").first.wait_for()
        return self.place.locator(".p-button-group").first.get_by_role("button").all_inner_texts()

    @property
    def value(self) -> str:
        """What is in the field's box."""
        return self.place.locator("input, textarea").first.input_value()


class Ui:
    """Prefect's UI as a person uses it."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self._url = url

    def go(self, path: str) -> None:
        """Open a page of the UI. While answers come it draws itself anew, and a click may hit what goes away."""
        self.page.goto(f"{self._url}{path}", wait_until="load")
        self._rest()

    def _rest(self) -> None:
        """Until no answer is under way; the page of a run that goes on asks again and again and may never rest."""
        with suppress(PageTimeoutError):
            self.page.wait_for_load_state("networkidle", timeout=SLOW / 4)

    def sees(self, text: str) -> Locator:
        """Wait until a text is visible; returns where."""
        found = self.page.get_by_text(text).first
        expect(found).to_be_visible(timeout=SLOW)
        return found

    def tab(self, name: str) -> None:
        """Turn to one of the page's tabs."""
        self.page.locator("[class*=p-tab]").get_by_text(name, exact=True).first.click()

    def form(self, deployment: UUID) -> Field:
        """Open a deployment's form; returns its field `study`."""
        self.go(f"/deployments/deployment/{deployment}/run")
        study = Field(self.page, "study")
        study.place.wait_for()
        return study

    def press(self, button: Locator, request: str, reload: bool = False) -> Response:
        """Press until the server takes what the UI then asks for; SQLite may be locked for a moment.

        The UI asks nothing where the server did not answer what it asks before, such as whether a form is valid.
        reload: load the page again after a refusal.
        """
        answer: Response | None = None
        for attempt in range(_PRESSES):
            if attempt and reload:
                self.page.reload()
            with suppress(PageTimeoutError):
                with self.page.expect_request(re.compile(request), timeout=SLOW) as asked:
                    button.click()
                answer = asked.value.response()
                if answer is not None and answer.status != _BUSY:
                    break
        assert answer is not None and answer.ok, answer and answer.text()
        return answer

    def busy_once(self, request: str) -> None:
        """Let the next request whose address has this in it be answered as by a server whose database is locked."""
        self.page.route(re.compile(request), lambda route: route.fulfill(status=_BUSY), times=1)

    def submit(self) -> UUID:
        """Send the form, and look at the run that comes of it; returns the flow run."""
        button = self.page.get_by_role("button", name="Submit", exact=True)
        run = UUID(self.press(button, "/create_flow_run$").json()["id"])
        # The UI leaves the form by itself; to leave it for the run must come after that.
        self.page.wait_for_url(re.compile(r"/deployments/deployment/[0-9a-f-]+(\?|$)"))
        self.go(f"/runs/flow-run/{run}")
        return run

    def artifact(self, flow_run: UUID, key: str) -> None:
        """Open an artifact from the page of its run."""
        self.go(f"/runs/flow-run/{flow_run}")
        self.tab("Artifacts")
        self.page.locator(".artifact-card").filter(has_text=key).first.click()
        self.page.wait_for_url(re.compile("/artifacts/artifact/"))

    def switch(self, slug: str) -> None:
        """Switch a schedule on or off, on the page of its deployment; returns when the page shows it.

        Until then the switch would ask for the same once more. After a refusal it shows what is, but its hidden input
        does not, and the next press would ask for what is: the page is loaded again.
        """
        switch = self.page.locator(".deployment-schedule-card").filter(has_text=slug).get_by_role("switch")
        before = switch.get_attribute("aria-checked", timeout=SLOW)
        self.press(switch, "/schedules/[0-9a-f-]{36}$", reload=True)
        expect(switch).to_have_attribute("aria-checked", "false" if before == "true" else "true", timeout=SLOW)
        self._rest()

    def picture(self, path: Path, height: int | None = None) -> None:
        """Keep what the window shows, or its upper part, once it is all there."""
        self._rest()
        self.page.evaluate("document.fonts.ready")
        # A timeline is drawn on a canvas, which tells nobody when it has come to rest.
        self.page.wait_for_timeout(1500)
        window = self.page.viewport_size
        assert window is not None
        part = {"x": 0, "y": 0, "width": window["width"], "height": height or window["height"]}
        self.page.screenshot(path=path, clip=part, animations="disabled", caret="hide")
