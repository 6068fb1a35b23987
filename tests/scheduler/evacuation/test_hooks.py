"""Webhooks and commands, with real servers and real processes."""

import json
import os
import stat
import sys
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from scheduler.evacuation.diagnostics import HookVerification
from scheduler.evacuation.hooks import CommandHook, Webhook
from scheduler.evacuation.settings import CommandSettings, EvacuationSettings, WebhookSettings
from scheduler.ports.codec import object_of
from scheduler.ports.errors import SchedulerError
from scheduler.ports.workloads import Fence
from tests import http_server
from tests.http_server import Handler
from tests.policy.decide_world import T0

ROOT = Path(__file__).parents[3]
KEY = "k" * 32
SECOND = timedelta(seconds=1)


class Asked:
    """What a server was asked, and what it answers: a list of functions, the last one stays."""

    def __init__(self, *answers) -> None:
        self.requests: list[tuple[str, dict[str, str], dict[str, object]]] = []
        self.answers = list(answers)


@contextmanager
def serving(*answers):
    asked = Asked(*answers)

    class Answering(Handler):
        def do_POST(self):
            asked.requests.append((self.path, dict(self.headers), json.loads(self.body())))
            answer = asked.answers.pop(0) if len(asked.answers) > 1 else asked.answers[0]
            answer(self)

    with http_server.serving(Answering) as address:
        yield asked, address.removeprefix("http://")


def says(status, content=None, **headers):
    def answer(handler):
        body = b"" if content is None else json.dumps(content).encode()
        handler.reply(status, body, headers)

    return answer


def page(handler):
    handler.reply(200, b"\n<!DOCTYPE html><title>Sign in</title>", {"Content-Type": "text/html"})


def cut(handler):
    handler.close_connection = True


def halved(handler):
    handler.reply(200, b'{"state": "done"', {"Content-Length": "1000"})
    handler.close_connection = True


def hook(place, **others) -> Webhook:
    settings = WebhookSettings(url=f"http://{place}/hook", **{"timeout": 2 * SECOND, **others})
    return Webhook(settings, "predrain-test/1")


def test_the_token_goes_to_the_address_of_the_settings_alone_whatever_a_workload_or_an_answer_names(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    with (
        serving(says(200)) as (other, elsewhere),
        serving(says(307, None, Location=f"http://{elsewhere}/hook")) as (asked, place),
    ):
        payload = {"kind": "checkpoint", "url": f"http://{place}/admin", "webhook": f"http://{elsewhere}/"}
        reply = hook(place, token_file=str(tmp_path / "token")).tell(payload, KEY)
    assert reply.kind == "refused"
    assert [path for path, _, _ in asked.requests] == ["/hook"]
    assert not other.requests


def test_it_posts_the_payload_with_the_key_and_the_token(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    with serving(says(200)) as (asked, place):
        reply = hook(place, token_file=str(tmp_path / "token")).tell({"kind": "checkpoint", "node": "n1"}, KEY)
    assert reply.kind == "done"
    path, headers, body = asked.requests[0]
    assert (path, body) == ("/hook", {"kind": "checkpoint", "node": "n1"})
    assert headers["Idempotency-Key"] == KEY
    assert headers["Authorization"] == "Bearer secret"
    assert headers["User-Agent"] == "predrain-test/1"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (says(200), "done"),
        (says(202), "waiting"),
        (says(200, {"state": "waiting"}), "waiting"),
        (says(202, {"state": "acknowledged"}), "done"),
        (says(200, {"state": "failed", "message": "no disk"}), "failed"),
        (says(200, {"state": "failed", "message": "cut \ud83d"}), "failed"),
        (says(200, [1, 2]), "done"),
        (page, "timeout"),
        (says(400), "refused"),
        (says(302, None, Location="http://127.0.0.1:1/other"), "refused"),
        (says(500), "timeout"),
        (cut, "timeout"),
        (halved, "timeout"),
    ],
)
def test_what_each_answer_means(answer, kind):
    with serving(answer) as (_, place):
        reply = hook(place).tell({}, KEY)
    assert reply.kind == kind
    assert reply.message.encode(), "the ledger takes no half of a surrogate pair"


def test_a_proxy_of_the_environment_answers_for_nobody(monkeypatch):
    with serving(says(200)) as (proxy, place):
        monkeypatch.setenv("http_proxy", f"http://{place}")
        monkeypatch.delenv("no_proxy", raising=False)
        reply = hook("trainer.invalid:8080").tell({}, KEY)
    assert reply.kind == "timeout"
    assert proxy.requests == []


def test_nobody_there_is_a_timeout_and_a_token_that_cannot_be_read_is_reported(tmp_path):
    with serving(says(200)) as (_, place):
        pass
    assert hook(place).tell({}, KEY).kind == "timeout"
    (tmp_path / "token").write_text("gehe\u00efm")
    for file in ("/nowhere/token", str(tmp_path / "token")):
        assert "the token cannot be read" in hook(place, token_file=file).tell({}, KEY).message


def script(folder, text):
    file = folder / "hook"
    file.write_text(f"#!{sys.executable}\nimport sys, json, time\npayload = json.load(sys.stdin)\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return CommandHook(CommandSettings((str(file), "first arg; rm"), timedelta(seconds=10)))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "done"),
        ("sys.exit(75)", "waiting"),
        ("sys.exit(3)", "failed"),
        ("raise RuntimeError", "failed"),
        ("print('noise'); print(json.dumps({'state': 'waiting'}))", "waiting"),
        ("print('{' * 100000)", "done"),
    ],
)
def test_what_each_exit_of_a_command_means(tmp_path, text, kind):
    assert script(tmp_path, text).tell({"kind": "checkpoint"}, KEY).kind == kind


def test_a_command_gets_its_arguments_as_they_are_and_the_payload_on_its_input(tmp_path):
    command = script(tmp_path, "print(json.dumps({'argv': sys.argv[1:], 'node': payload['node']}))")
    reply = command.tell({"kind": "checkpoint", "node": "n1"}, KEY)
    assert reply.content == {"argv": ["first arg; rm", "checkpoint", KEY], "node": "n1"}


RAY = """#!{python}
import json, pathlib, sys
folder = pathlib.Path({folder!r})
if sys.argv[1] == "list":
    print((folder / "nodes.json").read_text())
else:
    (folder / "asked").write_text("\\n".join(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("state", "head", "message", "kind", "drained"),
    [
        ("ALIVE", False, None, "waiting", True),
        ("DEAD", False, f"Terminated due to preemption: predrain {KEY}: why", "done", False),
        ("DEAD", False, "health check failed", "failed", False),  # that was another time
        ("ALIVE", True, None, "failed", False),
        (None, False, None, "waiting", False),  # Ray does not answer
    ],
)
def test_ray_nodes_are_drained_by_the_deadline_but_never_the_head(
    tmp_path, monkeypatch, state, head, message, kind, drained
):
    node = {"node_id": "ab", "node_ip": "127.0.0.2", "node_name": "127.0.0.2", "is_head_node": head, "state": state}
    (tmp_path / "nodes.json").write_text(json.dumps([node | {"state_message": message}]) if state else "")
    (tmp_path / "ray").write_text(RAY.format(python=sys.executable, folder=str(tmp_path)))
    (tmp_path / "ray").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    command = CommandHook(CommandSettings((str(ROOT / "deploy" / "act" / "ray_drain_node.py"),), timedelta(seconds=30)))
    deadline = datetime.now(UTC) + timedelta(minutes=5)
    asked = {"kind": "checkpoint", "key": KEY, "node": "127.0.0.2", "reason": "why", "deadline": deadline.isoformat()}
    assert command.tell(asked, KEY).kind == kind
    assert (tmp_path / "asked").exists() is drained
    if drained:
        *words, left_s = (tmp_path / "asked").read_text().splitlines()
        assert words == ["drain-node", "--node-id", "ab", "--reason", "DRAIN_NODE_REASON_PREEMPTION",
                         "--reason-message", f"predrain {KEY}: why", "--deadline-remaining-seconds"]  # fmt: skip
        assert 240 < int(left_s) <= 300


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path):
    file = tmp_path / "hook"
    file.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path}/child\nwait\n")
    file.chmod(0o755)
    began = time.monotonic()
    reply = CommandHook(CommandSettings((str(file),), timedelta(seconds=0.5))).tell({"kind": "x"}, KEY)
    assert (reply.kind, time.monotonic() - began < 30) == ("timeout", True)
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        try:
            state = Path(f"/proc/{child}/stat").read_text().split()[2]
        except FileNotFoundError:
            break
        if state == "Z":
            break
        time.sleep(0.02)
    else:
        pytest.fail("the child still runs")


@pytest.mark.parametrize("command", ["yes", "yes >&2"])
def test_a_command_that_writes_without_end_is_killed_before_it_fills_the_disk(command):
    reply = CommandHook(CommandSettings(("/bin/sh", "-c", command), timedelta(seconds=300))).tell({}, KEY)
    assert (reply.kind, "its output exceeds" in reply.message) == ("timeout", True)


def test_a_command_that_is_not_there_is_refused():
    reply = CommandHook(CommandSettings(("/nowhere/hook",))).tell({}, KEY)
    assert (reply.kind, reply.message) == ("refused", "/nowhere/hook: No such file or directory")


def test_a_command_that_leaves_a_child_behind_has_answered():
    reply = CommandHook(CommandSettings(("/bin/sh", "-c", "sleep 60 &"), timedelta(seconds=50))).tell({}, KEY)
    assert reply.kind == "done"


def fence() -> Fence:
    return Fence("p1", T0)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("{'state': 'passed', 'node': 'n1', 'key': KEY}", "passed"),
        ("{'state': 'failed', 'node': 'n1', 'key': KEY, 'failed_units': ['g3']}", "failed"),
        ("{'state': 'passed', 'node': 'n2', 'key': KEY}", "inconclusive"),
        ("{'state': 'passed', 'node': 'n1', 'key': 'old'}", "inconclusive"),
        ("{'state': 'PASS', 'node': 'n1', 'key': KEY}", "inconclusive"),
        ("{'state': 'running'}", "running"),
        ("{}", "inconclusive"),
    ],
)
def test_a_diagnostic_counts_only_where_it_reports_of_which_node_and_run_it_is(tmp_path, answer, kind):
    verification = HookVerification(script(tmp_path, f"KEY = '{KEY}'\nprint(json.dumps({answer}))"))
    assert verification.start("n1", ("g3",), KEY, fence(), None, probe=False).kind in ("done", "refused")
    result = verification.result("n1", KEY)
    assert result.kind == kind
    assert result.failed_units == (("g3",) if kind == "failed" else ())


def test_a_diagnostic_that_crashes_after_it_reported_passed_is_inconclusive(tmp_path):
    verification = HookVerification(
        script(tmp_path, f"print(json.dumps({{'state': 'passed', 'node': 'n1', 'key': '{KEY}'}})); sys.exit(1)")
    )
    assert verification.result("n1", KEY).kind == "inconclusive"


def test_a_result_that_cannot_be_asked_for_is_no_result():
    verification = HookVerification(CommandHook(CommandSettings(("/nowhere/diag",))))
    with pytest.raises(SchedulerError, match="the result of the diagnostic on n1"):
        verification.result("n1", KEY)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"chekpoint": {}}, "evacuation.chekpoint: unknown key. Did you mean 'checkpoint'?"),
        ({"checkpoint": {"default": "webhook"}}, "default is 'webhook': give the webhook"),
        ({"checkpoint": {"command": {"argv": ["tell"]}}}, r"argv is \['tell'\]: give the program by its absolute path"),
        ({"checkpoint": {"webhook": {"url": "ftp://x"}}}, "url is 'ftp://x': give an http or https address"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_with_their_place(content, message):
    with pytest.raises(ValueError, match=message):
        object_of(EvacuationSettings, content, "evacuation")
