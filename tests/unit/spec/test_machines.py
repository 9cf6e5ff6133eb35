"""The catalogue agrees with the machines' published shapes."""

from __future__ import annotations

import pytest

from spec.machines import CATALOGUE, GpuRequest, gpu_tokens, machine, machine_of_gpu, parse_gpu
from spec.problems import RemedyError


@pytest.mark.parametrize(
    ("token", "want_type", "want_label", "want_networks", "want_fabric"),
    [
        ("H100-MEGA", "a3-megagpu-8g", "nvidia-h100-mega-80gb", 8, "tcpxo"),
        ("H200", "a3-ultragpu-8g", "nvidia-h200-141gb", 9, "rdma"),
        ("H100", "a3-highgpu-8g", "nvidia-h100-80gb", 4, "tcpx"),
        ("B200", "a4-highgpu-8g", "nvidia-b200", 9, "rdma"),
    ],
)
def test_a_gpu_token_leads_to_its_machine(
    token: str, want_type: str, want_label: str, want_networks: int, want_fabric: str
) -> None:
    row = machine_of_gpu(token)
    assert row is not None
    assert (row.machine_type, row.gpus, row.extra_networks, row.fabric) == (want_type, 8, want_networks, want_fabric)
    assert row.labels["cloud.google.com/gke-accelerator"] == want_label
    assert row.peak_bf16_flops is not None


def test_rows_are_consistent() -> None:
    assert len({row.name for row in CATALOGUE}) == len(CATALOGUE)
    for row in CATALOGUE:
        assert row.allocatable_cpu <= row.cpus
        assert row.allocatable_memory_gib <= row.memory_gib
        assert bool(row.gpu) == bool(row.gpus) == bool(row.accelerator)
        assert row.gpu_nics <= max(0, row.nics - 1)


def test_an_unsupported_row_is_known_but_cannot_be_asked_for() -> None:
    assert machine("a4x").gpus == 4
    assert "GB200" not in gpu_tokens()
    with pytest.raises(RemedyError, match="A4X needs Arm images"):
        parse_gpu("GB200:4")


def test_a_request_is_type_and_count() -> None:
    assert parse_gpu("H200:8") == GpuRequest("H200", 8)
    assert str(parse_gpu("H100-MEGA:1")) == "H100-MEGA:1"


def test_a_row_is_found_by_our_name_or_the_clouds() -> None:
    assert machine("a3-ultra") is machine("a3-ultragpu-8g")
    with pytest.raises(KeyError, match="not in the catalogue"):
        machine("a9")
