"""The order of reduction changes bits and nothing else."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from configs.common.differences import row_differences
from engine.correctness.answers import CACHED_STEPS, MAX_LOGIT_BYTES, Rows, kept_positions
from engine.correctness.noise import converted
from engine.correctness.reordered import Reordered
from tests.support.answers.correctness_runs import made_case, random_model
from tests.support.answers.encoder_runs import bert_case, bert_model, t5_model

pytestmark = pytest.mark.usefixtures("one_thread")


def close(one: torch.Tensor, two: torch.Tensor) -> None:
    """Equal within rounding, but not in every bit."""
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert not torch.equal(one, two)


@pytest.mark.parametrize("rounded_scores", [False, True])
@pytest.mark.parametrize("case", ["linear", "matmul", "addmm", "layer norm", "rms norm", "mean", "attention"])
def test_every_reduction_is_reordered(case: str, rounded_scores: bool) -> None:
    random = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 4, 9, 64, generator=random), torch.randn(64, 64, generator=random)
    bias = torch.randn(64, generator=random)
    compute = {
        "linear": lambda: functional.linear(x, w, bias),
        "matmul": lambda: x @ w,
        "addmm": lambda: torch.addmm(bias, x[0, 0], w),
        "layer norm": lambda: functional.layer_norm(x, (64,), w[0], bias),
        "rms norm": lambda: functional.rms_norm(x, (64,), w[0], 1e-6),
        "mean": lambda: x.pow(2).mean(-1, keepdim=True),
        "attention": lambda: functional.scaled_dot_product_attention(
            x, x[:, :2], x[:, 2:], is_causal=True, enable_gqa=True
        ),
    }[case]
    with torch.inference_mode():
        plain = compute()
        with Reordered(1, rounded_scores):
            close(plain, compute())


def test_a_mask_is_reordered_with_its_keys() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 9, 16, generator=random)
    mask = torch.rand(1, 1, 9, 9, generator=random) > 0.5
    mask |= torch.eye(9, dtype=torch.bool)
    plain = functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    for rounded_scores in (False, True):
        with Reordered(2, rounded_scores):
            close(plain, functional.scaled_dot_product_attention(x, x, x, attn_mask=mask))


def test_an_order_is_the_same_for_the_same_seed_only() -> None:
    layer, x = nn.Linear(64, 64), torch.randn(3, 64, generator=torch.Generator().manual_seed(0))

    def result(seed: int) -> torch.Tensor:
        with torch.no_grad(), Reordered(seed, rounded_scores=False):
            return layer(x)

    assert torch.equal(result(1), result(1)) and not torch.equal(result(1), result(2))


def test_partial_sums_are_rounded_to_the_dtype() -> None:
    """1 + 2^-9 - 1 is 2^-9 in float32; where 1 and 2^-9 meet in one bfloat16 sum, the small part is lost."""
    x, w = torch.ones(1, 3, dtype=torch.bfloat16), torch.tensor([[1.0, 2.0**-9, -1.0]], dtype=torch.bfloat16)
    found = set()
    for seed in range(20):
        with Reordered(seed, rounded_scores=False):
            found.add(float(functional.linear(x, w)))
    assert found == {0.0, 2.0**-9}


def test_a_model_in_16_bits_keeps_its_tables_and_its_tied_head() -> None:
    model = random_model("llama", seed=0)
    model.lm_head.weight = model.get_input_embeddings().weight
    twin = converted(model, "bfloat16")
    assert {parameter.dtype for parameter in twin.parameters()} == {torch.bfloat16}
    assert twin.lm_head.weight is twin.get_input_embeddings().weight
    assert model.lm_head.weight.dtype == torch.float32 and converted(model, "float32") is model
    tables = dict(twin.named_buffers())
    assert tables and all(table.dtype == torch.float32 for table in tables.values())


def test_noise_has_the_size_of_its_dtype_and_every_order_its_own() -> None:
    noise = made_case("llama", seed=11).noise
    levels = {dtype: [np.mean([rms[order].mean() for rms in found.rms.values()]) for order in range(4)]
              for dtype, found in noise.items()}  # fmt: skip
    assert len(set(levels["float32"])) == 4 and min(levels["float32"]) > 0
    ratio = np.mean(levels["bfloat16"]) / np.mean(levels["float32"])
    assert 2**13 < ratio < 2**19  # 16 bits of mantissa fewer


def test_kept_rows_fit_and_hold_both_ends() -> None:
    for vocabulary, prompts in ((97, 5), (32000, 20), (151936, 20), (151936, 500), (20_000_000, 1)):
        rows = Rows.of(vocabulary, prompts)
        kept = min(prompts, rows.prompts) * (rows.prefilled + rows.cached)
        assert 4 * kept * vocabulary <= MAX_LOGIT_BYTES or kept == rows.prefilled + rows.cached == 2
        assert 1 <= rows.cached <= CACHED_STEPS
        for length in (1, 5, 64, 4096):
            positions = kept_positions(length, rows)
            assert positions == sorted(set(positions)) and positions[-1] == length - 1
            assert len(positions) <= max(rows.prefilled, 1) and set(range(length - rows.cached, length)) - {-1} <= {
                *positions,
                *range(-rows.cached, 0),
            }


def test_differences_of_rows() -> None:
    base = np.log(np.array([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]], dtype=np.float64))
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]])) + 7.0
    found = row_differences(base, other)
    assert found.kl == pytest.approx([0.25 * np.log(2), 0.0], abs=1e-15)
    # Centred: +-log 2 and 0, whatever constant is added.
    assert found.largest == pytest.approx([np.log(2), 0.0], abs=1e-12)
    assert found.rms == pytest.approx([np.log(2) * np.sqrt(2 / 3), 0.0], abs=1e-12)
    assert found.columns == pytest.approx(np.array([1, 1, 0]) * np.log(2) ** 2 / 2, abs=1e-12)
    tiny = row_differences(base, base + np.array([[1e-9, -1e-9, 0.0], [0.0, 0.0, 0.0]]))
    # Second order: half the variance of the change under p; far below what log-probabilities could resolve.
    change, p = np.array([1e-9, -1e-9, 0.0]), np.array([0.5, 0.25, 0.25])
    assert tiny.kl[0] == pytest.approx((p @ change**2 - (p @ change) ** 2) / 2, rel=1e-6)
    wrong = row_differences(base, np.full_like(base, np.nan))
    assert np.isnan(wrong.rms).all() and np.isnan(wrong.kl).all()


@pytest.mark.parametrize("rounded_scores", [False, True])
def test_a_bias_is_reordered_with_its_keys(rounded_scores: bool) -> None:
    """T5 adds to its scores and does not scale them."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 9, 16, generator=random)
    bias = torch.randn(1, 2, 9, 9, generator=random)
    plain = functional.scaled_dot_product_attention(x, x, x, attn_mask=bias, scale=1.0)
    with Reordered(1, rounded_scores):
        close(plain, functional.scaled_dot_product_attention(x, x, x, attn_mask=bias, scale=1.0))


def reductions(layer: nn.Module, *inputs: torch.Tensor) -> set[str]:
    """What a layer of transformers asks torch to reduce, of all that is put into another order."""
    seen: set[str] = set()

    class Watched(Reordered):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in self._changed:
                seen.add(func.__name__)
            return super().__torch_function__(func, types, args, kwargs)

    with torch.inference_mode(), Watched(1, rounded_scores=False):
        layer(*inputs)
    return seen


@pytest.mark.parametrize(
    ("attention", "by"), [("sdpa", {"scaled_dot_product_attention"}), ("eager", {"matmul"})], ids=["sdpa", "eager"]
)
def test_what_encoders_reduce_is_put_into_another_order(attention: str, by: set[str]) -> None:
    """Norms, products and attention of BERT and of T5 go through the functions that are changed."""
    ids = torch.arange(3, 12)[None]
    for model, norm in ((bert_model(1), "layer_norm"), (t5_model(1).encoder, "mean")):
        model.set_attn_implementation(attention)
        assert reductions(model, ids) == {"linear", norm, *by}


def test_noise_of_an_encoder_has_the_size_of_its_dtype() -> None:
    noise = bert_case(1).noise
    levels = {dtype: found.state_rms.mean(1) for dtype, found in noise.items() if found is not None}
    assert len(set(levels["float32"].tolist())) == 4 and levels["float32"].min() > 0
    assert 2**13 < levels["bfloat16"].mean() / levels["float32"].mean() < 2**19
    cosines = {dtype: found.vector_cosine.mean() for dtype, found in noise.items() if found is not None}
    assert 0 < cosines["float32"] < 1e-12 and 1e-7 < cosines["bfloat16"] < 1e-3
