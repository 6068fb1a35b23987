"""Inputs for readers of damaged files and answers."""

import random
from typing import Any

PIECES = [b"1e400", b"9" * 400, b"-9223372036854775809", b"NaN", b"\xff", b"\\ud800", b"null", b"[" * 1500, b"]]"]
PIECES += [b"0x", *(letter.encode() for letter in '\x00"{[]},;#-\ufeff\té\n ')]


def damaged(seeds: list[bytes], number: int) -> bytes:
    """A seed with some of its bytes replaced, cut, repeated, or with a piece that was trouble elsewhere."""
    rng = random.Random(number)
    body = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(body) + 1)
        match rng.randrange(4):
            case 0 if body:
                body[min(place, len(body) - 1)] = rng.randrange(256)
            case 1:
                body[place : place + rng.randrange(9)] = rng.choice(PIECES)
            case 2:
                del body[place : place + rng.randrange(20)]
            case _:
                body[place:place] = body[place : place + rng.randrange(30)]
    return bytes(body)


def number(value: int) -> dict[str, Any]:
    """A number as Slurm writes it in JSON."""
    return {"set": True, "infinite": False, "number": value}


NODE = {
    "name": "n1", "state": ["IDLE", "DRAIN"], "reason": "xid 79", "reason_set_by_user": "root",
    "reason_changed_at": number(1760000000), "boot_time": number(1750000000), "state_flags": ["DRAIN"],
}  # fmt: skip
JOB = {
    "job_id": 5, "job_state": ["COMPLETED"], "start_time": number(1760000000), "end_time": number(1760000100),
    "nodes": "n[1-2]", "gres_detail": ["gpu:h100:2(IDX:0-1)", "shard:1"], "tres_alloc_str": "cpu=2,gres/gpu=4",
    "array_job_id": number(4), "array_task_id": number(0), "het_job_id": number(3), "het_job_offset": number(1),
}  # fmt: skip
