"""The page at /, in a headless Chromium."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from server_helpers import SECONDS, Gate, RunningServer, running, wait_until

from lazyattn_jax.engine.engine import Engine

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = [
    "--no-sandbox",  # as root there is none
    "--disable-background-networking",
    "--disable-component-update",
]
FROG = ("Frogs", "The glass frog lives in <b>cloud</b> forests.")
CLOCK = ("Clocks", "The comet clock on <i>this</i> page was built by Jonas Weir.")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
expect.set_options(timeout=1000 * SECONDS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def page(server: RunningServer, browser: Browser) -> Iterator[Page]:
    server.call(lambda engine: engine.scheduler.index.clear())
    yield from opened(browser, server.url)


def opened(browser: Browser, url: str) -> Iterator[Page]:
    """The page; nothing may go wrong in it, and nothing may come from elsewhere."""
    page = browser.new_page(viewport={"width": 1400, "height": 800})
    page.set_default_timeout(1000 * SECONDS)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda r: r.url.startswith(url) or problems.append(r.url))
    page.goto(url)
    yield page
    page.close()
    assert not [problem for problem in problems if not problem.startswith("data:")]


def add(page: Page, document: tuple[str, str]) -> None:
    page.get_by_label("Title").fill(document[0])
    page.get_by_label("Text").fill(document[1])
    page.get_by_role("button", name="Add", exact=True).click()


def ask(page: Page, question: str) -> Locator:
    page.get_by_label("Question").fill(question)
    page.get_by_role("button", name="Ask").click()
    return page.locator(".turn").last


def test_chat_with_documents(page: Page, server: RunningServer) -> None:
    expect(page.locator("#model")).to_have_text("tiny, context of 512 tokens")
    expect(page.locator("#nothing")).to_be_visible()
    add(page, FROG)
    add(page, CLOCK)
    cold = ask(page, "What?")
    expect(cold.locator(".note")).to_contain_text("prompt tokens reused")
    expect(cold.locator(".question")).to_have_text("What?")
    said = re.fullmatch(
        r"first token after (\d+) ms, (\d+) of (\d+) prompt tokens reused",
        cold.locator(".note").inner_text(),
    )
    assert said
    assert int(said[2]) == 0
    answer = cold.locator(".answer").inner_text()
    # What the page shows is what the interface says to the same request.
    messages = [
        {"role": "system", "content": "You answer questions using the documents."},
        {"role": "user", "content": "What?"},
    ]
    documents = [{"title": title, "text": text} for title, text in (FROG, CLOCK)]
    body = {"messages": messages, "documents": documents, "temperature": 0, "max_tokens": 256}
    direct = server.post("chat/completions", **body).json()
    assert direct["choices"][0]["message"]["content"].strip() == answer.strip()
    assert direct["usage"]["prompt_tokens"] == int(said[3])
    # In the pool now, and in another order found again.
    rows = page.locator("#resident tr")
    expect(rows).to_have_count(2)
    both = [rows.filter(has_text=title) for title, _ in (FROG, CLOCK)]
    for row in both:
        expect(row.locator("td").last).to_have_text("computed")
    page.get_by_role("button", name="Clear").click()
    page.get_by_title("earlier").nth(1).click()
    expect(page.locator("#list li").first).to_contain_text("Clocks")
    warm = ask(page, "Why?")
    expect(warm.locator(".note")).to_contain_text("prompt tokens reused")
    for row in both:
        expect(row.locator("td").last).to_have_text("reused")
        expect(row.locator("td").nth(4)).to_have_text("2")  # hits: the direct request, and this one
        expect(row.locator("td").nth(3)).to_have_text("")
    tokens = [int(row.locator("td").nth(1).inner_text()) for row in both]
    assert tokens == [len(f"Title: {title}\n{text}\n\n") for title, text in (FROG, CLOCK)]
    assert page.locator("#bar .document").count() == 2


def test_tokens_come_one_by_one_and_the_pool_is_live(page: Page, engine: Engine) -> None:
    add(page, FROG)
    with Gate(engine) as gate:
        gate.allow(1)
        turn = ask(page, "What?")
        # The pool is looked at between two steps, so steps have to go on until it is shown in use.
        used = page.locator("#bar .document.used")
        lengths: set[int] = set()
        for _ in range(200):
            gate.allow(1)
            page.wait_for_timeout(50)
            lengths.add(len(turn.locator(".answer").inner_text()))
            if len(lengths) > 4 and used.count():
                break
        assert len(lengths) > 4
        assert used.count() == 1
        assert page.locator("#resident td").nth(3).inner_text() == "1"
        assert "requests: 1 running" in page.locator("#load").inner_text()
        page.get_by_role("button", name="Stop").click()
        gate.open()
        expect(turn.locator(".note")).to_contain_text("stopped")
    expect(page.locator("#load")).to_contain_text("requests: 0 running")
    expect(page.locator("#bar .used")).to_have_count(0)


def test_what_goes_wrong_is_shown(page: Page) -> None:
    add(page, ("Long", "x" * 600))
    turn = ask(page, "What?")
    expect(turn.locator(".failed")).to_contain_text("max_model_len")
    page.get_by_title("remove").click()
    turn = ask(page, "What?")
    expect(turn.locator(".note")).to_contain_text("prompt tokens reused")


def test_text_is_never_markup(page: Page) -> None:
    add(page, ("<img src=x onerror=alert(1)>", "<script>alert(2)</script>"))
    ask(page, "<i>What?</i>")
    expect(page.locator(".question")).to_have_text("<i>What?</i>")
    expect(page.locator("#resident tr")).to_have_count(1)
    assert page.locator("main img, main script, main i").count() == 0


def test_with_an_api_key(engine: Engine, browser: Browser) -> None:
    with running(lambda: engine, "a-key") as server:
        wait_until(lambda: server.engine.unavailable is None)
        for page in opened(browser, server.url):
            expect(page.locator("#problem")).to_contain_text("API key")
            page.get_by_label("API key").fill("a-key")
            expect(page.locator("#problem")).to_have_text("")
            expect(page.locator("#model")).to_contain_text("tiny")


def test_assets(server: RunningServer) -> None:
    page = server.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    for name, kind in (("page.js", "javascript"), ("page.css", "css")):
        answer = server.http.get(f"/static/{name}")
        assert kind in answer.headers["content-type"]
        assert not re.search(r"https?://", answer.text)
    assert server.http.get("/static/../app.py").status_code == 404
    assert server.http.get("/static/%2e%2e/app.py").status_code == 404
