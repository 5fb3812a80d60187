"""A loss that is not finite on one of two ranks: its optimizer step is skipped on both, and leaves nothing behind."""

from __future__ import annotations

import pytest
import zero_ranks
from test_backends import ADAM, ZERO, gap, launch

from rlvr.distributed import World

pytestmark = pytest.mark.alone

OPTIM = {**ADAM["optim"], "updates_per_batch": 2}
SETTINGS = {
    f"zero{stage}": {
        "run": "nonfinite",
        "backend": ZERO[stage],
        "optim": {**OPTIM, "micro_batch_size": 2},
        "lr": ADAM["lr"],
    }
    for stage in (2, 3)
}


def test_an_optimizer_step_with_a_loss_that_is_not_finite_is_skipped_on_every_rank(tmp_path_factory):
    """Against one process with the plain backend."""
    result = launch(tmp_path_factory, SETTINGS)
    wanted = zero_ranks.nonfinite({**SETTINGS["zero2"], "backend": "plain", "optim": OPTIM}, World())
    assert [row["skipped/nonfinite"] for row in wanted["metrics"]] == [0.0, 0.5, 0.5, 0.0]
    assert [row["update/steps"] for row in wanted["metrics"]] == [2, 1, 1, 2]
    for name, of_ranks in result.items():
        for own, other in zip(of_ranks["metrics"], wanted["metrics"], strict=True):
            for key in ("skipped/nonfinite", "update/steps", "grad_norm"):
                assert own[key] == pytest.approx(other[key], rel=1e-4), (name, key)
        tensors = zip(of_ranks["tensors"], wanted["tensors"], strict=True)
        for number, (own, other) in enumerate(tensors):
            assert all(bool(tensor.isfinite().all()) for tensor in own.values()), name
            if number:
                assert gap(own, other, since=wanted["tensors"][0]) < 1e-3, (name, number)
