"""Hardware by name, and from a file of the user."""

import pytest

from moe_trainer.estimate.hardware import KNOWN_HARDWARE, HardwareError, find_hardware


def test_known_hardware_is_found_by_name():
    assert find_hardware("H100").bf16 == 989.4 and find_hardware("gb200").domain == 64
    assert all(machine.source and machine.memory_gib > 10 for machine in KNOWN_HARDWARE.values())
    assert find_hardware("a100").peak("fp8") == 312e12
    assert find_hardware("h100").peak("fp4") == 1978.9e12


def test_hardware_file_inherits_from_known_hardware(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("like: h100\nmemory_gib: 94\nnetwork_gb_s: 25\n")
    found = find_hardware(str(path))
    assert (found.name, found.memory_gib, found.network_gb_s, found.bf16) == ("mine", 94, 25, 989.4)


@pytest.mark.parametrize(
    "text, message",
    [
        ("like: h1000", "h1000"),
        ("like: h100\nmemory_gb: 3", "memory_gb"),
        ("memory_gib: 80", "missing"),
        ("- a", "table"),
        ("like: h100\ndomain: 2.5", "whole number"),
        ("like: h100\nhbm_tb_s: fast", "hbm_tb_s"),
        ("like: h100\nhbm_tb_s: .nan", "hbm_tb_s"),
        ("like: h100\nnum_sms: 0", "num_sms"),
        ("like: [h100]", "like"),
        ("like: h100\nmemory_gib: '80'", "'80'"),
        ("", "table"),
        (":\n :", "YAML"),
    ],
)
def test_invalid_hardware_files_are_rejected(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(HardwareError, match=message):
        find_hardware(str(path))


def test_unknown_hardware_name_or_file_is_rejected(tmp_path):
    for name in ("h101", str(tmp_path / "none.yaml"), str(tmp_path)):
        with pytest.raises(HardwareError, match="--hardware"):
            find_hardware(name)
