"""The codec's benchmark: its figures follow from what it measured, and wrong bits stop it."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmarks import codec, compare_bound, packings, roundtrip, torch_codec
from benchmarks.workloads import WORKLOADS, Changes, changes, uniform
from vllm_sparse_refit.codec.delta import TensorDelta

ELEMENTS = 300_000
KEYS = {
    "workload",
    "bits_per_changed",
    "bound_bits_per_changed",
    "ratio_to_bound",
    "u16_xor_zstd1_bits",
    "u16_xor_zstd1_ratio",
    "encode_gbps",
    "compare_bound_gbps",
    "encode_vs_bound",
    "torch_encode_gbps",
    "encode_vs_torch",
    "decode_gbps",
    "decode_peak_bytes",
    "encode_peak_bytes",
    "payload_bytes",
    "decoded_bytes",
    "chunk_bytes",
    "dense_bytes",
}


def test_the_last_line_is_an_object_with_every_figure(capfd: pytest.CaptureFixture[str]) -> None:
    names = ["rl-1e-5", "none"]
    status = codec.main(["--json", "--elements", str(ELEMENTS), "--runs", "1", *names])

    assert status == 0
    rl, none = json.loads(capfd.readouterr().out.splitlines()[-1])["workloads"]
    assert [rl["workload"], none["workload"]] == names
    assert rl.keys() >= KEYS
    assert none.keys() >= KEYS
    assert rl["elements"] >= ELEMENTS
    assert rl["bits_per_changed"] == rl["payload_bytes"] * 8 / rl["changed_elements"]
    assert rl["ratio_to_bound"] == rl["bits_per_changed"] / rl["bound_bits_per_changed"]
    assert rl["decode_peak_bytes"] > 0
    assert none["payload_bytes"] == 0
    undefined = ("bits_per_changed", "ratio_to_bound", "u16_xor_zstd1_bits", "decode_gbps")
    assert [none[key] for key in undefined] == [None] * len(undefined)


def test_wrong_bits_stop_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forget(delta: TensorDelta, bits: torch.Tensor) -> None:
        pass

    monkeypatch.setattr(roundtrip, "apply_delta", forget)

    assert codec.main(["--elements", str(ELEMENTS), "--runs", "1", "uniform-0.01"]) == 1
    assert "are not the new ones" in capsys.readouterr().err


def test_the_plain_codec_gives_back_what_it_got() -> None:
    pairs = uniform(0.1, ELEMENTS)
    encoded = torch_codec.encode(pairs, 1)
    copies = roundtrip.copies_of_old(pairs)
    with pytest.raises(roundtrip.WrongBitsError):
        roundtrip.check_equal_to_new(pairs, copies)

    torch_codec.decode_into(encoded, list(copies.values()))

    roundtrip.check_equal_to_new(pairs, copies)


@pytest.mark.parametrize("name", compare_bound.WAYS)
@pytest.mark.parametrize("size", [1 << 20, 12345])
def test_every_compare_sees_one_flipped_bit(name: str, size: int) -> None:
    array = np.arange(size, dtype=np.uint8)
    copy = array.copy()
    assert compare_bound.WAYS[name](array, copy)

    copy[-1] ^= 1

    assert not compare_bound.WAYS[name](array, copy)


def test_changes_have_the_density_that_the_workload_is_named_for() -> None:
    pairs = WORKLOADS["uniform-0.1"](ELEMENTS)
    share = changes(pairs).count / sum(pair.old.numel() for pair in pairs)
    assert share == pytest.approx(0.1, rel=0.02)
    assert changes(WORKLOADS["none"](ELEMENTS)).count == 0


def test_entropies() -> None:
    assert packings.entropy(np.array([3, 3, 3], np.uint8)) == 0
    assert packings.entropy(np.array([0, 1, 2, 9], np.uint16)) == 2
    # Of exponent 0 half the elements change, of exponent 1 all do, by one step up or down.
    old = np.array([0, 0, 1 << 7, 1 << 7], np.uint16)
    changed = Changes(np.ones(4, np.uint32), old, old + np.array([1, 1, 1, -1]).astype(np.uint16))
    places, values = packings.entropy_given_exponent(
        changed, np.array([0, 0, 0, 0, 1, 1], np.uint8)
    )
    assert (places, values) == (4 / 4, 2 / 4)


def test_packings_are_as_long_as_their_codes() -> None:
    changed = Changes(
        gaps=np.array([1, 255, 256, 511], np.uint32),
        old=np.zeros(4, np.uint16),
        new=np.array([1, 0xFFFF, 8, 9], np.uint16),  # +1, -1, +8, +9: codes 1, 0, 15, 17
    )
    gaps, nibbles, low, high = packings.byte_gaps_nibble_zigzag(changed)
    assert list(gaps.data) == [0, 254, 255, 0, 255, 255, 0]
    assert list(nibbles.data) == [0x01, 0xFF]
    assert (list(low.data), list(high.data)) == ([0, 2], [0, 0])


def test_peak_memory_counts_touched_pages_only() -> None:
    size = 64 << 20
    script = f"""
import numpy as np
from benchmarks.memory import PeakMemory
peak = PeakMemory()
array = np.empty({size}, np.uint8)
print(peak.extra_bytes())
array[:] = 1
del array
print(peak.extra_bytes())
"""
    out = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True).stdout
    untouched, touched = map(int, out.split())
    assert untouched < 1 << 20
    assert touched == pytest.approx(size, abs=1 << 20)
