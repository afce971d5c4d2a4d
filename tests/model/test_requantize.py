"""8-bit weights of a converted GGUF become INT8 in groups of 128, everything else stays bit for bit."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.engine.selftest import Chain, segment
from swarm.model.convert import convert
from swarm.model.grouping import weight_group, weights_of_graph
from swarm.model.requantize import group_of, int8_symmetric, requantize
from swarm.protocol.messages import RowKind
from swarm.protocol.tensors import Array
from tests.engine.chains import published
from tests.model.gguf_files import F16, Q4_0, Q4_1, Q4_K, Q6_K, Q8_0, tiny_llama

MATRICES = 2 * 7 + 1
"""Of the tiny model: seven in each layer, and one that embedding and head share."""

PROMPT = list(range(3, 43))


def converted(code: int, directory: Path, *, as_written: bool = False) -> Path:
    directory.mkdir(exist_ok=True)
    file = directory / "tiny.gguf"
    file.write_bytes(tiny_llama(code))
    target = directory / ("as-written" if as_written else "ir")
    convert(file, target, as_written)
    return target


def matrices(ir: Path) -> list[tuple[str, int]]:
    """Type and size of a group of each; for those without groups, of a row."""
    found = []
    for node in ov.Core().read_model(ir / "openvino_model.xml").get_ops():
        if node.get_type_name() == "Constant":
            shape = node.get_output_shape(0)
            # The last axis of scales and zero points is 1.
            if np.prod(shape) >= 256 * 256 and shape[-1] > 1:
                found.append((node.get_output_element_type(0).get_type_name(), shape[-1]))
    return found


def logits_of(ir: Path, root: Path) -> Array:
    """Of every row of the prompt."""
    chain = published(ir, root).whole(256)
    return chain.run([segment(1, 0, PROMPT, len(PROMPT))])[1]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 40), st.integers(0, 2**32 - 1), st.floats(-6, 4))
def test_int8_is_within_half_a_step(rows: int, groups: int, group: int, seed: int, magnitude: float) -> None:
    weight = (np.random.default_rng(seed).normal(0, 1, (rows, groups * group)) * 10**magnitude).astype(np.float32)
    values, scale = int8_symmetric(weight, group)
    assert (str(values.dtype), values.shape) == ("int8", (rows, groups, group))
    assert (str(scale.dtype), scale.shape) == ("float16", (rows, groups, 1))
    # The scale itself is rounded: to 11 bits, and to multiples of 6e-8 where it is very small.
    step = scale.astype(np.float32)
    slack = np.maximum(127 * step * 2**-11, 127 * 6e-8)
    assert (np.abs(values * step - weight.reshape(values.shape)) <= step * 0.501 + slack).all()


def test_a_group_of_zeros_stays_zero() -> None:
    values, scale = int8_symmetric(np.zeros((2, 32), np.float32), 32)
    assert not (values * scale).any()
    assert np.isfinite(scale).all()


def test_groups_divide_the_row() -> None:
    assert [group_of(columns) for columns in (8960, 576, 96, 100)] == [128, 64, 32, 100]


@pytest.mark.parametrize("code", [Q6_K, Q8_0])
def test_eight_bit_weights_are_rewritten(code: int, tmp_path: Path) -> None:
    before, after = converted(code, tmp_path, as_written=True), converted(code, tmp_path)
    assert matrices(before) == [("u8", 16 if code == Q6_K else 32)] * MATRICES
    assert matrices(after) == [("i8", 128)] * MATRICES
    assert json.loads((after / "config.json").read_text(encoding="utf-8"))["weights_rewritten_int8"] == MATRICES
    first, second = logits_of(before, tmp_path / "before"), logits_of(after, tmp_path / "after")
    assert np.corrcoef(first.ravel(), second.ravel())[0, 1] > 0.999


@pytest.mark.parametrize("code", [F16, Q4_0, Q4_1, Q4_K])
def test_other_weights_stay_bit_for_bit(code: int, tmp_path: Path) -> None:
    before, after = converted(code, tmp_path, as_written=True), converted(code, tmp_path)
    assert requantize(before, tmp_path / "nothing") == 0
    assert not (tmp_path / "nothing").exists()
    for name in ("openvino_model.bin", "config.json"):
        assert (before / name).read_bytes() == (after / name).read_bytes()


def test_the_same_file_gives_the_same_bytes(tmp_path: Path) -> None:
    source = converted(Q6_K, tmp_path, as_written=True)
    digests = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        assert requantize(source, tmp_path / name) == MATRICES
        files = sorted((tmp_path / name).iterdir())
        digests.append([hashlib.sha256(file.read_bytes()).hexdigest() for file in files])
    assert digests[0] == digests[1]


@pytest.mark.parametrize("code", [Q4_0, Q4_1, Q4_K, Q6_K, Q8_0])
def test_no_group_of_weights_is_smaller_than_one_of_activations(code: int, tmp_path: Path) -> None:
    """Where one is, the plugin leaves out the quantization of activations, and a token takes twice as long."""
    ir = converted(code, tmp_path)
    smallest = min(group for _, group in matrices(ir))
    assert smallest >= weight_group(weights_of_graph(ov.Core().read_model(ir / "openvino_model.xml")))


@pytest.mark.large
def test_a_real_model(qwen_ir: Path) -> None:
    assert json.loads((qwen_ir / "config.json").read_text(encoding="utf-8"))["weights_rewritten_int8"] == 29
    assert Counter(matrices(qwen_ir)) == {("u4", 32): 169, ("i8", 128): 29}


@pytest.mark.parametrize("code", [Q4_K, Q6_K])
def test_a_chain_equals_the_whole_bit_for_bit(code: int, tmp_path: Path) -> None:
    model = published(converted(code, tmp_path), tmp_path / "store")
    whole, chain = model.whole(256), model.chain([1], 256)
    tokens, expected = whole.decode(1, PROMPT, 24)
    np.testing.assert_array_equal(chain.decode(1, PROMPT, 24)[1], expected)
    assert_same_in_windows(chain, tokens, expected)


def assert_same_in_windows(chain: Chain, tokens: list[int], expected: Array) -> None:
    """Rejected rows first, then the right ones, in one verify window and beside another session."""
    start = len(PROMPT)
    chain.run([segment(1, start, [5, 6, 7, 8], 4, RowKind.DECODE)])
    window = segment(1, start, tokens[:6], 6, RowKind.DECODE)
    _, logits = chain.run([window, segment(2, 0, PROMPT)])
    np.testing.assert_array_equal(logits[:6], expected[1:7])
    np.testing.assert_array_equal(logits[6], expected[0])
