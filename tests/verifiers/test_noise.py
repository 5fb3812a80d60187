"""Libraries behind the verifiers (math-verify, latex2sympy, jsonschema) print nothing about the texts that a model
wrote."""

import importlib.util
import subprocess
import sys

import pytest

SCRIPT = r"""
import json
import sys
from rlvr.records import Task
from rlvr.verifiers import JsonSchemaVerifier, MathVerifier, VerifierPool

ODD = [r"\lim_{x\to}", r"\frac{1}{}", r"\begin{pmatrix}1&2\end{pmatrix}", r"\sum_{n=1}^\infty \frac1n", r"\alpha@#", r"{x^{x^{}}}"]

def judge_all(verifiers):
    for verifier, task, texts in verifiers:
        for text in texts:
            verifier.verify(task, text)
        with VerifierPool(workers=1) as pool:
            verdicts = pool.verify_many(verifier, [(task, text) for text in texts])
        assert all(verdict.decided for verdict in verdicts), verdicts

if __name__ == "__main__":
    patterns = [json.dumps(f"{'x' * n}[[a]--b]") for n in range(5)]
    schema = {"type": "string", "format": "regex"}
    verifiers = [(JsonSchemaVerifier(schema=schema), Task("j", "?"), patterns)]
    for symbolic in [False] + [True] * (sys.argv[1] == "math-verify"):
        math = MathVerifier(math_verify=symbolic)
        verifiers.append((math, Task("m", "?", r"\int x \, dx"), [rf"\boxed{{{odd}}}" for odd in ODD]))
    judge_all(verifiers)
"""


@pytest.mark.alone
def test_nothing_reaches_the_terminal(tmp_path):
    (tmp_path / "judge.py").write_text(SCRIPT)
    extra = "math-verify" if importlib.util.find_spec("math_verify") else "none"
    done = subprocess.run(
        [sys.executable, "judge.py", extra], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
