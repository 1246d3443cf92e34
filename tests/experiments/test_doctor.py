"""The check that users run on untested hardware."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from phocas.cli import application, main
from phocas.experiments import benchmark, doctor
from phocas.kernels.triton import loader
from phocas.rules import device, host, inputs


def test_cpu_passes_all_checks() -> None:
    result = CliRunner().invoke(application(), ["doctor", "--device", "cpu"])
    assert result.exit_code == 0
    assert "cpu: machine code by LLVM" in result.output
    assert "48 of 48 cases agree with the definition" in result.output
    assert "48 have the bits of the CPU" in result.output


def test_wrong_kernel_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with slightly wrong results fails every case and sets the status."""
    real = host.HostMatrix.reduce

    def off(self: Any, *args: Any) -> Any:
        return real(self, *args) * 1.1

    monkeypatch.setattr(host.HostMatrix, "reduce", off)
    result = CliRunner().invoke(application(), ["doctor", "--device", "cpu"])
    assert result.exit_code == 1
    assert "0 of 48 cases" in result.output
    assert "phocas:b=3, float32" in result.output


def test_torch_operations_pass_all_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of accelerators without Triton, on CPU tensors."""
    monkeypatch.setattr(inputs, "_on_accelerator", lambda _: True)
    checks = list(doctor.checks(torch.device("cpu")))
    assert all(check.passed for check in checks)


def test_routes_give_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.VARIABLE, "torch")
    said = doctor.route(torch.device("cuda", 0))
    assert said == "operations of torch: PHOCAS_DEVICE_KERNELS=torch is set"


def test_requiring_triton_without_it_fails_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(inputs, "_on_accelerator", lambda _: True)
    monkeypatch.setenv(device.VARIABLE, "triton")
    monkeypatch.setattr(sys, "argv", ["phocas", "doctor", "--device", "cpu"])
    loader.obstacle.cache_clear()
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as status:
        main()
    loader.obstacle.cache_clear()
    assert status.value.code == 2
    assert said.getvalue().startswith("phocas: Triton cannot be imported")
    assert said.getvalue().endswith(": pip install 'phocas[gpu]'\n")
    assert said.getvalue().count("\n") == 1


@pytest.mark.parametrize("name", ["nothing", "cuda:99"])
@pytest.mark.parametrize("command", ["doctor", "bench"])
def test_missing_devices_are_rejected(command: str, name: str) -> None:
    result = CliRunner().invoke(application(), [command, "--device", name])
    assert isinstance(result.exception, ValueError)
    message = str(result.exception)
    assert message.startswith(f"{command} needs a device that torch has here: got {name!r}: ")
    assert "\n" not in message


def test_devices_are_timed_without_limits() -> None:
    cases = benchmark.device_cases()
    assert 128 in {case.m for case in cases}
    assert all(case.m <= 128 for case in cases)
    assert all(case.limit is None for case in cases)
