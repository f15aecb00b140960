"""The hardware catalog: figures that can be, names as people and drivers write them, layers that win in their order."""

import csv
import re
from datetime import date
from pathlib import Path

import pytest

from configs.common.base import WrongArgument
from configs.hardware.catalog import HOME_REGIONS, accelerator, catalog, instance, instances
from configs.hardware.catalog_layers import SHIPPED
from configs.hardware.prices import CATALOG_COLUMNS, Offer, Price, target_prices
from configs.targets.target import LocalTarget
from engine.planner.choice.machines import priced_machine
from engine.planner.timing.collectives import all_reduce_seconds, ring
from engine.planner.timing.constants import prior_for

TABLES = ("links", "accelerators", "cpus", "instances")


@pytest.mark.parametrize("table", TABLES)
def test_every_row_has_a_source_and_a_date_and_a_name_of_its_own(table: str) -> None:
    with (SHIPPED / f"{table}.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len({row["name"] for row in rows}) == len(rows) > 5
    for row in rows:
        assert date.fromisoformat(row["as_of"]) and (
            "http" in row["source"] or "assumption of ours" in row["source"]
        ), row
        assert not re.search(r"from memory|unchecked|TODO|placeholder", row["source"], re.IGNORECASE), row


def test_every_price_has_a_source_and_a_date_and_none_is_of_a_retired_size() -> None:
    known, retired = catalog(), set()
    for name in known.names("instances"):
        row = known.instance_row(name)
        if row.retired is None:
            continue
        retired.add(name)
        assert row.successor in known.names("instances") and known.instance_row(row.successor).retired is None
        with pytest.raises(ValueError, match=rf"retired by its provider on {row.retired}\. Use {row.successor}"):
            known.instance(name)
        assert name not in known.instances() and known.listed_instance(name).name == name
    assert "azure/Standard_NC6s_v3" in retired
    with (SHIPPED / "prices.csv").open(newline="", encoding="utf-8") as file:
        for price in csv.DictReader(file):
            assert date.fromisoformat(price["as_of"]) and "http" in price["source"], price
            assert price["machine"] not in retired


def test_the_accelerators_that_must_be_there() -> None:
    names = set(catalog().accelerators())
    assert {"t4", "v100-16gb", "v100-32gb", "a10g", "l4", "a100-40gb", "a100-80gb", "h100-80gb", "h100-96gb"} <= names
    assert {"h200", "b200", "mi250x-die", "mi300x", "l40s", "a6000", "rtx4090"} <= names
    assert {"h20", "gh200-96gb", "b300", "gb200", "gb300", "mi325x", "mi355x", "rtxpro6000", "gaudi3"} <= names
    assert {"trainium2", "trainium3", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x"} <= names
    # Those of universities, labs and workstations, which no cloud rents.
    assert {"a30", "a40", "a5000", "l40", "rtx2080ti", "rtx3090", "rtx5090", "rtx6000ada", "v100s-32gb-pcie"} <= names
    assert {"quadrortx6000", "quadrortx8000", "rtxpro6000-workstation", "rtxpro6000-max-q"} <= names
    assert {"mi210", "mi250-die", "mi300a", "mi350x", "a100-64gb", "a800-80gb", "h800-80gb"} <= names
    assert {"gb10", "max1550-stack", "max1100"} <= names


@pytest.mark.parametrize("name", list(catalog().accelerators()))
def test_peaks_are_dense_and_in_order(name: str) -> None:
    """The trap of data sheets: their largest figures count products with zeros in 2:4 sparse matrices."""
    peaks = accelerator(name).peak_flops
    half = peaks.get("bfloat16") or peaks["float16"]
    assert 1e12 < peaks["float32"] <= peaks.get("tfloat32", half) <= half <= 2.6e15
    assert peaks.get("float8", half) >= half
    # Blackwell Ultra gave most of its int8 units up for 4-bit floats.
    assert peaks.get("int8", half) >= half or name in ("b300", "gb300")
    if "float8" in peaks and name != "trainium3":  # whose MXFP8 is four times as fast
        # Exactly two times half precision in all of these devices: a larger one mixes dense and sparse figures.
        assert peaks["float8"] == pytest.approx(2 * half, rel=0.03)
    if name.startswith(("h100", "h200")):
        assert half < 1000e12
    if name.startswith(("a100", "a800")) and name != "a100-64gb":  # which has 124 of the chip's units, not 108
        assert (half, peaks["tfloat32"], peaks["float32"]) == (312e12, 156e12, 19.5e12)


@pytest.mark.parametrize("name", list(catalog().accelerators()))
def test_memory_and_links_can_be(name: str) -> None:
    device = accelerator(name)
    slowest = 0.27e12 if name == "gb10" else 0.3e12  # whose memory is LPDDR5X
    assert 11e9 < device.memory_bytes < 310e9 and slowest <= device.bytes_per_second <= 8e12
    if name == "inferentia2":  # no data sheet gives the rate of its link
        assert device.link is None
        return
    assert device.link is not None
    assert 15e9 < device.link.bytes_per_second <= (1.28e12 if name == "trainium3" else 900e9)
    assert 1e-6 < device.link.latency_seconds < 1e-4 and 1e-6 < device.kernel_seconds < 2e-5 and not device.measured
    # A balanced device reads a byte for every 40 to 500 products; beyond, a figure has a wrong power of ten. H20 is cut
    # down in products alone, TPU v6e has the memory of a smaller device (their data sheets).
    half = device.peak_flops.get("bfloat16") or device.peak_flops["float16"]
    least, most = {"h20": (36, 38), "tpu-v6e": (559, 561)}.get(name, (40, 500))
    assert least < half / device.bytes_per_second < most


@pytest.mark.parametrize(
    ("name", "mebibytes"),
    [
        ("t4", 15360),
        ("a40", 46068),
        ("l40s", 46068),
        ("a100-80gb", 81920),
        ("h100-80gb", 81559),
        ("a100-64gb", 65536),
        ("h800-80gb", 81559),
        ("b200", 183359),
        ("h20", 97871),
        ("gh200-96gb", 97871),
        ("rtxpro6000", 97887),
        ("rtxpro6000-max-q", 97887),
        ("gb200", 189471),
        ("b300", 275040),
        ("gb300", 284208),
        ("mi300x", 196288),
        ("mi325x", 262128),
        ("mi355x", 294896),
        ("max1550-stack", 65520),
        ("max1100", 49136),
    ],
)
def test_memory_is_what_a_driver_shows_less_what_it_keeps(name: str, mebibytes: int) -> None:
    """Sold as 96, 186 or 288 GB, which are nearer to GiB: a nominal figure would leave 7 % of it unused."""
    assert 0.965 < accelerator(name).memory_bytes / (mebibytes * 2**20) < 1.0001


def test_old_devices_have_no_bfloat16() -> None:
    for name in ("t4", "v100-16gb", "v100-32gb", "v100s-32gb-pcie", "rtx2080ti", "quadrortx6000", "quadrortx8000"):
        assert "bfloat16" not in accelerator(name).peak_flops and "float8" not in accelerator(name).peak_flops
        assert "tfloat32" not in accelerator(name).peak_flops
    for name in ("a30", "a40", "a5000", "rtx3090", "mi210", "mi250-die"):
        assert "float8" not in accelerator(name).peak_flops


@pytest.mark.parametrize(
    ("name", "units", "flop_a_cycle", "gigahertz", "bus_bits", "gigabits"),
    [
        ("v100s-32gb-pcie", 80, 1024, 1.597, 4096, 2.214),
        ("rtx2080ti", 68, 512, 1.545, 352, 14),  # GeForce: half the rate with float32 sums
        ("quadrortx6000", 72, 1024, 1.77, 384, 14),
        ("quadrortx8000", 72, 1024, 1.77, 384, 14),
        ("a30", 56, 2048, 1.44, 3072, 2.43),
        ("a40", 84, 1024, 1.74, 384, 14.5),
        ("a5000", 64, 1024, 1.695, 384, 16),
        ("rtx3090", 82, 512, 1.695, 384, 19.5),
        ("l40", 142, 512, 2.49, 384, 18),
        ("rtx6000ada", 142, 1024, 2.505, 384, 20),
        ("rtx5090", 170, 512, 2.407, 512, 28),
        ("rtxpro6000-workstation", 188, 1024, 2.617, 512, 28),
        ("gb10", 48, 1024, 2.52, 256, 8.533),
        ("max1550-stack", 64, 4096, 1.6, 4096, 3.2),
        ("max1100", 56, 4096, 1.55, 3072, 3.2),
        ("mi210", 104, 1024, 1.7, 4096, 3.2),
        ("mi250-die", 104, 1024, 1.7, 4096, 3.2),
        ("mi300a", 228, 2048, 2.1, 8192, 5.2),
        ("mi350x", 256, 4096, 2.2, 8192, 8),
        ("a100-64gb", 124, 2048, 1.41, 4096, 3.2),
        ("b200", 148, 8192, 1.85, 7680, 7.992),  # 8,192 bits were counted, of which 512 are not in use
    ],
)
def test_figures_follow_from_units_clock_and_bus(
    name: str, units: int, flop_a_cycle: int, gigahertz: float, bus_bits: int, gigabits: float
) -> None:
    """16-bit products with float32 sums, without sparsity; a pin of the bus moves a bit a transfer."""
    device = accelerator(name)
    half = device.peak_flops.get("bfloat16") or device.peak_flops["float16"]
    assert half == pytest.approx(units * flop_a_cycle * gigahertz * 1e9, rel=0.01)
    assert device.bytes_per_second == pytest.approx(bus_bits * gigabits * 1e9 / 8, rel=0.025)


def test_figures_that_others_build_on() -> None:
    a100, h100, limited = accelerator("a100-80gb"), accelerator("h100-80gb"), accelerator("h100-96gb")
    assert (a100.flops("bfloat16"), a100.bytes_per_second) == (312e12, 2.039e12)
    assert (h100.flops("bfloat16"), h100.flops("float8"), h100.bytes_per_second) == (989.4e12, 1978.9e12, 3.35e12)
    assert (limited.flops("bfloat16"), limited.bytes_per_second) == (989.4e12, 2.4e12)
    rates = [accelerator(name).link for name in ("v100-16gb", "a100-80gb", "h100-80gb", "b200")]
    assert [link.bytes_per_second for link in rates if link] == [150e9, 300e9, 450e9, 900e9]
    for export, whole in (("a800-80gb", a100), ("h800-80gb", h100)):
        cut = accelerator(export)
        assert cut.link is not None and cut.link.bytes_per_second == 200e9
        assert (cut.peak_flops, cut.bytes_per_second) == (whole.peak_flops, whole.bytes_per_second)
        assert prior_for(cut) == prior_for(whole)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("h100", "h100-80gb"),
        ("H100-SXM", "h100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),  # named by the memory of its processor
        ("NVIDIA GH200 120GB", "gh200-96gb"),
        ("NVIDIA GH200 144G HBM3e", "gh200-144gb"),
        ("AMD Instinct MI300X OAM", "mi300x"),  # as the kernel's driver calls it
        ("AMD Instinct MI325X OAM", "mi325x"),
        ("AMD Instinct MI355X OAM", "mi355x"),
        ("NVIDIA H100 PCIe", "h100-80gb-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM-64GB", "a100-64gb"),
        ("NVIDIA A800-SXM4-80GB", "a800-80gb"),
        ("NVIDIA H800", "h800-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA RTX A6000", "a6000"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI300X VF", "mi300x"),  # in a virtual machine
        ("mi250x", "mi250x-die"),
        ("AMD Instinct MI250X", "mi250x-die"),
        ("AMD Instinct MI250X / MI250", "mi250-die"),  # the driver's name of the MI250 alone
        ("AMD Instinct MI250X/MI250", "mi250-die"),
        ("AMD Instinct MI210", "mi210"),
        ("AMD Instinct MI300A Accelerator", "mi300a"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA H200 NVL", "h200-141gb-nvl"),
        ("NVIDIA GB10", "gb10"),
        ("Intel(R) Data Center GPU Max 1550", "max1550-stack"),
        ("Intel(R) Data Center GPU Max 1100", "max1100"),
        ("Tesla V100S-PCIE-32GB", "v100s-32gb-pcie"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti"),
        ("Quadro RTX 6000", "quadrortx6000"),
        ("Quadro RTX 8000", "quadrortx8000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000-workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtxpro6000-max-q"),
        # as Slurm's AutoDetect=nvml or an administrator names the type in gres
        ("nvidia_h100_nvl", "h100-94gb-nvl"),
        ("nvidia_a100-sxm4-80gb", "a100-80gb"),
        ("nvidia_geforce_rtx_3090", "rtx3090"),
        ("rtx_2080_ti", "rtx2080ti"),
        ("rtx_a6000", "a6000"),
        ("nvidia_rtx_6000_ada_generation", "rtx6000ada"),
        ("nvidia_rtx_pro_6000_blackwell_max-q_workstation_edition", "rtxpro6000-max-q"),
    ],
)
def test_names_as_people_and_drivers_write_them(spelling: str, name: str) -> None:
    assert accelerator(spelling).name == name


def test_a_name_that_is_none_or_several_is_an_error_that_helps() -> None:
    with pytest.raises(ValueError, match=r"unknown accelerator 'h1000'; did you mean h100-80gb"):
        accelerator("h1000")
    with pytest.raises(ValueError, match=r"'v100' is ambiguous; use one of: v100-16gb, v100-32gb"):
        accelerator("v100")
    for slice_of_one in ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "nvidia_a100_80gb_pcie_1g.10gb", "H100 MIG 1g.10gb+me"):
        with pytest.raises(ValueError, match=r"a slice of a divided GPU \(MIG\); the catalog has whole GPUs$"):
            accelerator(slice_of_one)  # neither all of the GPU nor the nearest name
    with pytest.raises(ValueError, match=r"'rtx_6000' is ambiguous; use one of: quadrortx6000, rtx6000ada"):
        accelerator("rtx_6000")  # of Turing or of Ada
    for other in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA RTX A5000 Laptop GPU"):
        with pytest.raises(ValueError, match="unknown accelerator"):  # slower than what they are named after
            accelerator(other)
    with pytest.raises(ValueError, match=r"unknown instance 'aws/p5\.49xlarge'; did you mean aws/p5\."):
        instance("aws/p5.49xlarge")


def test_an_instance_is_a_machine_with_a_share_of_the_network_for_each_rank() -> None:
    machine = instance("p5.48xlarge")
    assert (machine.name, machine.accelerator.name, machine.accelerators) == ("aws/p5.48xlarge", "h100-80gb", 8)
    assert machine.between is not None and machine.between.bytes_per_second == 3.2e12 / 8 / 8
    assert machine.neighbour == machine.accelerator.link
    assert machine.usd_per_hour == 55.04 and machine.host_memory_bytes == 2 * 2**40
    assert instance("aws/p5.48xlarge/us-west-1").usd_per_hour == 68.8
    assert instance("aws/p5.48xlarge", "us-west-1").usd_per_hour == 68.8
    assert instance("aws/p5.48xlarge", "mars-1").usd_per_hour is None


def test_every_shipped_instance_becomes_a_machine() -> None:
    machines = instances()
    assert len(machines) > 120 and {name.split("/")[0] for name in machines} == {"aws", "gcp", "azure"}
    for name, machine in machines.items():
        assert machine.between is not None and machine.host_memory_bytes is not None, name
        assert machine.accelerator.as_of and machine.accelerator.source
    assert set(instances("gcp", "cuda")) < set(instances("gcp")) < set(machines)
    assert {machine.accelerator.kind for machine in instances(kind="rocm").values()} == {"rocm"}


def test_a_link_domain_spans_nodes() -> None:
    """72 GPUs of a rack reach each other by NVLink, though a node has 4."""
    rack, plain = instance("azure/Standard_ND128isr_NDR_GB200_v6"), instance("aws/p6-b200.48xlarge")
    assert (rack.accelerators, rack.joined_ranks, plain.joined_ranks) == (4, 72, 8)
    assert ring(72, rack).nodes == 1 and ring(73, rack).nodes == 2 and ring(16, plain).nodes == 2
    cut = rack.accelerator.model_copy(update={"link_domain": None})
    alone = rack.model_copy(update={"accelerator": cut})
    assert all_reduce_seconds(1e8, 8, rack) < 0.5 * all_reduce_seconds(1e8, 8, alone)


def test_a_larger_instance_of_a_family_has_more_of_everything() -> None:
    """Catches a figure that slipped into the wrong row."""
    for family in ("aws/c7i.", "aws/m7i.", "gcp/n2-standard-", "azure/Standard_D"):
        rows = [machine for name, machine in instances().items() if name.startswith(family)]
        rows.sort(key=lambda machine: machine.accelerator.peak_flops["float32"])
        memory = [machine.host_memory_bytes or 0 for machine in rows]
        rates = [machine.between.bytes_per_second for machine in rows if machine.between]
        prices = [machine.usd_per_hour for machine in rows if machine.usd_per_hour is not None]
        assert len(rows) > 4 and memory == sorted(memory) and rates == sorted(rates) and prices == sorted(prices)


def test_the_cores_of_an_instance_are_an_estimate_that_says_so() -> None:
    machine = instance("aws/c7i.8xlarge")
    device = machine.accelerator
    assert device.kind == "cpu" and machine.accelerators == 1 and not device.measured
    assert device.peak_flops["float32"] == 16 * 3.2e9 * 64
    assert device.bytes_per_second == pytest.approx(307.2e9 / 3)
    assert device.source.startswith("estimate, not measured: 16 cores x 3.2 GHz")


def test_an_attached_accelerator_adds_its_price_and_nothing_unknown_becomes_a_number() -> None:
    bare, one, two = instance("gcp/n1-standard-8"), instance("gcp/n1-standard-8+t4"), instance("n1-standard-8+2xt4")
    assert (bare.accelerator.kind, one.accelerator.name, one.accelerators) == ("cpu", "t4", 1)
    assert (two.accelerator.name, two.accelerators, two.name) == ("t4", 2, "gcp/n1-standard-8+2xt4")
    assert bare.usd_per_hour is not None and one.usd_per_hour is not None and two.usd_per_hour is not None
    assert one.usd_per_hour == pytest.approx(bare.usd_per_hour + 0.35)
    assert two.usd_per_hour == pytest.approx(bare.usd_per_hour + 0.70)
    assert instance("gcp/n1-standard-8+t4", "europe-west4").usd_per_hour is None
    with pytest.raises(ValueError, match=r"gcp/n1-standard-8: h100-80gb cannot be attached; use one of: t4, v100-16gb"):
        instance("gcp/n1-standard-8+h100")
    assert instance("gcp/n1-standard-8+v100").accelerator.name == "v100-16gb"  # the only V100 that it takes
    with pytest.raises(ValueError, match="it supports none"):
        instance("aws/p5.48xlarge+t4")
    with pytest.raises(ValueError, match="expected accelerators of one type"):
        instance("gcp/n1-standard-8+t4+v100-16gb")


def offer(machine: str, usd: float, market: str = "on_demand", as_of: str | None = "2026-01-02") -> Offer:
    price = {"usd_per_hour": usd, "source": machine, "market": market, "region": "r", "as_of": as_of}
    return Offer(machine=machine, price=Price.model_validate(price))


def test_a_sum_of_prices_names_its_parts_and_is_as_old_as_the_oldest() -> None:
    shipped = (offer("gcp/n", 1.0, as_of="2026-05-01"), offer("gcp/t4", 0.25), offer("gcp/t4", 0.1, "spot"))
    target = LocalTarget(machine="gcp/n+2xt4/r")
    found = target_prices(target, (), shipped)
    assert found.price is not None and found.price.usd_per_hour == 1.5 and found.price.as_of == "2026-01-02"
    assert found.price.source == "gcp/n + 2 x gcp/t4" and found.price.region == "r"
    assert found.others == ()  # spot is known of a part only
    spot = target_prices(target, (), (*shipped, offer("gcp/n", 0.5, "spot"))).others
    assert [(price.market, price.usd_per_hour) for price in spot] == [("spot", 0.7)]
    assert target_prices(target, (), shipped[1:]).price is None
    own = Offer(machine="gcp/n+2xt4", price=Price(usd_per_hour=9, source="contract"))
    assert target_prices(target, (own,), shipped).price == own.price
    named = Offer(target="local", price=Price(usd_per_hour=7, source="by name"))
    assert target_prices(target, (named,), shipped).price == named.price
    undated = (offer("gcp/n", 1.0, as_of=None), offer("gcp/t4", 0.25))
    price = target_prices(LocalTarget(machine="gcp/n+t4/r"), (), undated).price
    assert price is not None and price.as_of is None


MINE = """
as_of: 2026-11-01
source: measured on our nodes
accelerators:
  h100-80gb: {memory_bytes: 84e9}
  lab-gpu: {kind: cuda, memory_bytes: 48e9, bytes_per_second: 1e12, float32: 40e12, bfloat16: 160e12,
            link: lab-link, kernel_seconds: 4e-6, aliases: our gpu, source: data sheet 7}
links:
  lab-link: {latency_seconds: 8e-6, bytes_per_second: 20e9}
instances:
  lab/rack-7: {accelerator: lab-gpu, accelerators: 4, vcpus: 64, host_memory_bytes: 1e12,
               network: infiniband, network_bits_per_second: 4e11}
prices:
  - {machine: "lab/*", usd_per_hour: 9.5}
  - {machine: aws/p5.48xlarge, usd_per_hour: 40, source: contract 12}
"""


def cached(folder: Path) -> Path:
    """A cache that was refreshed: another bandwidth of the H100, another price of an instance."""
    tables = folder / "catalog"
    tables.mkdir(parents=True)
    header = "name,bytes_per_second,memory_bytes,as_of,source"
    (tables / "accelerators.csv").write_text(f"{header}\nh100-80gb,3.3e12,83e9,2026-11-10,refreshed sheet\n")
    row = "aws/g4dn.xlarge,us-east-1,on_demand,0.6,2026-11-10,fresh"
    (tables / "prices.csv").write_text(f"{','.join(CATALOG_COLUMNS)}\n{row}\n")
    return folder


def test_later_layers_win_figure_by_figure_and_each_figure_knows_its_layer(tmp_path: Path) -> None:
    own = tmp_path / "hardware.yaml"
    own.write_text(MINE)
    found = catalog(cached(tmp_path / "cache"), own, ["H100.kernel_seconds=3e-6"])
    device, figures = found.accelerator("h100"), found.figures("accelerators", "h100")
    assert (device.bytes_per_second, device.memory_bytes, device.kernel_seconds) == (3.3e12, 84_000_000_000, 3e-6)
    assert device.flops("bfloat16") == 989.4e12
    layers = {name: figures[name].layer for name in ("bfloat16", "bytes_per_second", "memory_bytes", "kernel_seconds")}
    assert list(layers.values()) == ["shipped", "refreshed", "user", "command line"]
    assert figures["memory_bytes"].source == "measured on our nodes (hardware.yaml)"
    assert "bytes_per_second: refreshed sheet (refreshed)" in device.source
    assert "memory_bytes: measured on our nodes (hardware.yaml) (user)" in device.source
    assert accelerator("h100").bytes_per_second == 3.35e12  # the shipped layer is as it was
    rack = found.instance("lab/rack-7")
    assert rack.accelerator.name == "lab-gpu" == found.accelerator("Our GPU").name and rack.usd_per_hour == 9.5
    assert rack.between is not None and rack.between.bytes_per_second == 4e11 / 8 / 4
    assert rack.accelerator.as_of == "2026-11-01" and rack.accelerator.source == "data sheet 7 (hardware.yaml)"


def test_the_users_file_may_call_things_as_he_does(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text("accelerators: {H100: {memory_bytes: 80e9}}\ninstances: {p5.48xlarge: {storage_bytes: 1e12}}")
    found = catalog(None, own)
    assert found.accelerator("h100-80gb").memory_bytes == 80_000_000_000
    assert found.instance("aws/p5.48xlarge").storage_bytes == 10**12
    assert "H100" not in found.names("accelerators")
    own.write_text("accelerators: {A100: {memory_bytes: 80e9}}")
    with pytest.raises(ValueError, match=r"mine\.yaml: accelerators\.A100 is ambiguous; use one of: a100-40gb"):
        catalog(None, own)


def test_prices_of_later_layers_win(tmp_path: Path) -> None:
    own = tmp_path / "hardware.yaml"
    own.write_text(MINE)
    cache = cached(tmp_path / "cache")
    assert catalog(cache).instance("aws/g4dn.xlarge").usd_per_hour == 0.6
    assert catalog().instance("aws/g4dn.xlarge").usd_per_hour == 0.526
    assert catalog(cache, own).instance("p5.48xlarge").usd_per_hour == 40
    assert catalog(cache, own, ["p5.48xlarge.usd_per_hour=30"]).instance("p5.48xlarge").usd_per_hour == 30
    assert catalog(cache, own, ["AWS/P5.48xlarge.usd_per_hour=30"]).instance("p5.48xlarge").usd_per_hour == 30
    price = catalog(None, None, ["gcp/t4.usd_per_hour=0.5"]).price("gcp/n1-standard-8+t4")
    assert price is not None and "the command line" in price.source and price.region == HOME_REGIONS["gcp"]
    first, *_ = catalog(cache, own).offers()
    assert first[0] == "user" and {layer for layer, _ in catalog(cache, own).offers()} == {
        "user",
        "refreshed",
        "shipped",
    }
    assert catalog(tmp_path / "nothing").instance("aws/g4dn.xlarge").usd_per_hour == 0.526


def test_a_price_of_another_market_is_not_taken_for_that_on_demand(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    spot = "{machine: 'aws/g4dn.*', region: us-east-1, market: spot, usd_per_hour: 0.2}"
    own.write_text(f"prices: [{spot}]")
    found = catalog(None, own)
    machine = found.instance("aws/g4dn.xlarge")
    assert machine.usd_per_hour == 0.526
    assert priced_machine(machine, "spot", found).usd_per_hour == 0.2
    own.write_text(f"prices: [{spot}, {{machine: aws/g4dn.xlarge, usd_per_hour: 0.4}}]")
    assert catalog(None, own).instance("aws/g4dn.xlarge").usd_per_hour == 0.4


@pytest.mark.parametrize("name", ["rack-7", "lab/row/rack-7", "lab/x+2", "/rack", "lab/", "' lab/x'"])
def test_an_instance_that_no_price_could_name_is_refused(tmp_path: Path, name: str) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text(f"instances: {{{name}: {{accelerator: h100-80gb, vcpus: 8, host_memory_bytes: 1e12}}}}")
    with pytest.raises(ValueError, match=r"mine\.yaml: instances\..*: expected provider/instance, such as lab/rack-7"):
        catalog(None, own)


@pytest.mark.parametrize(
    ("assignment", "problem"),
    [
        ("h100.memory_bytes=-1", r"memory_bytes: input should be greater than 0, got '-1'"),
        ("h100.memory_bytes=much", r"memory_bytes: input should be a valid integer"),
        ("h100.float16=inf", r"float16: input should be a finite number"),
        ("h100.memory=1", r"unknown column 'memory' \(did you mean memory_bytes\?\)"),
        ("h101.float16=1", r"unknown accelerator 'h101'; did you mean h100"),
        ("h100", r"expected name\.column=value"),
        ("aws/p5.48xlarge.usd_per_hour=0", r"greater than 0, got '0'"),
        ("p5.49xlarge.usd_per_hour=1", r"unknown instance 'p5\.49xlarge'; did you mean aws/p5\."),
    ],
)
def test_a_wrong_assignment_is_named(assignment: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        catalog(None, None, [assignment])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("accelerators: {h100: {memory_bytes: 0}}", "mine.yaml: accelerators.h100: memory_bytes: input should be gr"),
        ("accelerators: {h100: {memory_bytes: on}}", "accelerators.h100: memory_bytes: expected a number, got true"),
        ("prices: [{machine: aws/x, usd_per_hour: on}]", "prices[0].usd_per_hour: expected a number, got true"),
        ("accelerators: {h100: {memroy_bytes: 1}}", "unknown column 'memroy_bytes' (did you mean memory_bytes?)"),
        ("acelerators: {}", "mine.yaml: acelerators: unknown key (did you mean accelerators?)"),
        ("prices: [{machine: aws/x, usd_per_hour: 0}]", "mine.yaml: prices[0].usd_per_hour: input should be greater"),
        ("prices: [{target: '*', usd_per_hour: 1}]", "mine.yaml: prices[0].target: a catalog has prices of machines"),
        ("prices: [{machin: aws/x, usd_per_hour: 1}]", "mine.yaml: prices[0].machin: unknown key (did you mean machi"),
        ("instances: {lab/x: 7}", "mine.yaml: instances.lab/x: input should be a valid dictionary"),
        ("links: {a: {latency_seconds: 1}, a: {}}", "mine.yaml: not YAML: line 1, column 34: duplicate key 'a'"),
        ("- h100", "mine.yaml: expected a mapping"),
    ],
)
def test_every_problem_of_the_users_file_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(WrongArgument) as caught:
        catalog(None, path)
    first, *hints = str(caught.value).splitlines()
    assert first.startswith(f"{path}: ") and problem in first and all(hint.startswith("  ") for hint in hints)


def test_what_is_put_together_from_layers_is_checked_when_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "accelerators: {half: {kind: cuda, memory_bytes: 1e9}}\n"
        "instances: {lab/a: {accelerator: nothing, vcpus: 1, host_memory_bytes: 1e9},"
        " lab/b: {accelerator: t4, vcpus: 1, host_memory_bytes: 1e9, network: fog, network_bits_per_second: 1e9},"
        " lab/c: {accelerator: t4, vcpus: 1, host_memory_bytes: 1e9, inside: efa},"
        " lab/d: {vcpus: 1, host_memory_bytes: 1e9}}\n"
    )
    found = catalog(None, path)
    with pytest.raises(ValueError, match=r"accelerators: half: bytes_per_second: is missing"):
        found.accelerator("half")
    with pytest.raises(ValueError, match=r"unknown accelerator 'nothing'"):
        found.instance("lab/a")
    with pytest.raises(ValueError, match=r"instances: lab/b: unknown link 'fog'"):
        found.instance("lab/b")
    with pytest.raises(ValueError, match=r"link efa is a network without bytes_per_second"):
        found.instance("lab/c")
    with pytest.raises(ValueError, match=r"lab/d: no accelerator or CPU in the catalog"):
        found.instance("lab/d")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name,as_of,source\nx,2026-01-01,\n", "line 2: x: missing source or date"),
        ("name,as_of,source\nx,,s\n", "line 2: x: missing source or date"),
        ("name,as_of,source\nx,soon,s\n", "line 2: x: as_of: "),
        ("name,as_of,source\n,2026-01-01,s\n", "line 2: missing name"),
        ("name,as_of,source\nx,2026-01-01,s\nx,2026-01-01,s\n", "line 3: duplicate name x"),
        ("name,as_of,source\nx,2026-01-01\n", "line 2: expected 3 fields"),
        ("name,speed,as_of,source\n", "unknown column 'speed'"),
        ("name,as_of\n", "missing column 'source'"),
    ],
)
def test_a_refreshed_table_with_a_doubtful_row_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "catalog").mkdir()
    (tmp_path / "catalog" / "links.csv").write_text(text)
    with pytest.raises(ValueError, match=r"links\.csv") as caught:
        catalog(tmp_path)
    assert problem in str(caught.value)
