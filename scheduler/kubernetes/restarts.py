"""Whether a pod's controller restarts it after an eviction: Jobs, JobSets, Volcano, MPI and one-shot kinds."""

import re
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Final
from urllib.parse import quote

from foundation.kubernetes.api import Object
from scheduler.kubernetes.api import CachedReads, UndecidedError
from scheduler.ports.codec import instant

_ENDS_BY_NAME: Final = re.compile(
    "(job|run|runner|task|workflow|pipeline|build|trial|experiment|session|application|machineinstance)$", re.IGNORECASE
)
_KNOWN: Final = ("batch", "batch.volcano.sh", "kubeflow.org")  # API groups whose retries are read
_HEADS: Final = (("ray.io/node-type", "head", "Ray"), ("dask.org/component", "scheduler", "Dask"))
_ENDS: Final = ("AbortJob", "TerminateJob", "CompleteJob")  # actions of a Volcano policy
_ON_EVICTION: Final = {"PodEvicted", "PodFailed", "*"}  # an evicted pod fails before it is removed
_RETRIES: Final = 6  # default backoffLimit of a Job
_VOLCANO_RETRIES: Final = 3  # default maxRetry of a Volcano Job
_REPLICATED_JOB: Final = "jobset.sigs.k8s.io/replicatedjob-name"
_INDEX_FAILURES: Final = "batch.kubernetes.io/job-index-failure-count"
_BY_SIGNAL: Final = (137, 143)  # exit codes after SIGKILL and SIGTERM


class RestartCheck:
    """Decides about pods, based on their controllers as read within the last 30 s."""

    def __init__(self, reads: CachedReads, now: Callable[[], datetime]) -> None:
        self._reads, self._now = reads, now

    def permanent_failure(self, pod: Object, owner: Object, since: datetime | None = None) -> str | None:
        """Return why an eviction would fail a pod's job; None if its controller would replace the pod.

        ``since``: start of the work that a new pod would repeat; None: unknown, or a checkpoint is requested first.
        """
        group, kind, name = str(owner.get("apiVersion")).partition("/")[0], owner.get("kind"), owner["name"]
        labels, mpi = pod["metadata"].get("labels") or {}, (group, kind) == ("kubeflow.org", "MPIJob")
        is_final = group == "kubeflow.org" and not mpi and (pod.get("spec") or {}).get("restartPolicy") == "Never"
        if is_final or (group not in _KNOWN and _ENDS_BY_NAME.search(str(kind))):
            return f"{kind} {name} runs to completion, and might not restart an evicted pod"
        cluster = next((tool for key, value, tool in _HEADS if labels.get(key) == value), None)
        if cluster is not None and labels.get("ray.io/originated-from-crd") != "RayService":
            return f"it is the head of {cluster} cluster {name}, whose jobs end with it"
        try:
            if (group, kind) == ("batch.volcano.sh", "Job"):
                job = self._reads.object(_path(pod, "batch.volcano.sh/v1alpha1", "jobs", name), "jobs.batch.volcano.sh")
                return _fails_volcano(job, labels.get("volcano.sh/task-spec"))
            if group == "kubeflow.org" and not mpi and str(kind).endswith("Job"):
                resource = f"{str(kind).lower()}s"
                job = self._reads.object(_path(pod, "kubeflow.org/v1", resource, name), f"{resource}.kubeflow.org")
                # Only 0 is certain: the operator counts retries in memory, where they cannot be read.
                fails = (job["spec"].get("runPolicy") or {}).get("backoffLimit") == 0
                return f"{kind} {name} has a backoffLimit of 0, and an eviction counts as a failure" if fails else None
            if mpi:  # mpirun in the launcher fails with any of its workers
                name = f"{name}-launcher"
            elif (group, kind) != ("batch", "Job"):
                return None
            job = self._reads.object(_path(pod, "batch/v1", "jobs", name), "jobs")
            controllers = [ref for ref in job["metadata"].get("ownerReferences") or () if ref.get("controller")]
            if any(ref.get("kind") == "AppWrapper" for ref in controllers):  # it restarts its Jobs
                return None
            index_failures = (pod["metadata"].get("annotations") or {}).get(_INDEX_FAILURES)
            late = None if since is None else _late(job, since, self._now())
            for reason, why in filter(None, (_fails(job, index_failures), late)):
                jobsets = [ref["name"] for ref in controllers if ref["kind"] == "JobSet"]
                part = (job["metadata"].get("labels") or {}).get(_REPLICATED_JOB)
                if not any(_restarts(self._jobset(pod, jobset), part, reason) for jobset in jobsets):
                    also = "".join(f", and JobSet {jobset} would not restart it" for jobset in jobsets)
                    return f"Job {name} would fail permanently: {why}{also}"
            return None
        except UndecidedError as undecided:
            return f"cannot determine whether {kind} {name} would restart it: {undecided}"
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            return f"cannot determine whether {kind} {name} would restart it: {error!r}"

    def _jobset(self, pod: Object, name: str) -> Object:
        return self._reads.object(_path(pod, "jobset.x-k8s.io/v1alpha2", "jobsets", name), "jobsets")


def _path(pod: Object, group: str, resource: str, name: str) -> str:
    namespace = quote(pod["metadata"].get("namespace") or "default", safe="")
    return f"/apis/{group}/namespaces/{namespace}/{resource}/{quote(name, safe='')}"


def _late(job: Object, since: datetime, now: datetime) -> tuple[str, str] | None:
    """Return reason and message if a Job ends before a new pod could have repeated the work so far."""
    started, limit_s = instant((job.get("status") or {}).get("startTime")), job["spec"].get("activeDeadlineSeconds")
    if started is None or limit_s is None or (now - started + (now - since)).total_seconds() < limit_s:
        return None
    return "DeadlineExceeded", "its activeDeadlineSeconds leaves too little time to repeat the work"


def _fails(job: Object, index_failures: object) -> tuple[str, str] | None:
    """Return reason and message with which a Job fails after one more eviction; None if it creates another pod."""
    spec, status = job["spec"], job.get("status") or {}
    decided = _action_on_eviction((spec.get("podFailurePolicy") or {}).get("rules") or ())
    if decided == "Ignore":
        return None
    if decided in ("FailJob", "FailIndex"):
        reason = "PodFailurePolicy" if decided == "FailJob" else "FailedIndexes"
        return reason, f"its podFailurePolicy has {decided} for an eviction"
    reason, limit, failures = "BackoffLimitExceeded", spec.get("backoffLimit", _RETRIES), status.get("failed") or 0
    if spec.get("backoffLimitPerIndex") is not None:
        reason, limit, failures = "FailedIndexes", spec["backoffLimitPerIndex"], index_failures or 0
    return None if int(limit) > int(failures) else (reason, "an eviction counts as a failure, and no retry is left")


def _restarts(jobset: Object, part: str | None, reason: str) -> bool:
    """Whether a JobSet restarts after one of its Jobs failed; the first matching rule decides.

    The failure message is unknown: a rule on it counts only if it would fail the JobSet.
    """
    policy, status = (jobset.get("spec") or {}).get("failurePolicy") or {}, jobset.get("status") or {}
    for rule in policy.get("rules") or ():
        action = str(rule.get("action"))
        matches = reason in (rule.get("onJobFailureReasons") or (reason,))
        matches = matches and part in (rule.get("targetReplicatedJobs") or (part,))
        if matches and (action == "FailJobSet" or not rule.get("onJobFailureMessagePatterns")):
            if action == "FailJobSet" or action.endswith("IgnoreMaxRestarts"):
                return action != "FailJobSet"
            break
    restarts = status.get("restartsCountTowardsMax", status.get("restarts"))
    return int(policy.get("maxRestarts") or 0) > int(restarts or 0)


def _fails_volcano(job: Object, task: str | None) -> str | None:
    """Return why a Volcano Job ends when a pod of a task is evicted; None if it creates another pod."""
    spec, name = job["spec"], job["metadata"]["name"]
    retries = int(spec.get("maxRetry") or _VOLCANO_RETRIES) - int((job.get("status") or {}).get("retryCount") or 0)
    of_task = [policy for entry in spec.get("tasks") or () if entry.get("name") == task
               for policy in entry.get("policies") or ()]  # fmt: skip
    for policy in (*of_task, *(spec.get("policies") or ())):
        action = str(policy.get("action"))
        if not _ON_EVICTION & {policy.get("event"), *(policy.get("events") or ())}:
            continue
        if action in _ENDS:
            return f"Job {name} ends with an evicted pod (policy {action})"
        if action.startswith("Restart") and retries <= 1:
            return f"Job {name} would fail: an evicted pod restarts it (policy {action}), and no retry is left"
    return None


def _action_on_eviction(rules: Iterable[Object]) -> str | None:
    """Return the action of a pod failure policy on an evicted pod; the first matching rule decides.

    The pod's exit code is unknown: a rule on exit codes counts only if it could fail the Job.
    """
    for rule in rules:
        codes, action = rule.get("onExitCodes"), str(rule.get("action"))
        excluded = codes is not None and set(_BY_SIGNAL) <= set(codes.get("values") or ())
        by_code = codes is not None and action.startswith("Fail") and (
            bool(set(_BY_SIGNAL) & set(codes.get("values") or ())) if codes.get("operator") == "In" else not excluded
        )  # fmt: skip
        if by_code or any(
            condition.get("type") == "DisruptionTarget" and condition.get("status", "True") == "True"
            for condition in rule.get("onPodConditions") or ()
        ):
            return action
    return None
