"""The page at /, in a real browser, on a real `serve` with a real llama-server behind it."""

from __future__ import annotations

import shutil
import socket

import pytest
from parts import ask, eventually, free_port, llama_command, missing

JOB = "00-test.job"
KEY, ADMIN = "a-user-key", "an-admin-key"


@pytest.fixture(scope="module")
def browser():
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        missing("chromium and chromedriver (Debian: chromium chromium-driver) are not here")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1280,1000"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield made
    made.quit()


class Page:
    """What somebody sees, and clicks."""

    def __init__(self, browser, url: str) -> None:
        self.browser = browser
        browser.get_log("browser")
        browser.get(url + "/")
        browser.execute_script("sessionStorage.clear()")
        browser.refresh()
        browser.execute_script("window.here = true")

    def text(self, of: str = "body") -> str:
        return self.browser.execute_script("return document.querySelector(arguments[0]).innerText", of)

    def sees(self, what: str, of: str = "body") -> None:
        eventually(lambda: what in self.text(of), f"{what!r} in {of}")

    def model(self, name: str) -> str:
        """All that the line of a model says."""
        find = "return [...document.querySelectorAll('#models .model')].map(each => each.innerText)"
        return next((text for text in self.browser.execute_script(find) if name in text), "")

    def model_says(self, name: str, what: str) -> None:
        eventually(lambda: what in self.model(name), f"{what!r} beside {name}: {self.model(name)!r}")

    def click(self, label: str) -> None:
        button = f"button[aria-label='{label}'][aria-disabled=false]"
        eventually(lambda: self.browser.find_elements("css selector", button), label)[0].click()

    def give_key(self, key: str) -> None:
        from selenium.webdriver.common.keys import Keys

        field = eventually(lambda: [each for each in self.browser.find_elements("css selector", "#key-text") if each.is_displayed()], "asked for a key")[0]
        field.send_keys(key, Keys.ENTER)

    def errors(self) -> list[str]:
        """The console's, but for what the browser says of a refusal that the page shows itself."""
        lines = [entry["message"] for entry in self.browser.get_log("browser")]
        return [line for line in lines if "status of 401" not in line and "status of 423" not in line]

    def was_not_reloaded(self) -> bool:
        return self.browser.execute_script("return window.here === true")


@pytest.fixture
def box(tmp_path):
    """A job queue, and a port where a benchmark's server may listen."""
    for folder in ("queue", "running", "done", "failed"):
        (tmp_path / "jobs" / folder).mkdir(parents=True)
    (tmp_path / "jobs/runner.log").touch()
    return tmp_path


def config(box, llama_server: str, models: dict, **proxy) -> dict:
    engine = {"command": llama_command(llama_server, models["small"]), "port": free_port(), "models": ["small"]}
    host = {"job_queue": {"path": str(box / "jobs"), "settle": "0s"}, "bench_port": free_port(), "engines": {"e": engine}}
    return {"proxy": {"tick": "1s", "handover": "3s", **proxy}, "hosts": {"here": host}}


def test_a_model_is_loaded_refused_handed_over_and_unloaded_before_ones_eyes(browser, serve, llama_server, models, box):
    settings = config(box, llama_server, models)
    serving = serve(settings)
    page = Page(browser, serving.url)
    page.sees("All is well", "#condition")
    page.model_says("small", "unloaded")

    with socket.create_server(("127.0.0.1", settings["hosts"]["here"]["bench_port"])):
        page.click("Load small")
        page.model_says("small", "GPU is busy")
        page.sees("bench port", "#hosts")
    page.click("Load small")
    page.model_says("small", "loaded")
    eventually(lambda: "GPU is busy" not in page.model("small"), "the refusal is gone with the next success")
    page.sees("engine e is up", "#events")
    assert ask(serving.url + "/v1/completions", "POST", {"model": "small", "prompt": "it was", "max_tokens": 8}).status == 200
    page.sees("tok/s", "#rates")

    (box / "jobs/queue" / JOB).write_text("sleep 5\n")
    with open(box / "jobs/runner.log", "a") as log:
        log.write(f"2026-10-25 16:57:34 gpu-wait {JOB} pid={serving.engine_pid('e')} comm=llama-server\n")
    page.sees(f"the GPU is handed to {JOB}", "#events")
    page.sees("handover", "#hosts")
    page.sees(f"here: {JOB}", "#handbacks")
    page.model_says("small", "unloaded")
    (box / "jobs/queue" / JOB).unlink()

    eventually(lambda: "handover" not in page.text("#hosts"), "the handover ends")
    page.click("Load small")
    page.model_says("small", "loaded")
    page.click("Unload small")
    page.model_says("small", "unloaded")
    assert page.was_not_reloaded() and page.errors() == []


def test_a_key_is_asked_for_once_and_kept_for_the_tab(browser, serve, llama_server, models, box):
    serving = serve(config(box, llama_server, models, api_keys=[KEY], admin_keys=[ADMIN]))
    page = Page(browser, serving.url)
    page.give_key("wrong")
    page.sees("That key was not accepted.", "#key")
    page.give_key(KEY)
    page.sees("All is well", "#condition")
    page.click("Load small")
    page.sees("needs an admin key", "#key")
    page.give_key(ADMIN)
    page.model_says("small", "loaded")
    browser.refresh()
    page.sees("All is well", "#condition")
    page.model_says("small", "loaded")
    page.click("Unload small")
    page.model_says("small", "unloaded")
    assert page.errors() == []


@pytest.mark.parametrize("width", [360, 768, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_at_any_width_and_colours_follow_the_scheme(browser, serve, stub_engine, width, scheme):
    long = "a-model-with-a-very-long-name-" * 4 + "q8"
    engines = {"e": {"url": "http://127.0.0.1:1", "models": [long]}}
    serving = serve({"hosts": {"a-host-with-a-long-name" * 2: {"engines": engines}}})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False})
    try:
        page = Page(browser, serving.url)
        page.sees(long, "#models")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        red = int(background.partition("(")[2].partition(",")[0])
        assert (red > 200) is (scheme == "light")
        assert page.errors() == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_what_a_name_holds_is_text_and_no_markup(browser, serve):
    name = "<img src=x onerror=window.owned=1>"
    serving = serve({"hosts": {"here": {"engines": {"e": {"url": "http://127.0.0.1:1", "models": [name]}}}}})
    page = Page(browser, serving.url)
    page.sees(name, "#models")
    assert browser.execute_script("return window.owned") is None and page.errors() == []
