"""The fleet page: who is at risk, found by words, tiers and racks; its charts; who may look."""

import base64
import gzip
import hashlib
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.text import percent
from serving.pages.charts import MAX_NODES, Annotation, draw, risk_chart, shade
from serving.pages.fleet_table import FleetQuery, PageSort, natural, select, table_rows
from serving.scores.reading import PastScore, ScoredFleet, Scores, UnitPlace, read_scores, span
from tests.page import Page
from tests.serving.http.world import DECIDED, NOW, Running, record, running, small_fleet
from tests.serving.pages.page_world import a_week, look
from tests.serving.score_folder import write_scores


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("scores")
    a_week(folder)
    with running(folder) as started:
        yield started


def test_the_riskiest_node_stands_first_with_its_reason(service: Running) -> None:
    page = look(service, "/")
    assert page.column(0) == ["n1", "n2", "n3", "n4", "n5"]
    first = page.rows[1]
    assert first[1:3] == ["high", "90 %"]
    assert "correctable ECC errors rose by 17,700; fleet 99th percentile 0" in first[-1]
    assert page.rows[5][1:3] == ["unknown", "not known"]
    assert "its newest sample is 3 h old" in page.rows[5][-1]
    assert ("/nodes/n1", "n1") in page.links
    assert ("/gpus/GPU-n1-0", "GPU-n1-0") in page.links


def test_a_gpu_of_tier_clear_is_shaded_by_its_risk(service: Running) -> None:
    assert [shade(risk) for risk in (0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0)] == [0, 0, 2, 4, 6, 8]
    shades = {attributes["class"] for tag, attributes in look(service, "/?q=n4").tags if tag == "path"}
    assert "s4" in shades


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("?q=n3", ["n3"]),
        ("?q=gpu-n2-1", ["n2"]),
        ("?tier=high,watch&sort=risk", ["n3", "n1"]),
        ("?sort=-name", ["n5", "n4", "n3", "n2", "n1"]),
        ("?sort=risk", ["n4", "n3", "n2", "n1", "n5"]),
        ("?show=gpus&q=n1", ["GPU-n1-0", "GPU-n1-1"]),
        ("?show=gpus&sort=-name&tier=unknown", ["GPU-n5-0"]),
        ("?q=nowhere", ["No matches. Show all"]),
        ("?rack=&group=&q=&offset=4", ["n5"]),
    ],
)
def test_the_address_says_what_is_shown_and_how(service: Running, query: str, names: list[str]) -> None:
    assert look(service, f"/{query}").column(0) == names


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("?sort=rsk", "did you mean &#39;risk&#39;?"),
        ("?tier=hihg", "did you mean &#39;high&#39;?"),
        ("?limit=7", "choose from 50, 100, 250, 1000"),
        ("?offset=-1", "greater than or equal to 0"),
        ("?colour=red", "parameter &#39;colour&#39; is not known"),
        (f"?q={'x' * 201}", "at most 200 characters"),
        ("?q=%3Cscript%3E&show=%3Cscript%3E", "&lt;script&gt;"),
    ],
)
def test_an_invalid_query_is_reported_on_a_page(service: Running, query: str, message: str) -> None:
    status, body, headers = service.client().send("GET", f"/{query}")
    assert status == 400
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert message in body.decode()
    assert "<script>" not in body.decode()


def test_expired_scores_are_unknown_and_the_page_says_so(tmp_path: Path) -> None:
    write_scores(tmp_path, small_fleet())
    with running(tmp_path, clock=lambda: NOW + timedelta(hours=30)) as late:
        page = look(late, "/")
    assert "Not ready: the scores of 20260101T060000Z have expired" in page.text
    assert set(page.column(1)) == {"unknown"}
    assert "the score has expired" in page.text
    assert "90 %" not in page.text


def test_scores_ahead_of_the_servers_clock_are_not_of_a_negative_age(tmp_path: Path) -> None:
    write_scores(tmp_path, small_fleet())
    with running(tmp_path, clock=lambda: DECIDED - timedelta(seconds=48)) as early:
        page = look(early, "/")
    assert "dated 48 s ahead of this server's clock" in page.text
    assert "-48" not in page.text


def test_without_scores_the_page_says_why(tmp_path: Path) -> None:
    with running(tmp_path, wait_for_scores=False) as started:
        for path in ("/", "/nodes/n1", "/gpus/GPU-n1-0"):
            status, body, headers = started.client().send("GET", path)
            assert status == 503
            assert headers["Retry-After"] == "10"
            assert "No scores can be served" in body.decode()


def test_names_from_outside_are_text_and_never_markup(tmp_path: Path) -> None:
    name = 'n"><script>alert(1)</script>&/../?#'
    write_scores(tmp_path, [record(f"GPU {name}", name, 0.9, "high")])
    with running(tmp_path) as started:
        for path in ("/", "/?show=gpus"):
            page = look(started, path)
            link = next(href for href, text in page.links if text == page.column(0)[0])
            assert name in look(started, link).text
            body = started.client().send("GET", path)[1].decode()
            assert "<script>alert" not in body


def test_pages_are_compressed_where_the_browser_takes_that(service: Running) -> None:
    plain = service.client().send("GET", "/")[1]
    _, packed, headers = service.client().send("GET", "/", Accept_Encoding="gzip, br")
    assert headers["Content-Encoding"] == "gzip"
    assert len(packed) < len(plain) / 2
    assert Page(gzip.decompress(packed).decode()).column(0) == ["n1", "n2", "n3", "n4", "n5"]


def test_pages_hold_no_inline_style_or_script_and_name_no_other_host(service: Running) -> None:
    for path in ("/", "/nodes/n1", "/gpus/GPU-n1-0", "/outcomes", "/ledger"):
        page = look(service, path)
        for tag, attributes in page.tags:
            assert "style" not in attributes
            assert tag != "style"
            assert not [name for name in attributes if name.startswith("on")]
            assert tag != "script" or attributes["src"]
            for name in ("href", "src", "action"):
                assert (attributes.get(name) or "/").startswith(("/", "#")), attributes


def test_a_heat_map_of_too_many_nodes_leaves_out_clear_ones_first(tmp_path: Path) -> None:
    many = MAX_NODES + 10
    records = [record(f"g{i}", f"n{i}", 0.9 if i > many - 6 else 0.001, "high" if i > many - 6 else "clear")
               for i in range(many)]  # fmt: skip
    write_scores(tmp_path, records)
    fleet = ScoredFleet(read_scores(tmp_path))
    nodes, gpus = table_rows(fleet, {}, NOW)
    assert len(nodes) == len(gpus) == many
    drawn = draw(nodes, fleet, NOW)
    assert (drawn.nodes, drawn.left_out) == (MAX_NODES, 10)
    assert str(drawn.blocks[0][1]).count('class="h"') == 5


def test_racks_and_groups_narrow_the_view() -> None:
    rows = {"n1": UnitPlace(rack="rack-2", group="a"), "n2": UnitPlace(rack="rack-10", group="b"), "n3": UnitPlace()}
    fleet = _fleet_of([(name, 0.1) for name in rows])
    places = {f"GPU-{name}": place for name, place in rows.items()}
    nodes, _ = table_rows(fleet, places, NOW)
    assert [row.name for row in select(nodes, FleetQuery(rack="rack-10"))] == ["n2"]
    assert [row.name for row in select(nodes, FleetQuery(group="a"))] == ["n1"]
    assert [row.name for row in select(nodes, FleetQuery(search="RACK-2"))] == ["n1"]
    assert [row.name for row in select(nodes, FleetQuery(sort="rack"))] == ["n1", "n2", "n3"]
    assert [row.name for row in select(nodes, FleetQuery(sort="-rack"))] == ["n2", "n1", "n3"]
    assert [rack for rack, _ in draw(nodes, fleet, NOW).blocks] == ["", "rack-2", "rack-10"]


@given(
    st.lists(st.tuples(st.text("n0123", min_size=1, max_size=4), st.none() | st.floats(0, 1)), min_size=1, max_size=12),
    st.sampled_from(get_args(PageSort)),
    st.text("n01", max_size=2),
)
def test_any_order_keeps_every_row_and_puts_the_unknown_last(nodes, sort, search):
    fleet = _fleet_of(list(dict(nodes).items()))
    rows, _ = table_rows(fleet, {}, NOW)
    selected = select(rows, FleetQuery(sort=sort, search=search))
    assert sorted(row.name for row in selected) == sorted(
        name for name in dict(nodes) if search in name or search in f"gpu-{name}"
    )
    if sort.endswith("risk"):
        risks = [row.risk for row in selected]
        known = [risk for risk in risks if risk is not None]
        assert risks == [*sorted(known, reverse=sort == "-risk"), *[None] * (len(risks) - len(known))]


def _fleet_of(nodes: list[tuple[str, float | None]]) -> ScoredFleet:
    return ScoredFleet(Scores.of([record(f"GPU-{name}", name, risk) for name, risk in nodes], {}))


@pytest.mark.parametrize(("source", "tier"), [("given", "high"), ("a precision of 85 %", "clear")])
def test_eight_gpus_of_low_risk_make_a_high_node_by_a_threshold_of_ones_own_alone(source: str, tier: str) -> None:
    eight = [record(f"GPU-{place}", "node", 0.05) for place in range(8)]
    by = {"thresholds": {"high": 0.3}, "threshold_sources": {"high": source}}
    state = ScoredFleet(Scores.of(eight, by)).state("node", NOW)
    assert state.tier == tier


def test_numbers_in_words() -> None:
    assert [percent(risk) for risk in (None, 0, 0.00002, 0.0005, 0.0123, 0.342, 0.9999, 1)] == [
        "not known", "0 %", "< 0.01 %", "0.05 %", "1.2 %", "34 %", "> 99 %", "100 %",
    ]  # fmt: skip
    assert [span(seconds) for seconds in (None, 12, 720, 18_600, 187_200, 7_200, -60)] == [
        "not known", "12 s", "12 min", "5 h 10 min", "2 d 4 h", "2 h", "-1 min",
    ]  # fmt: skip
    assert sorted(["n10", "n2", "a", "n"], key=natural) == ["a", "n", "n2", "n10"]


READ, WRITE = "read-token-0123456789", "write-token-0123456789"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("access")
    hashes = {scope: hashlib.sha256(token.encode()).hexdigest() for scope, token in (("read", READ), ("write", WRITE))}
    (folder / "tokens").write_text("".join(f"{scope} sha256:{digest}\n" for scope, digest in hashes.items()))
    write_scores(folder / "scores", small_fleet())
    with running(folder / "scores", tokens=folder / "tokens") as started:
        yield started


def password(token: str, user: str = "me") -> str:
    return "Basic " + base64.b64encode(f"{user}:{token}".encode()).decode()


def test_a_browser_is_asked_for_a_token_and_let_in_with_it(guarded: Running) -> None:
    client = guarded.client()
    for path in ("/", "/nodes/n1", "/gpus/GPU-n1-0", "/outcomes", "/ledger?node=n1", "/page/decision"):
        status, body, headers = client.send("GET", path)
        assert status == 401
        assert headers["WWW-Authenticate"].startswith("Basic realm=")
        assert "Send one of the service" in body.decode()
        assert client.send("GET", path, Authorization=password(READ))[0] == 200
    assert guarded.client(READ).send("GET", "/")[0] == 200
    assert client.send("GET", "/page/style.css")[0] == 200


def test_a_password_opens_the_pages_alone(guarded: Running) -> None:
    for path in ("/v1/nodes", "/metrics"):
        status, _, headers = guarded.client().send("GET", path, Authorization=password(READ))
        assert (status, headers["WWW-Authenticate"]) == (401, 'Bearer realm="predrain"')


@pytest.mark.parametrize(
    ("header", "status"),
    [(password("wrong"), 401), (password(""), 401), ("Basic", 401), ("Basic !", 401), ("Basic /w==", 401),
     (f"Basic {READ}", 401), (password(WRITE), 403), (password(READ, ""), 200)],
)  # fmt: skip
def test_another_password_opens_none(guarded: Running, header: str, status: int) -> None:
    assert guarded.client().send("GET", "/", Authorization=header)[0] == status


BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
WORD = re.compile(r'<g class="annotation.*?<text class="tick (end|start)" x="([\d.-]+)" y="([\d.]+)">([^<]*)</text>')


@given(st.lists(st.tuples(st.floats(0, 300), st.sampled_from(["drain", "soft taint", "failure"])), max_size=30))
def test_no_word_of_a_timeline_covers_another_and_every_annotation_has_a_title(happened):
    scores = [PastScore(BEGIN + timedelta(hours=6 * step), 0.1, "watch") for step in range(40)]
    annotations = [Annotation(BEGIN + timedelta(hours=hours), "action", word, word) for hours, word in happened]
    drawn = str(risk_chart(scores, {}, "risk", annotations))
    assert drawn.count('<g class="annotation') == drawn.count("</title><path") == len(annotations)
    taken = []
    for side, beside, line, word in WORD.findall(drawn):
        end = float(beside) if side == "end" else float(beside) + 6.5 * len(word)
        start = end - 6.5 * len(word)
        assert 0 <= start < end <= 720
        assert all(line != other or end <= left or right <= start for left, right, other in taken)
        taken.append((start, end, line))
    assert bool(taken) == bool(annotations)
