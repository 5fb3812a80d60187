"""scripts/benchmarks/launches.py counts what it says, and its committed result is that of the code as it is."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

NO_TRITON = "triton is not installed, with which the head's kernels are counted"


@pytest.fixture
def launches(root, monkeypatch):
    """The script, imported."""
    pytest.importorskip("triton", reason=NO_TRITON)
    monkeypatch.syspath_prepend(root / "scripts/benchmarks")
    return __import__("launches")


@pytest.fixture
def committed(root):
    return json.loads((root / "scripts/benchmarks/launches.json").read_text())


def test_operations_are_counted_with_their_bytes_and_flops(launches):
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    with launches.Counting() as mode:
        c = a @ b  # 12 + 20 numbers read, 15 written
        c.t().add_(1.0)  # a view, and 15 read and written
        c[:, :1].expand(3, 5).exp()  # 3 read, 15 written
        torch.empty(100)
        torch.ones(50, 6)[torch.tensor([1, 2])]  # 300 written; 2 rows of 6 read and written, by 2 numbers of 8 bytes
    # torch.tensor([1, 2]) is made on the host: no operation of the device but a detachment.
    assert mode.counts.launches == 5
    assert mode.counts.flops == 2 * 3 * 4 * 5
    assert mode.counts.bytes == 4 * (12 + 20 + 15) + 4 * 30 + 4 * 18 + 4 * 300 + (4 * 2 * 12 + 2 * 8)


def test_grouped_products_count_each_token_once(launches):
    import dispatch_counts

    tokens, experts = torch.empty(7, 3, device="meta"), torch.empty(4, 3, 5, device="meta")
    assert dispatch_counts.grouped_flops(tokens, experts) == 2 * 7 * 3 * 5
    assert dispatch_counts.grouped_flops(tokens.t(), torch.empty(7, 5, device="meta")) == 2 * 3 * 7 * 5


def test_the_head_launches_two_kernels_a_tile_forward_and_four_backward(launches):
    """A product and a kernel; then a product, a kernel and two products for the gradients."""
    vocabulary = 40_000
    small, large = (launches.own_heads(64, vocabulary, tokens)[launches.OURS] for tokens in (2048, 8192))
    more = launches.tiles(8192, vocabulary, 16_384) - launches.tiles(2048, vocabulary, 16_384)
    assert more == 9
    assert large["forward"].launches - small["forward"].launches == 2 * more
    assert large["backward"].launches - small["backward"].launches == 4 * more
    # Logits, and in the backward pass logits again and two gradients.
    assert large["forward"].flops == 2 * 8192 * vocabulary * 64
    assert large["backward"].flops == 3 * large["forward"].flops


def test_the_committed_counts_are_those_of_the_code(launches, committed):
    assert set(committed["models"]) == set(launches.HEADS)
    for model, width in launches.HEADS.items():
        entry = committed["models"][model]
        assert entry["hidden size"] == width
        if width == min(launches.HEADS.values()):  # the number of launches does not depend on the width
            assert entry["head of 16,384 trained tokens"] == launches.own_launches(width, entry["vocabulary"])
        assert set(entry["update"]) == {
            launches.BEFORE,
            launches.TORCH,
            launches.OURS,
            *launches.PACKED,
            *launches.PEERS,
        }
        assert entry["executed over needed flops"]["without the head's second logits"] <= 1.05
    assert committed["peers"] == {
        name: {**vars(peer), "names": list(peer.names)} for name, peer in launches.PEERS.items()
    }


def test_packed_rows_are_counted_on_the_librarys_own_calls(launches, committed):
    model = "Qwen2.5-0.5B"
    entry = committed["models"][model]
    sizes = (launches.ROLLOUTS, launches.PROMPT, launches.RESPONSE)
    for name, shared in launches.PACKED.items():
        counts = launches.packed_counts(model, *sizes, shared)
        assert entry["packed decoder"][name] == launches.row(counts, launches.TOKENS)
    alone, once = (entry["packed decoder"][name]["flops a token"] for name in launches.PACKED)
    assert alone == entry["decoder"]["flops a token"]
    assert 0.75 < once / alone < 0.85


DECODING = {
    "bfloat16, weights in float32": 17,
    "bfloat16, weights in bfloat16": 13,
    "bfloat16, LoRA": 21,
    "float32": 17,
    "float32, frozen": 13,
}
"""Launches of a layer in a decoding step of the embedded engine."""
NARROW = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}


@pytest.fixture
def decoding(root, monkeypatch):
    """The script that counts a decoding step, imported."""
    monkeypatch.syspath_prepend(root / "scripts/benchmarks")
    return __import__("decode_launches")


@pytest.fixture
def decoding_committed(root):
    return json.loads((root / "scripts/benchmarks/decode_launches.json").read_text())["step"]


@pytest.mark.parametrize("case", DECODING)
def test_a_layer_of_a_decoding_step_has_as_many_launches_as_committed(case, decoding, decoding_committed, monkeypatch):
    """Of narrow layers, which have the operations of wide ones; what is outside of layers is counted by one layer."""
    from rlvr.rollout import decoder

    monkeypatch.setattr(decoder, "COPIED", 0)  # as if they were wide: the copies of a real model are above it
    monkeypatch.setattr(decoding, "ROWS", 8)
    one, two = (
        decoding.step_of(decoding.CASES[case], decoding.SHAPE | NARROW | {"num_hidden_layers": layers})
        for layers in (1, 2)
    )
    assert two["launches"] - one["launches"] == DECODING[case]
    committed = decoding_committed["after"][case]
    layers = decoding.SHAPE["num_hidden_layers"]
    assert committed["launches_a_layer"] == DECODING[case] == sum(committed["a_layer"].values())
    assert committed["launches"] == one["launches"] + (layers - 1) * DECODING[case]
    assert committed["copies_to_host"] == one["copies_to_host"] == two["copies_to_host"] == 1


def test_bfloat16_decodes_in_a_third_of_the_launches_before(decoding_committed):
    before, after = (decoding_committed[side] for side in ("before", "after"))
    for case in DECODING:
        if case.startswith("bfloat16"):
            assert after[case]["launches"] <= before[case]["launches"] / 3, case


def test_one_more_launch_in_a_layer_is_seen(decoding, monkeypatch):
    """The count fails where a layer gets an operation."""
    from rlvr.rollout import decoder

    monkeypatch.setattr(decoding, "ROWS", 8)
    case = decoding.CASES["bfloat16, weights in bfloat16"]
    call = decoder.DecoderBlock.__call__
    monkeypatch.setattr(decoder.DecoderBlock, "__call__", lambda self, *given: call(self, *given) + 0)
    one, two = (decoding.step_of(case, decoding.SHAPE | NARROW | {"num_hidden_layers": layers}) for layers in (1, 2))
    assert two["launches"] - one["launches"] == DECODING["bfloat16, weights in bfloat16"] + 1


def test_a_sum_out_of_place_is_counted_with_the_copy_of_its_matrix(decoding):
    """torch copies a matrix to the result first; a vector is added by the product, and in place nothing is copied."""
    with decoding.FakeTensorMode(), decoding.Counter() as counter:
        matrix, x, weight = torch.empty(3, 5), torch.empty(3, 4), torch.empty(4, 5)
        counter.launches.clear()
        torch.addmm(matrix, x, weight)
        torch.addmm(matrix[0], x, weight)
        matrix.addmm_(x, weight)
    assert counter.launches == {"aten::addmm": 2, "aten::addmm_": 1, "aten::copy_": 1}


@pytest.fixture
def packed(root, monkeypatch):
    """The script that counts long packed rows, imported; it takes the head's counts from `launches`."""
    pytest.importorskip("triton", reason=NO_TRITON)
    monkeypatch.syspath_prepend(root / "scripts/benchmarks")
    return __import__("packed_flops")


@pytest.fixture
def packed_committed(root):
    return json.loads((root / "scripts/benchmarks/packed_flops.json").read_text())


def test_the_needed_flops_of_a_long_row_are_those_of_a_hand(packed_committed):
    """Qwen2.5-0.5B, 65,536 tokens, a prompt of 2,048 and eight responses."""
    found = packed_committed["models"]["Qwen2.5-0.5B"]["65,536: 8 rollouts, prompt once"]
    hidden, inner, of_keys, layers, vocabulary = 896, 4864, 128, 24, 151_936
    prompt, response, responses = 2048, 7936, 8
    tokens = prompt + responses * response
    layer = 2 * hidden**2 + 2 * hidden * of_keys + 3 * hidden * inner + hidden + 2 * of_keys + 2 * hidden
    weights = layers * layer + hidden
    pairs = prompt * (prompt + 1) // 2 + responses * (response * (response + 1) // 2 + response * prompt)
    attention = 12 * hidden * pairs * layers
    head = 6 * vocabulary * hidden * responses * response
    flops = found["flops a token"]
    assert found["tokens"] == tokens == 65_536 and found["trained"] == responses * response
    assert flops["of it attention"] == pytest.approx(attention / tokens, rel=1e-6)
    assert flops["needed"] == pytest.approx((6 * weights * tokens + attention + head) / tokens, rel=1e-6)
    # Flash attention has one product more in its backward pass, the head its logits.
    assert flops["of it scores again"] == pytest.approx(attention / 6 / tokens, rel=1e-6)
    assert flops["of it logits again"] == pytest.approx(head / 3 / tokens, rel=1e-6)


def test_nothing_else_of_a_packed_row_is_executed_beyond_the_needed_flops(packed_committed):
    for model, rows in packed_committed["models"].items():
        for name, found in rows.items():
            over = found["executed over needed"]
            assert 0.98 < over["without what is computed again"] <= 1.005, (model, name)


def test_pairs_of_a_call_are_those_of_a_loop(packed):
    from rlvr.policy.attention import Spans

    spans = Spans(np.asarray([3, 2, 4]), np.asarray([-1, 0, 0]), torch.device("cpu"))
    own, prefix = spans.segments(None)
    assert packed.computed_pairs(own) == sum(q + 1 for run in (3, 2, 4) for q in range(run))
    assert packed.computed_pairs(prefix) == 3 * (2 + 4)


def test_kernels_over_many_tensors_are_filled_by_tensors_or_by_blocks(packed):
    chunk, blocks = packed.CHUNK, packed.BLOCKS
    assert packed.multi_tensor_launches([1] * 110, 1) == 1
    assert packed.multi_tensor_launches([1] * 111, 1) == 2
    assert packed.multi_tensor_launches([1] * 37, 4) == 2
    assert packed.multi_tensor_launches([chunk * blocks], 4) == 1
    assert packed.multi_tensor_launches([chunk * blocks + 1, 1], 4) == 2


@pytest.mark.gate
def test_the_committed_counts_of_a_long_row_are_those_of_the_code(packed, packed_committed):
    name = "16,384: 2 rollouts, prompt once"
    found = packed.counted_row("Qwen2.5-0.5B", *packed.ROWS[name])
    assert found == packed_committed["models"]["Qwen2.5-0.5B"][name]
    assert packed.optimizer_step("Qwen2.5-0.5B") == packed_committed["optimizer step"]["Qwen2.5-0.5B"]
