"""XIDs in prose, as tickets, node conditions and health checks write them."""

import pytest

from telemetry.kernel_log.mentions import xid_codes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Xid 79", "79"),
        ("XID79", "79"),
        ("Xid-79 GPU 3 fell off", "79"),
        ("xid_errors 79", "79"),
        ("Xid #79.", "79"),
        ("XIDs: 48, 79", "48 79"),
        ("several XIDs (48, 63 and 94)", "48 63 94"),
        ("XID 48 and XID 63", "48 63"),
        ("GPU 3: Xid error detected: 79", "79"),
        ("NVIDIA Xid error count 3 (codes: 79)", "79"),
        ("Xid-Fehler 79 auf GPU 3", "79"),
        ("Xid (PCI:0000:10:00): 79, pid=123", "79"),
        ("NvidiaXID79Error", "79"),
        ("ErrorCode:79", "79"),
        ("XID 149.37 (err status 0x00000000) NVLINK_NETIR_ERROR", "149"),
        ("xid 119 detected by dmesg (47 minutes ago)", "119"),
        ("XidCriticalError: Xid=48 on Device=GPU-0e1b2c3d-0000-4000-8000-000000000000", "48"),
        ("Xid 79 on 10.0.0.3", "79"),
        ("XID 79 errors on A100 node-12", "79"),
        ("Xid 13 x 20, 45s timeout", "13"),
        ("Xid error: 79 in the kernel log", "79"),
        ("XID: 94, 95 in the last 2 hours", "94 95"),
        ("XID 94 and 95 errors on node 3", "94 95"),
        ("XID 13/31 errors", "13 31"),
        ("XID 31, 13 GPU MMU fault", "31 13"),
        ("XIDs 13 errors and 31 errors", "13"),
        ("XID 79, 3 errors in the last hour", "79"),
        ("Xid errors on GPUs 2, 4 and 6", ""),
        ("Xid errors found on host 17, rebooting", ""),
        ("XID errors on A100 nodes", ""),
        ("XID errors: 3 in the last 24 hours", ""),
        ("XID errors after 550 driver upgrade", ""),
        ("XID error since 12 May, at 10:32", ""),
        ("Xid events 2x on dgx-17, ticket 123", ""),
        ("SXid 12028", ""),
        ("XID 0", ""),
    ],
)
def test_numbers_after_xid_are_codes_unless_they_count_or_name_something_else(text: str, expected: str) -> None:
    assert xid_codes(text) == expected.split()
