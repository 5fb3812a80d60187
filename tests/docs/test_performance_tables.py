"""The tables of docs/performance.md are those of the committed results in scripts/benchmarks."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

WITHOUT_LOGITS = "without the head's second logits"
MODELS = ("Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen3-30B-A3B")


@pytest.fixture(scope="module")
def page(root):
    """The lines of each table of the page, by its head; cells without spaces around them."""
    found: dict[str, list[list[str]]] = {}
    head = None
    for line in (root / "docs/performance.md").read_text().splitlines():
        if not line.startswith("|"):
            head = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if head is None:
            head = " | ".join(cells)
            assert head not in found, f"two tables begin with {head}"
            found[head] = []
        elif set(line) != {"|", "-"}:
            found[head].append(cells)
    return found


@pytest.fixture(scope="module")
def committed(root):
    """`committed(name)`: a result of scripts/benchmarks."""
    return lambda name: json.loads((root / f"scripts/benchmarks/{name}.json").read_text())


def rows_of(page, beginning):
    (found,) = [rows for head, rows in page.items() if head.startswith(beginning)]
    return found


BY_WORDS = (
    "device, type | kernel",
    "setting | what it saves | what it costs",
    "parts | families",
)
COMPARED = (
    "workload | ours s/step",
    "workload | side",
    "what doubles",
    "launches · GiB read and written",
    "way | s: 2,048 tokens",
    "head | tiles",
    "launches · MB a token · GFLOP a token",
    "packed row | ",
    "optimizer step",
    "computed in, weights in",
    "model | launches before | after",
    "metrics | monitors of health",
    "estimator | ms",
)


def test_every_table_is_compared_or_has_no_committed_numbers(page):
    assert [head for head in page if not head.startswith((*BY_WORDS, *COMPARED))] == []
    for beginning in (*BY_WORDS, *COMPARED):
        rows_of(page, beginning)


@pytest.mark.parametrize("name", ["speed", "growth"])
def test_measured_steps(name, page, root):
    """speed.md and growth.md are the tables of the JSON (test_speed_results.py)."""
    lines = (root / f"scripts/benchmarks/{name}.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    beginnings = {"speed": ("workload | ours s/step", "workload | side"), "growth": ("what doubles",)}[name]
    want = [row for row in cells if row[0] not in ("workload", "what doubles") and set("".join(row)) != {"-"}]
    assert [row for beginning in beginnings for row in rows_of(page, beginning)] == want


def test_attention_of_a_layer(page, committed):
    layers = committed("attention_launches")["layers"]

    def cells(model: str, note: str = "") -> Iterator[str]:
        for tokens in ("16384", "65536"):
            for kind in ("full attention", "window"):
                both = layers[model][tokens][kind + note].values()
                launches, size = (sum(one[key] for one in both) for key in ("launches", "bytes"))
                yield f"{launches:,} · {size / 2**30:.0f}"

    rows = {row[0]: row[1:] for row in rows_of(page, "launches · GiB read and written")}
    assert rows.pop("Gemma-2-9B, tiles of 512 x 512 before (8e63e8fa)")[2:] == ["not counted"] * 2
    assert rows == {
        "Gemma-2-9B, tiles now": list(cells("Gemma-2-9B")),
        "Gemma-2-9B, flash attention (as `flash-attn` 2, cap in the kernel)": list(
            cells("Gemma-2-9B", ", cap in the kernel")
        ),
        "gpt-oss-20b, flash attention and sinks": list(cells("gpt-oss-20b")),
    }


def test_the_fused_head(page, committed):
    result = committed("fused_head")
    seconds = result["cpu seconds"]
    peaks = {(one["way"], one["V"]): one["MiB"] for one in result["peak MiB"] if (one["T"], one["H"]) == (8192, 64)}
    rows = rows_of(page, "way | s: 2,048 tokens")
    names = {"all logits at once": "whole", "chunks computed again": "checkpointed", "fused": "fused"}
    assert [row[0] for row in rows] == list(names)
    for row in rows:
        way = names[row[0]]
        assert row[1:3] == [f"{seconds['W1'][way]:.5f}", f"{seconds['W4'][way]:.3g}"]
        for cell, vocabulary in zip(row[3:], (32_000, 64_000, 152_000), strict=True):
            peak = peaks.get((way, vocabulary))
            assert cell == ("" if peak is None else f"{peak:,.1f}" if peak < 100 else f"{peak:,.0f}")


def test_launches_of_the_head(page, committed):
    names = {
        "before": "rlvr before: torch, 2,048 x 2,048",
        "without triton": "rlvr without triton: 2,048 x 16,384",
        "with triton": "rlvr",
    }
    for entry in committed("launches")["models"].values():
        ways = entry["head of 16,384 trained tokens"]
        want = []
        for shown, name in names.items():
            forward, backward = ways[name]["forward"], ways[name]["backward"]
            a_tile = [f"{one['a tile']:.2f}" for one in (forward, backward)]
            whole = [f"{one['launches']:,}" for one in (forward, backward)]
            want.append([shown, str(ways[name]["tiles"]), *a_tile, *whole])
        assert rows_of(page, "head | tiles") == want


def test_launches_bytes_and_flops_of_an_update(page, committed):
    models = committed("launches")["models"]
    names = {
        "rlvr, padded rows": "rlvr",
        "rlvr, packed row": "rlvr, packed",
        "rlvr, packed row, prompt computed once": "rlvr, packed, prompts shared",
        "rlvr without triton": "rlvr without triton: 2,048 x 16,384",
        "rlvr before (2,048 x 2,048, no kernels)": "rlvr before: torch, 2,048 x 2,048",
        "TRL, `selective_log_softmax`": "TRL",
        "TRL, `use_liger_kernel`": "TRL, Liger loss",
        "verl, `use_fused_kernels`, torch": "verl, fused kernels in torch",
        "prime-rl": "prime-rl",
    }

    def cell(model: str, name: str) -> str:
        whole = models[model]["update"][name]
        passes = models[model]["heads"]["rlvr" if "packed" in name else name].values()
        launches, size = (sum(one[key] for one in passes) for key in ("launches", "bytes a token"))
        return (
            f"{whole['launches']:,} ({launches:,}) · {whole['bytes a token'] / 1e6:.1f} ({size / 1e6:.1f}) · "
            f"{whole['flops a token'] / 1e9:.2f}"
        )

    rows = {row[0]: row[1:] for row in rows_of(page, "launches · MB a token · GFLOP a token")}
    for shown, name in names.items():
        assert rows.pop(shown) == [cell(model, name) for model in MODELS], shown
    decoders = [models[model]["decoder"] for model in MODELS]
    assert rows.pop("decoder, stock, flash attention") == [
        f"{one['launches']:,} · {one['bytes a token'] / 1e6:.1f} · {one['flops a token'] / 1e9:.2f}" for one in decoders
    ]
    over = [models[model]["executed over needed flops"] for model in MODELS]
    assert rows.pop("needed FLOPs, as MFU counts them") == [f"{one['needed flops a token'] / 1e9:.2f}" for one in over]
    assert rows.pop("rlvr: executed over needed, without the head's second logits; with them") == [
        f"{one[WITHOUT_LOGITS]:.3f}; {one['all']:.3f}" for one in over
    ]
    assert list(rows) == ["Liger's layers (`model.fused_layers`)"]
    assert rows.popitem()[1] == ["not counted"] * 3


def test_packed_rows_of_long_rollouts(page, committed):
    result = committed("packed_flops")
    rows = rows_of(page, "packed row | ")
    want = []
    for name in result["rows"]:
        for model in MODELS:
            one = result["models"][model][name]
            flops, over = one["flops a token"], one["executed over needed"]
            want.append(
                [
                    name,
                    model,
                    f"{one['launches']:,}",
                    f"{one['bytes a token'] / 1e6:.1f}",
                    f"{flops['needed'] / 1e9:.2f}",
                    f"{flops['of it attention'] / flops['needed']:.2f}",
                    f"{over['all']:.3f}",
                    f"{over[WITHOUT_LOGITS]:.3f}",
                    f"{over['without what is computed again']:.3f}",
                ]
            )
    assert rows == want


def test_the_optimizer_step(page, committed):
    steps = committed("packed_flops")["optimizer step"]
    want = []
    for model in MODELS:
        one = steps[model]
        parts = [f"{count:,}" for count in one["launches"].values()]
        a_weight = sum(one["bytes a weight"].values())
        want.append([model, *parts, f"{a_weight}", f"{a_weight * one['weights'] / 1e9:.0f}"])
    assert rows_of(page, "optimizer step") == want


def test_a_decoding_step(page, committed):
    before, after = (committed("decode_launches")["step"][side] for side in ("before", "after"))
    cases = {
        "bfloat16, float32": "bfloat16, weights in float32",
        "bfloat16, bfloat16": "bfloat16, weights in bfloat16",
        "bfloat16, LoRA of rank 16 on all linear layers, base in bfloat16": "bfloat16, LoRA",
        "float32, float32, trained": "float32",
        "float32, float32, frozen": "float32, frozen",
    }
    assert rows_of(page, "computed in, weights in") == [
        [shown, *figures_of_a_step(before[case], after[case])] for shown, case in cases.items()
    ]
    families = {"Gemma-2-9B, 42 layers": "Gemma-2-9B", "Qwen3-30B-A3B, 48 layers": "Qwen3-30B-A3B"}
    assert rows_of(page, "model | launches before") == [
        [shown, *figures_of_a_step(before[case], after[case])] for shown, case in families.items()
    ]


def figures_of_a_step(before, after):
    """Cells of a decoding step's row, of two results."""
    row = [*(f"{one['launches']:,.0f}" for one in (before, after)), f"{after['launches'] / before['launches']:.2f}"]
    for key in ("launches_a_layer", "copies_to_host", "mib_cast_from_float32"):
        row += [f"{one[key]:,.0f}" for one in (before, after)]
    return row


def test_monitors(page, committed):
    cpu = committed("monitoring")["pieces_cpu_ms"]
    names = ("metrics", "health", "console", "metrics.jsonl", "rollouts handed over")
    assert rows_of(page, "metrics | monitors of health") == [[f"{cpu[name]:.1f}" for name in names]]


def test_advantages(page, committed):
    times = committed("advantages")["milliseconds"]
    rows = rows_of(page, "estimator | ms")
    for place, kind in ((0, "advantage"), (2, "modifier")):
        shown = [row[place : place + 2] for row in rows if row[place]]
        assert shown == [
            [f"`{name}`", f"{ms:.0f}" if ms >= 1 else f"{ms:.1f}"] for name, ms in sorted(times[kind].items())
        ]
