"""The GPUs of this machine with the slices that MIG makes of them."""

import os
from pathlib import Path

import pytest

from rlflow.commands.doctor import machine
from rlflow.commands.doctor.machine import Device
from rlflow.runtime.ray.cluster.machine import listed_gpus
from tests.unit.runtime.ray.cluster.test_machine import LISTING, WHOLE

CSV = f"""\
0, GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77, {WHOLE}, 40960, 249, 535.129.03
1, GPU-fcf41002-68b6-5900-d7d1-74026173bb44, {WHOLE}, 40960, 4, 535.129.03
"""
# The part that is read of the output of nvidia-smi -q -x on the same host.
DETAILS = """\
<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
	<driver_version>535.129.03</driver_version>
	<gpu id="00000000:07:00.0">
		<fb_memory_usage><total>40960 MiB</total><used>249 MiB</used></fb_memory_usage>
		<mig_devices>
			<mig_device>
				<index>0</index>
				<gpu_instance_id>1</gpu_instance_id>
				<fb_memory_usage><total>20096 MiB</total><used>107 MiB</used></fb_memory_usage>
			</mig_device>
			<mig_device>
				<index>1</index>
				<gpu_instance_id>5</gpu_instance_id>
				<fb_memory_usage><total>N/A</total><used>N/A</used></fb_memory_usage>
			</mig_device>
		</mig_devices>
	</gpu>
	<gpu id="00000000:0F:00.0">
		<mig_devices>
			None
		</mig_devices>
	</gpu>
</nvidia_smi_log>
"""


def test_each_slice_has_its_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"listing": LISTING, "csv": CSV, "details": DETAILS}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        f"""#!/bin/sh
case "$*" in
  -L) cat {tmp_path}/listing;;
  --query-gpu=*) cat {tmp_path}/csv;;
  "-q -x") cat {tmp_path}/details;;
esac
"""
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found, problem = machine.devices()
    assert problem is None
    assert found == [
        Device(0, f"{WHOLE} MIG 3g.20gb", 20096 / 1024, 107 / 1024, "535.129.03", 0, slice=0),
        Device(0, f"{WHOLE} MIG 2g.10gb", None, None, "535.129.03", 0, slice=1),
        Device(1, WHOLE, 40.0, 4 / 1024, "535.129.03", 0),
    ]


def test_without_details_the_memory_is_unknown() -> None:
    found = machine.with_slices(machine.devices_from(CSV, ""), listed_gpus(LISTING), "")
    assert [device.memory_gib for device in found] == [None, None, 40.0]
