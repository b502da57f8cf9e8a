"""torch's flight recorder: its environment variables, and the file that a rank writes when another rank fails."""

import pickle

import pytest

from arguments.machine import environment_defaults
from arguments.parse import resolve_command_line
from moe_trainer.resilience.flight_recorder import make_flight_recorder
from tests.arguments.rule_lines import changed
from tests.resilience.test_hangs import EXPERTS, inject_fault


def defaults(flags, arch=None, **env):
    settings, _ = resolve_command_line(changed(flags), 8)
    return environment_defaults(settings, env, arch)


@pytest.mark.parametrize("arch", [None, 9])
def test_flight_recorder_flags_set_environment_variables(arch, tmp_path):
    assert defaults("--flight-recorder-dump-path traces/fr_", arch) == {
        "TORCH_FR_DUMP_TEMP_FILE": "traces/fr_",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "traces/fr_",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_INCLUDE_STACK_TRACE": "0",
        "TORCH_INCLUDE_ONLY_ACTIVE": "1",
        "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "1",
    }
    assert defaults("", arch) == {}
    changed_all = defaults(
        f"--flight-recorder-dump-path {tmp_path} --flight-recorder-trace-buffer-size 10 "
        "--no-flight-recorder-dump-on-timeout --flight-recorder-include-stack-trace "
        "--no-flight-recorder-include-only-active --no-flight-recorder-extra-dump-on-exec",
        arch,
    )
    assert list(changed_all.values()) == [f"{tmp_path}/_dump_"] * 2 + ["10"] * 2 + ["0", "1", "0", "0"]


def test_existing_environment_variables_take_precedence():
    found = defaults(
        "--flight-recorder-dump-path a --flight-recorder-trace-buffer-size 10",
        TORCH_FR_DUMP_TEMP_FILE="b",
        TORCH_NCCL_TRACE_BUFFER_SIZE="20",
        TORCH_INCLUDE_ONLY_ACTIVE="0",
    )
    assert not {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_INCLUDE_ONLY_ACTIVE"} & set(found)
    assert found["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "b" and found["TORCH_FR_BUFFER_SIZE"] == "20"
    assert defaults("", TORCH_NCCL_DEBUG_INFO_TEMP_FILE="c")["TORCH_FR_DUMP_TEMP_FILE"] == "c"


def test_flight_recorder_needs_path_buffer_and_dump_on_timeout():
    asked = defaults("--flight-recorder-dump-path x_")
    assert make_flight_recorder(asked, 3).path.name == "x_3"
    assert make_flight_recorder({}, 3) is None
    assert make_flight_recorder({**asked, "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}, 3) is None
    assert make_flight_recorder({**asked, "TORCH_FR_BUFFER_SIZE": "0"}, 3) is None


def test_hang_writes_a_flight_record(tmp_path):
    traces = tmp_path / "traces"
    traces.mkdir()
    messages = inject_fault(
        tmp_path,
        "sleep",
        1,
        layout=f"{EXPERTS} --flight-recorder-dump-path {traces} --no-flight-recorder-include-only-active",
    )
    assert f"flight recorder: {traces}/_dump_0" in messages[0]
    record = pickle.loads((traces / "_dump_0").read_bytes())
    assert any(
        "all_to_all" in entry["profiling_name"] or "alltoall" in entry["profiling_name"] for entry in record["entries"]
    )
    assert "version" in record and "pg_config" in record


def test_unwritable_flight_record_is_reported(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    recorder = make_flight_recorder(defaults(f"--flight-recorder-dump-path {blocked}/fr_"), 0)
    assert recorder.write().startswith(f"flight recorder: cannot write {blocked}/fr_0: ")
