"""docs/python.md: its blocks are run one after the other as one script, with a tiny model and few steps."""

from __future__ import annotations

import re

import pytest

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
MODEL = '"Qwen/Qwen2.5-0.5B-Instruct"'
# What makes the page's script short: each stands on the page.
SHORTER = {
    "max_steps=100": "max_steps=2, max_completion_length=6, prompts_per_step=2",
    "steps=100": "steps=2",
    "max_new_tokens=64": "max_new_tokens=6",
    "trainer.step < 100": "trainer.step < 2",
    "train(10)": "train(1)",
    "[160:]": "[198:]",
}


@pytest.mark.slow
def test_the_blocks_are_one_script(root, policy, tmp_path, monkeypatch):
    text = (root / "docs/python.md").read_text(encoding="utf-8")
    script = "\n".join(BLOCK.findall(text))
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
    assert MODEL in script
    script = script.replace(MODEL, repr(str(tmp_path / "model")))
    for shown, shorter in SHORTER.items():
        assert shown in script
        script = script.replace(shown, shorter)
    monkeypatch.chdir(tmp_path)
    names = {}  # without a `__name__`, as in some consoles: the functions are of no module then
    exec(compile(script, "python.md", "exec"), names)
    assert (tmp_path / "runs/sums/report.html").is_file()
    trainer = names["trainer"]
    assert trainer.step == 2 and trainer.evaluations
    trainer.close()
