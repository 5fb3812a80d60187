"""The page in a real headless browser, without a network: it draws itself, filters, and runs nothing that a model
wrote."""

from __future__ import annotations

import json
import time

import pytest

from rlvr.report import write_report

from .conftest import write_run

HOSTILE = '</script><script>window.pwned=1</script><img src=x onerror="window.pwned=1">&amp;<b>{}</b>'


def count(page, selector: str) -> int:
    return page.get(f"document.querySelectorAll({json.dumps(selector)}).length")


def text(page, selector: str) -> str:
    return page.get(f"document.querySelector({json.dumps(selector)}).textContent")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(
        tmp_path_factory.mktemp("runs") / "digits", steps=30, groups=3, metrics=lambda step: {"group/all_wrong": 1.0}
    )


def test_it_draws_all_sections_and_complains_of_nothing(page, folder):
    seconds = page.open(write_report([folder]))
    assert seconds < 20
    titles = page.get("[...document.querySelectorAll('h2')].map(e => e.textContent)")
    assert titles == ["Run", "Health", "Curves", "Evaluations", "Over time", "Rollouts", "Configuration"]
    assert count(page, "#curves svg path") >= 5 and count(page, "#over-time svg") == 4
    assert count(page, "#over-time rect") > 10
    assert "every answer is wrong" in text(page, ".finding") and "since step 1" in text(page, ".finding")
    assert count(page, "#evaluations tbody tr") == 3
    assert page.get("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.complaints == []


def test_a_newcomer_is_told_what_the_numbers_are(page, folder):
    page.open(write_report([folder]))
    assert "How to read this page" in text(page, "#guide") and count(page, "#guide[open] p") == 3
    cards = "[...document.querySelectorAll('#curves .card')]"
    captions = page.get(
        f"{cards}.map(e => [e.querySelector('h3').textContent, e.querySelector('.caption')?.textContent])"
    )
    assert captions and all(caption for _, caption in captions)
    shown = {title for title, _ in captions}
    assert any(title.startswith("eval/") for title in shown), shown
    facts = text(page, "#runs .facts")
    assert "held out: start, after" in facts and "→" in facts


def test_hovering_a_curve_tells_its_values(page, folder):
    page.open(write_report([folder]))
    page.hover("#curves .card svg")
    page.get("new Promise(done => setTimeout(done, 100))")
    assert page.get("document.getElementById('tip').hidden") is False
    shown = text(page, "#tip")
    step = int(shown.split()[1])
    assert 10 < step < 20 and f"digits: {step / 30:.4g}" in shown
    assert page.complaints == []


def test_rollouts_are_filtered(page, folder):
    page.open(write_report([folder]))
    whole = 30 * 12
    assert text(page, "#count") == f"{whole} of {whole} shown rollouts match"
    page.set("#f-verdict", "correct")
    assert text(page, "#count").startswith(f"{whole // 3} of")
    assert text(page, "#detail .badge") == "correct"
    page.set("#f-step", "7")
    assert text(page, "#count").startswith("4 of")
    page.set("#f-verdict", "")
    page.set("input[placeholder='reward ≥']", "0.5")
    assert text(page, "#count").startswith("4 of")
    page.set("input[placeholder='reward ≥']", "")
    page.set("#f-task", "task-7-2")
    assert text(page, "#count").startswith("4 of") and "task-7-2" in text(page, "#detail")
    page.set("#f-task", "no such thing")
    assert text(page, "#count").startswith("0 of") and "no rollout matches" in text(page, "#detail")
    page.set("#f-task", "")
    page.set("#f-step", "")
    page.set("#f-order", "-step")
    assert "step 30" in text(page, ".item")
    page.get("document.querySelectorAll('.item')[5].click()")
    assert page.get("document.querySelectorAll('.item')[5].getAttribute('aria-selected')") == "true"
    assert "member 1" in text(page, "#detail")
    assert page.complaints == []


def test_tokens_are_coloured_and_tell_their_numbers(page, folder):
    page.open(write_report([folder]))
    completion = text(page, "#completion")
    assert count(page, "#completion .token") == len(completion) > 5
    colours = {}
    for paint in ("advantage", "log_ratio", "surprise", "none"):
        page.set("#paint", paint)
        colours[paint] = page.get("[...document.querySelectorAll('#completion .token')].map(e => e.style.background)")
        assert text(page, "#completion") == completion
    assert len(set(colours["advantage"])) == 1 and "var(--" in colours["advantage"][0]
    assert len(set(colours["log_ratio"])) > 3
    assert all("--warm" in c for c in colours["surprise"]) and colours["none"] == []
    page.set("#paint", "surprise")
    page.hover("#completion .token")
    page.get("new Promise(done => setTimeout(done, 100))")
    assert text(page, "#tip") == "token 1: surprise 0.5\nsampled with probability 0.6065"


def test_what_a_model_wrote_is_text(page, make_run, tmp_path):
    folder = make_run("x", steps=2, text=HOSTILE)
    row = {
        "step": 1,
        "monitor": HOSTILE,
        "since": 1,
        "message": HOSTILE,
        "advice": HOSTILE,
        "mode": "warn",
        "examples": [HOSTILE],
    }
    (folder / "health.jsonl").write_text(json.dumps(row) + "\n")
    hostile = folder.rename(tmp_path / "a<img src=x onerror=window.pwned=1>")
    page.open(write_report([hostile], tmp_path / "page.html"))
    assert page.get("window.pwned") is None
    assert count(page, "img") == 0 and count(page, "script") == 2 and count(page, "#completion b") == 0
    assert text(page, "#completion") == HOSTILE.format("00")
    assert HOSTILE in text(page, ".finding")
    assert page.complaints == []


def test_several_runs_share_their_charts_and_seeds_a_band(page, make_run, tmp_path):
    folders = [make_run("a", seed=0), make_run("b", seed=1, steps=4), make_run("c", overrides=("optim.lr=0.1",))]
    page.open(write_report(folders, tmp_path / "page.html"))
    assert "a and 1 more seeds" in text(page, "#curves .legend") and "c" in text(page, "#curves .legend")
    banded = count(page, "#curves path[opacity='0.16']")
    assert banded > 0
    page.get("document.querySelector('#curves input[type=checkbox]').click()")
    assert count(page, "#curves path[opacity='0.16']") == 0
    keys = page.get("[...document.querySelectorAll('#differences tbody tr')].map(e => e.cells[0].textContent)")
    assert keys == ["run.seed", "optim.lr"]
    assert page.complaints == []


@pytest.mark.parametrize("missing", ["metrics.jsonl", "rollouts"])
def test_a_run_with_nothing_in_it_is_drawn_too(page, make_run, missing):
    folder = make_run(steps=3)
    (folder / missing).rename(folder.parent / "aside")
    page.open(write_report([folder]))
    assert missing in text(page, "#runs .note") and page.complaints == []


def test_light_and_dark(page, folder):
    page.open(write_report([folder]))

    def background() -> str:
        return page.get("getComputedStyle(document.body).backgroundColor")

    seen = []
    for scheme in ("light", "dark"):
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        seen.append(background())
        page.get("document.getElementById('theme').click()")
        seen.append(background())
        page.get("delete document.documentElement.dataset.theme")
    assert seen[0] != seen[1] == seen[2] != seen[3] == seen[0]


@pytest.mark.slow
def test_a_hundred_thousand_rollouts_open_at_once(page, tmp_path):
    path = write_report([write_run(tmp_path / "run", steps=1000, groups=20, size=5, text="abcdefghij" * 6 + "{}")])
    assert path.stat().st_size < 20e6
    began = time.process_time()
    assert page.open(path) < 4 + (time.process_time() - began)  # 2 s on an idle machine
