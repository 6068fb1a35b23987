"""What the service answers of nodes and GPUs, on a real port."""

import math
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.serving.http.world import DECIDED, NOW, Client, record, running, small_fleet
from tests.serving.score_folder import write_scores
from tests.waiting import wait


def names(response: dict[str, Any]) -> list[str]:
    return [node["node"] for node in response["nodes"]]


def test_nodes_come_the_riskiest_first_with_those_of_unknown_risk_last(client: Client) -> None:
    response = client.get("/v1/nodes")
    assert names(response) == ["n1", "n2", "n3", "n4", "n5"]
    assert response["total"] == 5
    assert response["next"] is None
    assert response["decision"] == "20260101T060000Z"
    assert response["decision_time"] == "2026-01-01T06:00:00Z"
    assert response["expires_at"] == "2026-01-01T18:00:00Z"
    assert response["age_seconds"] == 3600
    assert response["horizon_seconds"] == 86400
    assert response["model"] == {"digest": "ab" * 32, "profile": "mean_log_odds", "version": 3}
    first, last = response["nodes"][0], response["nodes"][-1]
    assert first["tier"] == "high"
    assert math.isclose(first["risk"], 1 - 0.1 * 0.9995)
    assert first["counts"] == {"known": 2, "unknown": 0, "expired": 0}
    assert last == {
        "node": "n5",
        "tier": "unknown",
        "risk": None,
        "counts": {"known": 0, "unknown": 1, "expired": 0},
    }


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("-risk", ["n1", "n2", "n3", "n4", "n5"]),
        ("risk", ["n4", "n3", "n2", "n1", "n5"]),
        ("node", ["n1", "n2", "n3", "n4", "n5"]),
        ("-node", ["n5", "n4", "n3", "n2", "n1"]),
    ],
)
def test_nodes_are_sorted_as_asked(client: Client, sort: str, order: list[str]) -> None:
    assert names(client.get(f"/v1/nodes?sort={sort}")) == order


def test_nodes_are_filtered_by_tier(client: Client) -> None:
    assert names(client.get("/v1/nodes?tier=high,watch")) == ["n1", "n3"]
    assert names(client.get("/v1/nodes?tier=high&tier=unknown")) == ["n1", "n5"]


def test_raised_nodes_are_listed_for_sbatch_and_never_more_than_half_of_all(client: Client) -> None:
    assert client.get("/v1/nodes?format=hostlist") == b"n1,n2\n"
    assert client.get("/v1/nodes?format=hostlist&limit=1") == b"n1\n"
    assert client.get("/v1/nodes?format=hostlist&tier=watch") == b"n3\n"
    assert client.get("/v1/nodes?format=hostlist&tier=clear,watch,elevated,high") == b"n1,n2\n"


def test_following_the_pages_gives_each_node_once(client: Client) -> None:
    path, names_seen = "/v1/nodes?limit=2&sort=-node&tier=high,elevated,watch,clear", []
    while path:
        response = client.get(path)
        names_seen += names(response)
        path = response["next"]
    assert names_seen == ["n4", "n3", "n2", "n1"]


@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ("sort=rsk", "sort 'rsk' is not known: did you mean 'risk'?"),
        ("tier=hihg", "tier 'hihg' is not known: did you mean 'high'?"),
        ("limt=3", "query parameter 'limt' is not known: did you mean 'limit'?"),
        ("limit=0", "limit is '0': Input should be greater than or equal to 1"),
        ("limit=1001", "limit is '1001': Input should be less than or equal to 1000"),
        ("offset=%C2%B2", "offset is '²': Input should be a valid integer, unable to parse string as an integer"),
    ],
)
def test_a_wrong_query_is_refused_with_the_nearest_name(client: Client, query: str, detail: str) -> None:
    status, problem, headers = client.send("GET", f"/v1/nodes?{query}")
    assert status == 400
    assert headers["Content-Type"] == "application/problem+json"
    assert problem == {"type": "about:blank", "title": "Bad Request", "status": 400, "detail": detail}


@pytest.mark.parametrize(
    ("path", "status", "detail"),
    [
        ("?decision=20250101T000000Z", 409, "newer scores are served (20260101T060000Z): restart at the first page"),
        ("/n%2F9", 404, "there is no score of node 'n/9'"),
    ],
)
def test_a_page_of_older_scores_and_a_node_without_a_score_are_refused(client, path, status, detail):
    got, problem, _ = client.send("GET", f"/v1/nodes{path}")
    assert (got, problem["detail"]) == (status, detail)


def test_a_node_is_returned_with_its_gpus_and_reasons(client: Client) -> None:
    node = client.get("/v1/nodes/n1")
    assert node["node"] == "n1"
    assert node["tier"] == "high"
    assert [unit["unit"] for unit in node["units"]] == ["GPU-n1-0", "GPU-n1-1"]
    assert node["units"][0]["reasons"] == [
        {
            "text": "correctable ECC errors rose by 17,700; fleet 99th percentile 0",
            "group": "telemetry",
            "share": 0.6,
            "channel": "gpu_temp_c",
        }
    ]
    assert node["sample_age_seconds"] == 600 + 3600
    assert node["expires_at"] == "2026-01-01T18:00:00Z"
    assert node["units"][0]["model"]["version"] == 3


def test_predict_answers_for_many_nodes_and_says_which_are_not_scored(client: Client) -> None:
    response = client.post("/v1/predict", {"nodes": ["n3", "nowhere", "n1", "n3"]})
    assert names(response) == ["n3", "nowhere", "n1", "n3"]
    assert [node["scored"] for node in response["nodes"]] == [True, False, True, True]
    assert response["nodes"][1]["tier"] == "unknown"
    assert response["nodes"][1]["risk"] is None
    assert response["nodes"][0] == response["nodes"][3]
    many = client.post("/v1/predict", {"nodes": [f"n{number % 7}" for number in range(3000)]})
    assert names(many) == [f"n{number % 7}" for number in range(3000)]


def test_predict_answers_for_gpus(client: Client) -> None:
    response = client.post("/v1/predict", {"gpus": ["GPU-n2-0", "GPU-x", "GPU-n5-0"]})
    assert [gpu["tier"] for gpu in response["gpus"]] == ["elevated", "unknown", "unknown"]
    assert [gpu["risk"] for gpu in response["gpus"]] == [0.3, None, None]
    assert [gpu["unknown_reason"] for gpu in response["gpus"]] == [
        None,
        "no score has this name",
        "its newest sample is 3 h old",
    ]


@pytest.mark.parametrize(
    ("body", "status", "detail"),
    [
        ({}, 422, "send exactly one of nodes, gpus, rows"),
        ({"node": ["n1"]}, 422, "key 'node' is not known: did you mean 'nodes'?"),
        ({"nodes": "n1"}, 422, "nodes is not a list of names"),
        ({"nodes": []}, 422, "nodes is empty"),
        ({"nodes": ["n"] * 10_001}, 413, "10001 nodes: ask for at most 10000"),
        ([], 422, "send an object with one of nodes, gpus, rows"),
        ({"rows": [{"a": 1}]}, 409, "feature rows are scored by a service that was started with --model"),
        (b'{"nodes": NaN}', 400, "the body is not JSON, which has no NaN and no infinity"),
        ({"nodes": ["n"] * 10_002}, 413, "the body holds more than 10000 values: send fewer rows"),
        (b"[" * 90_000, 413, "the body holds more than 10064 arrays and objects: send fewer rows"),
    ],
)
def test_a_wrong_prediction_is_refused(client: Client, body: Any, status: int, detail: str) -> None:
    got, problem, headers = client.send("POST", "/v1/predict", body)
    assert (got, problem["detail"].startswith(detail)) == (status, True)
    assert headers["Content-Type"] == "application/problem+json"


def test_another_media_type_is_refused(client: Client) -> None:
    status, problem, _ = client.send("POST", "/v1/predict", b"{}", media="text/plain")
    assert status == 415
    assert problem["detail"] == "send application/json or application/vnd.apache.arrow.stream"


def test_a_path_or_a_method_that_is_none_is_refused(client: Client) -> None:
    assert client.send("GET", "/v2/nodes")[0] == 404
    assert client.send("GET", "/v1/nodes/")[0] == 404
    status, _, headers = client.send("POST", "/v1/nodes", {})
    assert status == 405
    assert headers["Allow"] == "HEAD, GET"
    status, content, headers = client.send("HEAD", "/v1/nodes/n1")
    assert (status, content) == (200, b"")
    assert int(headers["Content-Length"]) > 100


def test_what_has_expired_is_not_a_risk_any_more(tmp_path: Path) -> None:
    units = [record("a", "n1", 0.9, "high", expires=timedelta(hours=2)), record("b", "n1", 0.05, "watch")]
    write_scores(tmp_path, units)
    now = [NOW]
    with running(tmp_path, clock=lambda: now[0]) as service:
        client = service.client()
        assert client.get("/v1/nodes/n1")["tier"] == "high"
        now[0] = DECIDED + timedelta(hours=2)
        node = client.get("/v1/nodes/n1")
        assert (node["tier"], node["risk"]) == ("watch", 0.05)
        assert node["counts"] == {"known": 1, "unknown": 0, "expired": 1}
        gone = next(unit for unit in node["units"] if unit["unit"] == "a")
        assert (gone["status"], gone["risk"], gone["tier"], gone["alert"]) == ("expired", None, "unknown", False)
        assert gone["last_known"] == {"risk": 0.9, "tier": "high"}
        assert gone["unknown_reason"] == "the score expired at 2026-01-01T08:00:00Z"
        assert not node["expired"]
        assert client.get("/readyz")["status"] == "ready"
        now[0] = DECIDED + timedelta(hours=12)
        node = client.get("/v1/nodes/n1")
        assert (node["tier"], node["risk"], node["expired"]) == ("unknown", None, True)
        assert client.get("/v1/nodes")["nodes"][0]["tier"] == "unknown"
        assert client.send("GET", "/v1/nodes?format=hostlist")[0] == 503
        status, problem, _ = client.send("GET", "/readyz")
        assert status == 503
        assert problem["reasons"] == ["the scores of 20260101T060000Z have expired: score the fleet again"]


def test_without_scores_it_lives_and_is_not_ready_until_they_come(tmp_path: Path) -> None:
    folder = tmp_path / "scores"
    with running(folder, wait_for_scores=False) as service:
        client = service.client()
        assert client.get("/healthz") == b"ok\n"
        wait(lambda: "no scores yet" in str(service.service.score_cache.served.error))
        status, problem, _ = client.send("GET", "/readyz")
        assert status == 503
        assert problem["reasons"] == [
            f"no scores can be served: there are no scores yet ({folder / 'latest.json'}). "
            "Run `predrain score` with --out on this folder."
        ]
        status, problem, headers = client.send("GET", "/v1/nodes")
        assert (status, headers["Retry-After"]) == (503, "2")
        assert client.send("POST", "/v1/predict", {"gpus": ["a"]})[0] == 503
        write_scores(folder, small_fleet())
        wait(lambda: client.send("GET", "/readyz")[0] == 200)
        assert client.get("/v1/nodes")["total"] == 5


def test_services_on_the_same_scores_answer_alike_and_a_page_of_one_is_followed_by_the_others(tmp_path: Path) -> None:
    write_scores(tmp_path, small_fleet())
    with running(tmp_path) as other:
        with running(tmp_path) as one:
            first = one.client().get("/v1/nodes?limit=2")
            assert other.client().get("/v1/nodes?limit=2") == first
        second_page = other.client().get(first["next"])  # the one has gone
    assert names(first) + names(second_page) == ["n1", "n2", "n3", "n4"]


def test_a_node_is_found_by_whatever_name_it_is_listed_under(tmp_path: Path) -> None:
    odd = ["a/b", "line\nend", "\r\nn", "n\n", "%2F?#", " "]
    write_scores(tmp_path, [record(f"GPU-{place}", name, 0.5) for place, name in enumerate(odd)])
    with running(tmp_path) as service:
        client = service.client()
        for name in [node["node"] for node in client.get("/v1/nodes")["nodes"]]:
            assert client.get(f"/v1/nodes/{quote(name, safe='')}")["node"] == name
            assert client.send("GET", f"/nodes/{quote(name, safe='')}")[0] == 200
        assert len(client.get("/v1/nodes")["nodes"]) == len(odd)
