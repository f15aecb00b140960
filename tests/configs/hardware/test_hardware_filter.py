"""The grammar of --hardware-filter over the shipped catalog."""

import re
from pathlib import Path

import pytest

from configs.hardware.catalog import catalog
from configs.hardware.hardware_filter import _GENERATIONS, matching, parse_filter

ROOT = Path(__file__).parents[3]


def names(text: str) -> list[str]:
    return [offered.name for offered in matching(parse_filter(text), catalog())]


def test_a_kind_or_newer() -> None:
    alike, newer = set(names("GPU:T4")), set(names("GPU:T4+"))
    assert "aws/g4dn.xlarge" in alike and "gcp/n1-standard-4+t4" in alike and "aws/g5.xlarge" not in alike
    assert alike < newer and "aws/p5.48xlarge" in newer
    assert not any("p3." in name for name in newer)  # V100, a generation before
    assert not any(name.startswith("aws/c7i") for name in newer)


def test_generations_of_two_makers_are_not_compared() -> None:
    machines = {offered.machine.accelerator.name for offered in matching(parse_filter("GPU:V100+"), catalog())}
    assert machines and not any(name.startswith("mi") for name in machines)


def test_bounds_hold_together_and_the_cheapest_comes_first() -> None:
    found = matching(parse_filter("GPU, provider=aws, count>=4, memory>=20, price<=10"), catalog())
    prices = [offered.machine.usd_per_hour for offered in found]
    assert found and all(price is not None and price <= 10 for price in prices)
    assert prices == sorted(prices, key=lambda price: price or 0)
    assert all(offered.machine.accelerators >= 4 for offered in found)
    assert all(offered.machine.accelerator.memory_bytes >= 20e9 for offered in found)


def test_the_bound_of_memory_that_is_shown_keeps_the_gpus_sold_with_24_gb() -> None:
    """A process can use less, so that memory>=24, which was shown, left them out."""
    with pytest.raises(ValueError, match="--hardware-filter: ") as refused:
        parse_filter("")
    shown = re.findall(
        r"memory>=\d+", str(refused.value) + (ROOT / "docs" / "how-to" / "clouds" / "nodes.md").read_text()
    )
    assert len(shown) == 2
    for bound in shown:
        assert {"aws/g5.xlarge", "aws/g6.xlarge", "gcp/g2-standard-4"} <= set(names(f"GPU, {bound}"))
        assert "aws/g4dn.xlarge" not in names(f"GPU, {bound}")


def test_an_unknown_price_satisfies_no_bound() -> None:
    assert "aws/g4dn.xlarge" in names("GPU:T4, region=eu-north-1")
    assert names("GPU:T4, region=eu-north-1, price<=100000") == []


def test_a_retired_size_and_a_tpu_are_no_gpu_to_rent() -> None:
    found = names("GPU")
    assert not any("NC6s_v3" in name or "hightpu" in name or "trn2" in name for name in found)
    assert "azure/Standard_NC4as_T4_v3" in found and "gcp/ct6e-standard-8t" not in names("CPU")


def test_cpu_means_no_gpu() -> None:
    assert "aws/c7i.xlarge" in names("CPU") and "aws/g5.xlarge" not in names("CPU")


def test_every_gpu_of_the_catalog_has_its_generation() -> None:
    gpus = [name for name, device in catalog().accelerators().items() if device.kind in ("cuda", "rocm")]
    assert {name.partition("-")[0] for name in gpus} == set(_GENERATIONS)


@pytest.mark.parametrize(
    ("text", "word"),
    [("GPU:T4, GPU:L4", "device"), ("GPU, CPU", "device"), ("region=a, GPU, region=b", "region")],
)
def test_a_term_that_would_replace_another_is_refused(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=f"--hardware-filter: {word} is asked for twice"):
        parse_filter(text)
    assert len(parse_filter("price>=1, price<=6").conditions) == 2


@pytest.mark.parametrize("text", ["", "T4", "GPU:T5", "price<6", "CPU:x", "GPU:T4+;count>=4", "provider=ibm"])
def test_what_is_wrong_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="--hardware-filter: "):
        parse_filter(text)
