"""What the room imports."""

import ast
from pathlib import Path

from tests.processes import printed_by

ROOT = Path(__file__).resolve().parents[2]
READ_BY_ADAPTERS = {"kubernetes": "telemetry.collect.kubernetes.", "slurm": "telemetry.collect.slurm."}


def test_the_room_imports_of_telemetry_little_and_an_adapter_what_reads_the_same_server():
    result = set()
    for path in (ROOT / "scheduler").rglob("*.py"):
        reads = READ_BY_ADAPTERS.get(path.relative_to(ROOT / "scheduler").parts[0], "telemetry.dataset.schema")
        for item in ast.walk(ast.parse(path.read_text())):
            module = (item.module or "") if isinstance(item, ast.ImportFrom) else ""
            if module.split(".")[0] == "telemetry" and not module.startswith(reads):
                result.add(module)
    assert result <= {
        "telemetry.dataset.schema", "telemetry.config", "foundation.errors", "foundation.files", "foundation.http",
        "foundation.yaml", "foundation.instants", "telemetry.identity.nodes",
    }  # fmt: skip


def test_the_controller_needs_none_of_the_learners_nor_pandas():
    heavy = ("pandas", "pyarrow", "sklearn", "lightgbm", "xgboost", "mlflow", "numba", "torch", "scipy")
    code = (
        "import sys\nimport scheduler.controller.controller, scheduler.ledger.sqlite_ledger, scheduler.ledger.reader\n"
        "import scheduler.controller.scores_reader, scheduler.file\n"
        "import scheduler.controller.settings\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    assert printed_by(code).strip() == "[]"
