"""One replica writes: the Lease, whatever the clocks of the machines say, and the state that fences what is left."""

import threading
from datetime import timedelta

import pytest

from foundation.kubernetes.client import KubernetesClient
from scheduler.kubernetes.scheduler import KubernetesScheduler
from scheduler.ports.clock import ManualClock
from scheduler.ports.errors import SchedulerError
from tests.clock import Clock
from tests.scheduler.kubernetes.api_world import World
from tests.scheduler.kubernetes.objects import LASTS, SETTINGS, T0

LATER = T0 + timedelta(days=9)

LEASE = "/apis/coordination.k8s.io/v1/namespaces/predrain/leases/predrain-controller"
STATE = "/api/v1/namespaces/predrain/configmaps/predrain-state"


class Replica:
    """A process with clocks of its own."""

    def __init__(self, cluster: KubernetesClient, name: str, *, skew: timedelta = timedelta(0), **how: bool) -> None:
        self.name = name
        self.clock = ManualClock(T0 + skew)
        self.elapsed = Clock()
        self.scheduler = KubernetesScheduler(
            cluster, self.clock, SETTINGS, **how, elapsed=self.elapsed.monotonic, sleep=self.elapsed.sleep
        )

    def take(self) -> bool:
        return self.scheduler.hold_lease(self.name, LASTS) is not None

    def later(self, seconds: float) -> None:
        self.clock.move(timedelta(seconds=seconds))
        self.elapsed.move(seconds=seconds)


def test_one_of_two_holds_it_and_prolongs_it(cluster: KubernetesClient, world: World) -> None:
    one, two = Replica(cluster, "one"), Replica(cluster, "two")
    assert one.scheduler.hold_lease("one", LASTS) == T0 + LASTS
    assert not two.take()
    for _ in range(4):
        one.later(20)
        two.later(20)
        assert one.take()
        assert not two.take(), "it was renewed since"
    spec = world.objects[LEASE]["spec"]
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("one", 30, 0)
    assert spec["acquireTime"] == "2026-11-21T12:00:00.000000Z"
    assert spec["renewTime"] == "2026-11-21T12:01:20.000000Z"


@pytest.mark.parametrize("skew", [timedelta(days=-400), timedelta(0), timedelta(days=400)])
def test_a_dead_holders_lease_is_over_when_it_stood_unchanged_for_its_time(cluster, skew):
    one, two = Replica(cluster, "one", skew=skew), Replica(cluster, "two")
    assert one.take()
    assert not two.take()
    two.later(29)
    assert not two.take(), "whatever the other's clock says"
    two.later(2)
    assert two.take()
    assert not one.take(), "it sees that it lost it"


def test_a_clock_that_is_set_back_prolongs_nothing(cluster: KubernetesClient) -> None:
    one = Replica(cluster, "one")
    assert one.take()
    one.clock.move(-timedelta(hours=2))
    one.elapsed.move(seconds=31)
    assert one.scheduler.leadership.blocked("one", LATER) == "the lease of one has expired"
    one.clock.move(timedelta(hours=9))
    assert one.take()
    one.clock.move(timedelta(seconds=31))
    assert one.scheduler.leadership.blocked("one", LATER) == "the lease of one has expired", (
        "set forward, it ends sooner"
    )


def test_a_lease_that_is_given_back_is_free_at_once(cluster: KubernetesClient) -> None:
    one, two = Replica(cluster, "one"), Replica(cluster, "two")
    assert one.take()
    assert not two.take()
    two.scheduler.drop_lease("two")  # not its own: nothing happens
    assert not two.take()
    one.scheduler.drop_lease("one")
    assert two.take()


def test_a_standby_does_not_watch_pods(cluster: KubernetesClient) -> None:
    one, two = Replica(cluster, "one", follows=True), Replica(cluster, "two")
    assert one.take()
    one.scheduler.read_fleet()
    assert one.scheduler._pods.watched
    one.scheduler.drop_lease("one")
    assert two.take()
    one.scheduler.read_fleet()
    assert not one.take()
    assert not one.scheduler._pods.watched


def test_a_process_of_one_round_waits_until_it_knows(cluster: KubernetesClient) -> None:
    assert Replica(cluster, "dead").take()
    once = Replica(cluster, "once", waits=True)
    assert once.take()
    assert 30 <= once.elapsed.seconds <= 32
    again = Replica(cluster, "again", waits=True)
    sleep = again.elapsed.sleep

    def renewed_meanwhile(seconds: float) -> None:
        sleep(seconds)
        once.clock.move(timedelta(seconds=1))
        assert once.take()

    again.scheduler.leadership._sleep = renewed_meanwhile
    assert not again.take(), "it was renewed while it looked"
    assert again.elapsed.seconds <= 2


def test_of_two_that_take_a_free_lease_at_once_one_gets_it(cluster: KubernetesClient) -> None:
    replicas = [Replica(cluster, f"r{i}") for i in range(4)]
    gate = threading.Barrier(4)
    held = []

    def take(replica: Replica) -> None:
        gate.wait()
        if replica.take():
            held.append(replica.name)

    threads = [threading.Thread(target=take, args=(item,)) for item in replicas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 1


def test_a_lease_of_which_nothing_is_known_is_not_held(cluster: KubernetesClient, world: World) -> None:
    one = Replica(cluster, "one")
    world.fail("POST", "leases", 503, times=99)
    with pytest.raises(SchedulerError, match="HTTP 503"):
        one.take()
    assert one.scheduler.leadership.blocked("one", LATER) == "one does not hold the lease"
    world.faults.clear()
    assert one.take()
    world.fail("PUT", "leases", 403, content={"message": "forbidden"})
    with pytest.raises(SchedulerError, match="HTTP 403: forbidden"):
        one.take()
    assert one.scheduler.leadership.blocked("one", LATER) is not None


def test_a_renewal_whose_answer_was_lost_is_known_for_ours(cluster: KubernetesClient, world: World) -> None:
    one = Replica(cluster, "one")
    assert one.take()
    world.fail("PUT", "leases", after=True)
    assert one.take()
    assert one.scheduler.leadership.blocked("one", LATER) is None


def test_the_state_is_kept_under_its_version_whatever_people_write_beside_it(cluster, world):
    one, two = Replica(cluster, "one").scheduler, Replica(cluster, "two").scheduler
    empty = one.load_state()
    assert empty.text is None
    saved = one.save_state("first", empty.version)
    assert saved.kind == "done"
    assert two.save_state("other", empty.version).kind == "conflict"
    world.edit(STATE, lambda raw: raw["metadata"].update(annotations={"predrain.io/kill": "true"}))
    assert saved.version is not None
    again = one.save_state("second", saved.version)
    assert again.kind == "done"
    assert (two.load_state().text, two.load_state().version) == ("second", again.version)
    assert world.objects[STATE]["metadata"]["annotations"] == {"predrain.io/kill": "true"}


def test_a_writing_between_reading_and_replacing_is_seen(cluster: KubernetesClient, world: World) -> None:
    one, two = Replica(cluster, "one").scheduler, Replica(cluster, "two").scheduler
    first = one.save_state("first", one.load_state().version)
    assert first.version is not None

    def other() -> None:
        two.save_state("other's", first.version or "")

    world.fail("PUT", "configmaps", 409, content={"message": "modified"}, then=other)
    assert one.save_state("mine", first.version).kind == "conflict"
    assert one.load_state().text == "other's"


def test_a_state_whose_answer_was_lost_is_known_for_ours(cluster: KubernetesClient, world: World) -> None:
    one = Replica(cluster, "one").scheduler
    world.fail("POST", "configmaps", after=True)
    first = one.save_state("first", one.load_state().version)
    assert first.kind == "done"
    world.fail("PUT", "configmaps", after=True)
    second = one.save_state("second", first.version or "")
    assert (second.kind, second.version) == ("done", one.load_state().version)


def test_a_namespace_that_is_not_there_is_reported(cluster: KubernetesClient, world: World) -> None:
    one = Replica(cluster, "one").scheduler
    world.fail("POST", "configmaps", 404, content={"message": 'namespaces "predrain" not found'})
    answer = one.save_state("first", one.load_state().version)
    assert (answer.kind, answer.message) == (
        "refused", 'HTTP 404: namespaces "predrain" not found (is there a namespace predrain?)',
    )  # fmt: skip
