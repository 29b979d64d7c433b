"""The page behind GET /: its files, its policy, and every skill in a real browser."""

import re
import shutil
from pathlib import Path

import pytest

from tests.code_blocks import ROOT
from tests.http.real_clients.test_real_clients import IMAGE, KEY, endpoint

__all__ = ["endpoint"]
PAGE = ROOT / "kestrel_grpc/http/page"
CHROMIUM = shutil.which("chromium")


async def test_the_page_loads_nothing_from_elsewhere_and_has_no_inline_script(http):
    _, client = await http()
    page = await client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=|https?://", page.text)
    for path in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        assert (await client.get(f"/{path}")).status_code == 200, path
    assert (await client.get("/page/../app.py")).status_code == 404
    for sample in (await client.get("/page/samples.json")).json():
        assert (
            (await client.get(f"/page/{sample['file']}"))
            .headers["content-type"]
            .startswith("image/")
        )
        assert sample["asks"] and all(ask["skill"] and ask["text"] for ask in sample["asks"])


def test_every_element_that_the_script_names_is_in_the_page():
    named = set(re.findall(r'\$\("([a-z-]+)"\)', (PAGE / "page.js").read_text()))
    ids = set(re.findall(r'id="([a-z-]+)"', (PAGE / "index.html").read_text()))
    assert named and named <= ids


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_every_skill_in_a_browser(endpoint: str, scheme: str, width: int, tmp_path: Path):
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(endpoint.removesuffix("v1"))
        page.wait_for_selector("text=needs a token")
        problems.clear()  # The browser reports the refusal.
        page.fill("#key", KEY)
        page.press("#key", "Tab")
        page.wait_for_selector("text=serves kestrel-tiny")
        page.click("#run")
        assert page.inner_text("#error") == "Write the question first."
        assert "It knows coloured shapes only" in page.inner_text("#model")
        page.click("[data-sample=screen]")
        page.wait_for_selector("#frame:not([hidden])")
        page.click("text=point: Billing menu item")
        assert page.get_attribute("#tab-point", "aria-selected") == "true"
        assert page.input_value("#text") == "Billing menu item"
        page.click("[data-sample=shapes]")
        page.wait_for_selector("text=How many green crescents")
        assert page.input_value("#text") == "How many green crescents are there?"
        page.click("#clear")
        assert page.inner_text("#asks") == ""
        page.set_input_files("#file", str(IMAGE))

        def run(skill: str, text: str, until: str) -> None:
            page.click(f"[data-skill={skill}]")
            if text:
                page.fill("#text", text)
            page.click("#run")
            page.wait_for_selector(until)
            page.wait_for_selector("#run:not([disabled])")
            assert page.inner_text("#error") == ""

        run("query", "How many green crescents are there?", "#facts:not(:empty)")
        assert page.inner_text("#log") == "2"
        run("caption", "", "#facts:not(:empty)")
        assert " a " in page.inner_text("#log")
        page.fill("#end", " a ")
        run("caption", "", "#facts:not(:empty)")
        assert page.inner_text("#log") and " a " not in page.inner_text("#log")
        page.fill("#end", "")
        run("detect", "green crescent, pink star", "#legend li:nth-child(2)")
        found = [
            re.fullmatch(r"(.+): (\d) \(score [01]\.\d\d(, [01]\.\d\d)*\)", line)
            for line in page.inner_text("#legend").split("\n")
        ]
        assert [line and line.group(1, 2) for line in found] == [
            ("green crescent", "2"),
            ("pink star", "1"),
        ]
        assert page.locator("#marks rect").count() == 3
        labels = page.locator("#labels span").all_inner_texts()
        assert len(labels) == 3 and all(
            re.fullmatch(r"(green crescent|pink star) [01]\.\d\d", each) for each in labels
        )
        page.screenshot(path=tmp_path / f"{scheme}-found.png", full_page=True)
        run("point", "green crescent", "#legend li")
        assert page.locator("#marks ellipse").count() == 2
        assert all(
            re.fullmatch(r"[01]\.\d\d", each)
            for each in page.locator("#labels span").all_inner_texts()
        )
        run("segment", "pink star", "#legend li")
        assert page.locator("#marks path").get_attribute("d")
        assert re.fullmatch(r"pink star [01]\.\d\d", page.inner_text("#labels"))
        run("gaze", "", "#legend li")
        assert re.fullmatch(r"face: 0 \(absent with .*\)", page.inner_text("#legend"))
        page.click("[data-skill=detect]")
        page.fill("#text", "pink star, square")
        page.click("#code summary")
        page.click("[data-code=grpc]")
        assert page.inner_text("#source").count("client.detect") == 2, "one call for each object"
        page.click("[data-skill=query]")
        page.fill("#text", "Why?")
        page.check("#reasoning")
        page.fill("#end", "x")
        for code, asked in (
            ("grpc", 'client.query("image.jpg", "Why?", reasoning=True, stop=["x"])'),
            ("python", 'model.query(image, "Why?", reasoning=True, settings={"stop": ["x"]})'),
            ("curl", '"reasoning": true'),
        ):
            page.click(f"[data-code={code}]")
            assert asked in page.inner_text("#source")
        page.uncheck("#reasoning")
        page.fill("#end", "")
        page.click("#code summary")
        run("detect", "purple elephant", "#legend li")
        assert re.fullmatch(
            r"purple elephant: 0 \(absent with probability [01]\.\d\d\)", page.inner_text("#legend")
        )
        run("chat", "How many green crescents are there?", "#facts:not(:empty)")
        assert page.locator("#log .answer").inner_text() == "2"
        page.click("#code summary")
        for code, part in (("curl", "curl -N"), ("python", "openai"), ("grpc", "KestrelClient")):
            page.click(f"[data-code={code}]")
            assert part in page.inner_text("#source")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert problems == []
        page.screenshot(path=tmp_path / f"{scheme}.png")
        browser.close()
